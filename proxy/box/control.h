// What boxd and a worker say to each other: a UNIX SOCK_SEQPACKET socket, one JSON object a message, descriptors beside
// it.
//
// boxd binds runtime-dir/slot-N.sock and hands the listening socket to the worker at its start, so there is no moment
// at which a live worker can not be found by it. A worker takes any number of connections, one after another: that is
// how a restarted boxd adopts it. Right after accept the worker sends its status, then again after each change and each
// renewal of the lease.
//
// Both ends are ours and of one machine, but not always of one release: unknown fields are ignored, unknown messages
// too. Nothing here blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "proxy/base/unique_fd.h"
#include "proxy/box/slot.h"

namespace dxpu::box {

// boxd → worker. The connected fabric socket travels beside it.
struct SessionMessage {
  uint64_t epoch = 0;
  std::string hello;  // fabric::serialize
};
// boxd → worker: end the session, then yourself.
struct StopMessage {};
// worker → boxd.
struct StatusMessage {
  WorkerStatus status;
};
// worker → boxd, the last message: why it ends.
struct EndedMessage {
  WorkerEnd end = WorkerEnd::kStopped;
  std::string detail;
};
using ControlMessage = std::variant<SessionMessage, StopMessage, StatusMessage, EndedMessage>;

std::string encode(const ControlMessage& message);
// INVALID_ARGUMENT: not a message; UNIMPLEMENTED: of a kind this release does not know.
absl::StatusOr<ControlMessage> decode(const std::string& text);

inline constexpr size_t kMaxControlBytes = 16 << 10;

absl::StatusOr<base::UniqueFd> control_listen(const std::string& path);
// UNAVAILABLE: nobody listens there. NOT_FOUND: no such socket.
absl::StatusOr<base::UniqueFd> control_connect(const std::string& path);
// nullopt: nobody waits.
absl::StatusOr<std::optional<base::UniqueFd>> control_accept(int listener);
// `passed` stays the caller's. RESOURCE_EXHAUSTED: the peer does not read.
absl::Status control_send(int socket, const ControlMessage& message, int passed = -1);
// The descriptor that came with the message, if one did, goes to `passed`. nullopt: nothing there now. UNAVAILABLE: end
// of stream.
absl::StatusOr<std::optional<ControlMessage>> control_receive(int socket, base::UniqueFd* passed);

}  // namespace dxpu::box
