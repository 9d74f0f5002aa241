// The two ends of a fabric session, as the rest of dxpu uses them.
//
//   host:  RemoteFunction::connect(transport, hello) → a Function whose other end is a session
//   box:   read_hello() → check the ticket → FunctionServer(function).serve(transport, hello)
//
// What this is: TLPs over one ordered byte stream, requests in both directions at once, a tag table with generations, a
// deadline for every non-posted request, keep-alive. What it is not: it never knows what a GPU is. Wire: docs/wire.md.
//
// In this version a broken transport ends the session (and the epoch). Replay across reconnects will live behind the
// same two classes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/base/clock.h"
#include "proxy/fabric/transport/transport.h"
#include "proxy/function/blocking_reads.h"
#include "proxy/function/function.h"

namespace dxpu::fabric {

// Deadlines. One rule: read < fast_io_fail < ctrl_loss < lease.
struct Deadlines {
  absl::Duration read = absl::Milliseconds(50);    // any non-posted request; then CTO
  absl::Duration fast_io_fail = absl::Seconds(2);  // a posted write without room; then the epoch ends
  absl::Duration ctrl_loss = absl::Seconds(5);     // nothing heard from the peer; then the session is dead
  absl::Duration lease = absl::Seconds(15);        // the box takes the function back
  absl::Duration keep_alive = absl::Seconds(1);    // ping interval, both ways
};
// INVALID_ARGUMENT names the two values that break the rule.
absl::Status check(const Deadlines& deadlines);

struct SessionOptions {
  Deadlines deadlines;
  uint32_t max_payload = 4096;       // MPS offered: 128 … 4096, power of two
  uint32_t max_read_request = 4096;  // MRRS offered
  uint32_t read_completion_boundary = 128;
  uint32_t max_outstanding = 256;  // non-posted requests in flight we accept from the peer, 1 … 1024
  base::Clock* clock = &base::Clock::real();
};

inline constexpr size_t kTokenBytes = 32;

// What a host shows to open one epoch on one slot. Strings at most kMaxIdBytes.
inline constexpr size_t kMaxIdBytes = 64;
struct Ticket {
  std::string host_id;
  std::string box_id;
  uint32_t slot = 0;
  std::string attachment_id;
  uint64_t generation = 0;
  std::array<std::byte, kTokenBytes> token{};
};

// The host's first frame, decoded. Unknown mandatory features and unknown versions are refused by read_hello itself.
struct Hello {
  uint16_t version = 0;  // the highest common one
  uint64_t features = 0;
  uint32_t max_payload = 0;
  uint32_t max_read_request = 0;
  uint32_t read_completion_boundary = 0;
  uint32_t max_outstanding = 0;
  absl::Duration keep_alive;
  Ticket ticket;
};

// Why a session or a hello was refused; travels in the Terminate frame.
enum class TerminateReason : uint16_t {
  kNone = 0,
  kShutdown = 1,       // orderly
  kProtocolError = 2,  // `offset` names the offending byte of the frame
  kVersion = 3,
  kTicketUnknown = 4,  // no such slot is meant for that host
  kTicketStale = 5,    // older generation, used up, or expired
  kBusy = 6,           // the slot still serves or scrubs
  kLeaseExpired = 7,
  kFunctionFailed = 8,
  kKeepAliveLost = 9,
  kOverCredit = 10,
};
const char* name_of(TerminateReason reason);
// The reason behind an error of this room, kNone when no Terminate was behind it.
TerminateReason reason_of(const absl::Status& status);

// Box: takes exactly one hello frame off `transport` (never a byte more, so that the socket can be handed on) within
// `deadline`. On a bad hello the Terminate has been sent already and the error returned.
absl::StatusOr<Hello> read_hello(Transport& transport, absl::Duration deadline);
absl::Status send_terminate(Transport& transport, TerminateReason reason, uint32_t offset, const std::string& detail);

// A hello as bytes, to hand it with the socket to another process (boxd → worker).
std::string serialize(const Hello& hello);
absl::StatusOr<Hello> parse_hello(std::string_view bytes);

// Counters of one session end; cheap enough to stay on. Every rare branch has one.
struct SessionStats {
  uint64_t tlps_sent = 0, tlps_received = 0, bytes_sent = 0, bytes_received = 0;
  uint64_t non_posted_issued = 0, completed_success = 0, completed_ur = 0, completed_crs = 0, completed_ca = 0,
           completed_cto = 0, completed_poisoned = 0, completed_link_down = 0;
  uint64_t late_completions = 0;        // tag known, generation old: dropped
  uint64_t unexpected_completions = 0;  // tag never issued: dropped
  uint64_t requests_unsupported = 0;    // peer's requests we answered UR
  uint64_t malformed = 0;
  uint64_t pings_sent = 0, pongs_received = 0;
  absl::Duration last_round_trip;
};

// Host end.
//
// Its configuration space is a local image of the one the hello brought: the header (BARs, command, …) is answered from
// the image, so the local kernel may place the BARs where it likes; the function's own BARs keep the fabric addresses.
// Everything else is asked of the function. reset() and a function level reset through config_write() put the fabric
// addresses back before they end. A read or write made from a continuation never waits: what finds no room is queued.
// scrub() is FAILED_PRECONDITION: only the box scrubs.
class RemoteFunction : public function::Function, public function::BlockingReads {
 public:
  // Sends the hello, waits (at most `hello_deadline`) for the answer that carries the configuration image, programs the
  // function's BARs with fabric addresses. UNAVAILABLE: no transport; PERMISSION_DENIED, FAILED_PRECONDITION: refused,
  // with the peer's reason; DEADLINE_EXCEEDED. `on_loss` runs once, on a thread of the session, when the session has
  // died for another reason than close(): every outstanding request has ended by then.
  static absl::StatusOr<std::unique_ptr<RemoteFunction>> connect(std::unique_ptr<Transport> transport,
                                                                 const Ticket& ticket, const SessionOptions& options,
                                                                 absl::Duration hello_deadline,
                                                                 absl::AnyInvocable<void(absl::Status)> on_loss);
  using function::Function::connect;  // not hidden by the one above
  virtual uint64_t epoch() const = 0;
  virtual bool alive() const = 0;
  virtual SessionStats stats() const = 0;
  // Sends Terminate(kShutdown), ends everything outstanding as kLinkDown, joins the threads. Not from a continuation.
  // The destructor does the same.
  virtual void close() = 0;
  // Blocks until an answer or the read deadline; the calling thread serves the socket itself meanwhile (no thread
  // switch). All ones in `out` unless kSuccess. For callers that would wait anyway (direct attach, the kernel ring's
  // threads).
  function::Outcome bar_read_wait(unsigned bar, uint64_t offset, std::span<std::byte> out) override = 0;
};

// Box end: serves one function to one host until the session ends.
class FunctionServer {
 public:
  struct Callbacks {
    // Each time something was heard from the host: the lease is renewed.
    absl::AnyInvocable<void()> on_heard;
    // Once, when the session has ended and every outstanding request of ours has ended.
    absl::AnyInvocable<void(absl::Status)> on_end;
  };
  static absl::StatusOr<std::unique_ptr<FunctionServer>> serve(function::Function& function,
                                                               std::unique_ptr<Transport> transport, const Hello& hello,
                                                               uint64_t epoch, const SessionOptions& options,
                                                               Callbacks callbacks);
  virtual ~FunctionServer() = default;
  virtual bool alive() const = 0;
  virtual SessionStats stats() const = 0;
  // Sends Terminate(reason), joins. After it returns `function` is not used again. on_end runs before it returns. Not
  // from a continuation. The destructor does the same with kShutdown.
  virtual void close(TerminateReason reason) = 0;
};

}  // namespace dxpu::fabric
