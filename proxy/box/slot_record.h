// What a box remembers of a slot across its own death: the ticket it may admit, the epoch, who was served last.
//
// One small file per slot, replaced atomically and synced before anything depends on it. The file holds a ticket's
// token: the runtime directory is 0700 and the file 0600.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/fabric/session.h"

namespace dxpu::box {

// Who may open one epoch on the slot.
struct SlotTicket {
  std::string host_id;
  std::string attachment_id;
  uint64_t generation = 0;
  std::array<std::byte, fabric::kTokenBytes> token{};
  absl::Time expires = absl::InfiniteFuture();
  bool used = false;
  bool operator==(const SlotTicket&) const = default;
};

struct SlotRecord {
  uint32_t slot = 0;
  std::optional<SlotTicket> wanted;  // the last serve intent; nothing: hold nothing
  uint64_t epoch = 0;                // of the last session admitted; only rises
  // The last attachment that was served. Unless a worker serves it now it is over and is never served again: its memory
  // is gone.
  std::string served_attachment;
  uint64_t served_generation = 0;
  bool lease_expired = false;  // that is how it ended
  bool operator==(const SlotRecord&) const = default;
};

std::string encode(const SlotRecord& record);
// DATA_LOSS: not a record of ours, damaged, or of another slot.
absl::StatusOr<SlotRecord> decode(const std::string& text, uint32_t slot);

// NOT_FOUND when there is none yet.
absl::StatusOr<SlotRecord> load(const std::string& path, uint32_t slot);
// On the disk when it returns OK; the old file is whole otherwise.
absl::Status save(const std::string& path, const SlotRecord& record);

// Whether `shown` opens an epoch. kNone: yes. `serving`: a worker runs for wanted->attachment_id. The token is compared
// in constant time. An older generation of the same attachment is kTicketStale whatever its token: its holder asks for
// a new one.
fabric::TerminateReason check_ticket(const SlotRecord& record, const std::string& box_id, bool serving,
                                     const fabric::Ticket& shown, absl::Time now);

}  // namespace dxpu::box
