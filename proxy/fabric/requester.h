// The requester half of a session: operations, the tag table, deadlines.
//
// An operation is what a caller asked for (a read of any length, a configuration access, an atomic). It becomes one or
// more non-posted TLPs, each with a tag. A tag is free, or live with a generation; the generation travels in the
// envelope's transaction field and comes back, so a completion that arrives after its deadline never meets the next
// user of its tag. Operations that find no tag wait in order. Each ends exactly once: data, an error status, CTO, or
// the end of the link.
//
// Threads: any. Continuations run without a lock held. Data is placed under the lock, so nothing is written to a
// caller's buffer once its operation has ended.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "proxy/base/clock.h"
#include "proxy/fabric/frame.h"
#include "proxy/fabric/send_queue.h"
#include "proxy/function/function.h"
#include "proxy/pcie/split.h"
#include "proxy/pcie/tlp.h"

namespace dxpu::fabric {

class Requester {
 public:
  struct Options {
    pcie::RequesterId id = 0;
    uint32_t tags = 256;
    uint32_t max_read_request = 4096;
    absl::Duration read_deadline;
    base::Clock* clock = nullptr;
  };
  struct Counters {
    std::atomic<uint64_t> issued{0}, success{0}, ur{0}, crs{0}, ca{0}, cto{0}, poisoned{0}, link_down{0}, late{0},
        unexpected{0};
  };

  struct Operation {
    // What to ask. kMemRead walks [address, address + left) into `out`; others send `request` once.
    pcie::Tlp request;
    uint64_t address = 0;
    uint64_t left = 0;
    std::byte* out = nullptr;
    std::span<std::byte> result;        // what a ReadDone gets to see
    std::array<std::byte, 16> small{};  // result of short operations
    std::vector<std::byte> large;       // … of longer ones that own their buffer
    absl::Duration deadline;            // per TLP, from its issue
    bool waited_for = false;            // a thread waits and watches the deadline itself
    // Exactly one of them is set.
    function::Done done;
    function::ReadDone read_done;

    // Under the requester's lock.
    uint32_t in_flight = 0;
    bool queued = false;
    bool ended = false;
    absl::Duration queued_at;
    function::Outcome outcome = function::Outcome::kSuccess;
  };
  using OperationPtr = std::shared_ptr<Operation>;

  Requester(const Options& options, SendQueue& queue);

  // Appends the first TLPs; the caller flushes. False: ended at once (link down), the continuation has run. Otherwise
  // `earliest` is the deadline somebody has to watch.
  bool start(const OperationPtr& operation, absl::Duration& earliest);
  // Ends `operation` as CTO if it has not ended. True when it did.
  bool cancel(const OperationPtr& operation);

  // A Cpl or CplD. False: the peer contradicts itself, `error` says how. Freed tags are used for what waits; the caller
  // flushes.
  bool complete(const pcie::Tlp& completion, std::span<const std::byte> payload, uint32_t transaction,
                FrameError& error);

  // Ends what is past its deadline. Returns how many timeouts in a row that is, cancelled ones since the last call
  // included: requests that were issued together time out together and count once.
  unsigned expire();
  // When expire() has to be called next; infinite when nothing is outstanding.
  absl::Duration next_deadline();
  // Everything ends as kLinkDown, and so does all that is started later.
  void end_all();

  const Counters& counters() const { return counters_; }

 private:
  struct Entry {
    uint32_t generation = 0;  // 0: never issued
    bool live = false;
    absl::Duration issued, deadline;
    OperationPtr operation;
    std::optional<pcie::Reassembly> reassembly;  // kMemRead
  };

  // With the lock held.
  void pump(absl::Duration now);
  bool issue_one(const OperationPtr& operation, absl::Duration now);
  void retire(Entry& entry, uint16_t tag, function::Outcome outcome, std::vector<OperationPtr>& ended);
  void end_if_over(const OperationPtr& operation, std::vector<OperationPtr>& ended);
  void unqueue(const OperationPtr& operation);
  void count(function::Outcome outcome);
  static void finish(std::vector<OperationPtr>& ended);

  const Options options_;
  SendQueue& queue_;
  Counters counters_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::deque<uint16_t> free_;  // first in, first out: a tag rests as long as possible
  std::deque<OperationPtr> waiting_;
  uint32_t generation_ = 0;
  absl::Duration last_progress_;
  absl::Duration last_counted_timeout_ = -absl::InfiniteDuration();
  unsigned uncounted_timeouts_ = 0;  // by cancel(), for the next expire()
  bool dead_ = false;
};

}  // namespace dxpu::fabric
