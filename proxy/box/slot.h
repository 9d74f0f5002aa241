// One slot of a box: its states, and what each thing that happens does to it.
//
//   SCRUBBING → VALIDATING → IDLE → STARTING → SERVING → STOPPING → SCRUBBING …    FAILED → SCRUBBING after a while
//
// What this is: decisions. A slot begins dirty unless a live worker was found to adopt; no state but VALIDATING leads
// to IDLE, so nothing a tenant stored is lent on. What it is not: it starts no process and touches no socket; SlotWorld
// does, and a fake of it makes the whole machine testable in one thread.
//
// Threads: one. All calls come from boxd's loop; calls into SlotWorld must not call back into the slot.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proxy/base/clock.h"
#include "proxy/box/slot_record.h"

namespace dxpu::box {

enum class SlotState { kScrubbing, kValidating, kIdle, kStarting, kServing, kStopping, kFailed };
const char* name_of(SlotState state);
// The whole table of legal changes.
bool allowed(SlotState from, SlotState to);

// What a worker says about itself.
struct WorkerStatus {
  std::string box_id;
  uint32_t slot = 0;
  std::string attachment_id;
  uint64_t generation = 0;  // of the session, or of its start before one came
  int32_t pid = 0;
  uint64_t epoch = 0;  // of the session, or of the last one
  bool session_up = false;
  absl::Duration heard_ago = absl::InfiniteDuration();  // since the host was last heard; infinite: never
};

enum class WorkerEnd { kStopped, kLeaseExpired, kDied };

class SlotWorld {
 public:
  virtual ~SlotWorld() = default;
  // A fresh process that wipes, or reads back and tests. Ends in Slot::job_ended.
  virtual void start_scrub(uint32_t slot) = 0;
  virtual void start_validate(uint32_t slot) = 0;
  // A fresh process that serves. Then Slot::worker_status or Slot::worker_ended.
  virtual void start_worker(uint32_t slot, const SlotTicket& ticket) = 0;
  virtual void stop_worker(uint32_t slot) = 0;  // asked politely
  virtual void kill_child(uint32_t slot) = 0;   // whatever runs in the slot now
  virtual absl::Status save(const SlotRecord& record) = 0;
  virtual void changed(uint32_t slot) = 0;
  virtual void event(const std::string& type, uint32_t slot, const std::string& message,
                     const std::string& attachment_id) = 0;
};

struct SlotDeadlines {
  absl::Duration scrub = absl::Minutes(2);
  absl::Duration validate = absl::Minutes(2);
  absl::Duration start = absl::Seconds(10);
  absl::Duration stop = absl::Seconds(3);
  absl::Duration first_retry = absl::Seconds(2);  // of FAILED; doubles
  absl::Duration longest_retry = absl::Minutes(1);
};

class Slot {
 public:
  Slot(std::string box_id, SlotRecord record, SlotDeadlines deadlines, SlotWorld& world, base::Clock& clock);

  // Exactly one of these two, once. begin(): no worker lives. adopt(): one does, found by its control socket.
  void begin();
  void adopt(const WorkerStatus& worker);

  void want_nothing();
  void want(const SlotTicket& ticket);

  void job_ended(const absl::Status& result);
  void worker_status(const WorkerStatus& status);
  void worker_ended(WorkerEnd end, const std::string& detail);

  // A host showed `shown`. kNone: admitted, the ticket is used up and recorded as such, `epoch` names the new epoch;
  // the caller hands the socket to the worker. Else the reason to refuse with, and `detail` for people.
  fabric::TerminateReason admit(const fabric::Ticket& shown, uint64_t* epoch, std::string* detail);

  // Acts on deadlines that have passed; returns how long until the next one (infinite: none).
  absl::Duration tick();

  SlotState state() const { return state_; }
  const SlotRecord& record() const { return record_; }
  const std::string& detail() const { return detail_; }
  const WorkerStatus& worker() const { return worker_; }
  // Wall time of the last renewal; infinite past when the host was never heard.
  absl::Time lease_renewed() const { return lease_renewed_; }
  // The host of the wanted or served attachment, for the mapping table.
  std::string host_id() const { return record_.wanted ? record_.wanted->host_id : ""; }
  bool session_up() const;

 private:
  void move_to(SlotState to, const std::string& detail);
  void next();  // from IDLE, SERVING or STARTING to what is wanted
  void save();

  const std::string box_id_;
  SlotRecord record_;
  const SlotDeadlines deadlines_;
  SlotWorld& world_;
  base::Clock& clock_;
  SlotState state_ = SlotState::kFailed;  // until begin() or adopt()
  std::string detail_;
  WorkerStatus worker_;
  absl::Time lease_renewed_ = absl::InfinitePast();
  absl::Duration deadline_ = absl::InfiniteDuration();  // monotonic
  absl::Duration retry_;
  bool killed_ = false;
  bool epoch_recorded_ = true;
};

}  // namespace dxpu::box
