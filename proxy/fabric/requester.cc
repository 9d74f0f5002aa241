#include "proxy/fabric/requester.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proxy/fabric/tlp_io.h"

namespace dxpu::fabric {
namespace {

using function::Outcome;

bool is_atomic(pcie::TlpType type) {
  return type == pcie::TlpType::kFetchAdd || type == pcie::TlpType::kSwap || type == pcie::TlpType::kCompareSwap;
}

bool bad(FrameError& error, std::string detail) {
  error = {TerminateReason::kProtocolError, kEnvelopeBytes, std::move(detail)};
  return false;
}

}  // namespace

Requester::Requester(const Options& options, SendQueue& queue)
    : options_(options), queue_(queue), entries_(options.tags) {
  for (uint32_t tag = 0; tag < options.tags; ++tag) free_.push_back(static_cast<uint16_t>(tag));
  last_progress_ = options_.clock->monotonic();
}

bool Requester::start(const OperationPtr& operation, absl::Duration& earliest) {
  std::vector<OperationPtr> ended;
  {
    std::lock_guard lock(mutex_);
    if (operation->deadline <= absl::ZeroDuration()) operation->deadline = options_.read_deadline;
    const absl::Duration now = options_.clock->monotonic();
    if (dead_) {
      operation->left = 0;
      operation->outcome = Outcome::kLinkDown;
      operation->ended = true;
      ended.push_back(operation);
    } else {
      operation->queued = true;
      operation->queued_at = now;
      waiting_.push_back(operation);
      pump(now);
      earliest = now + operation->deadline;
    }
  }
  if (ended.empty()) return true;
  finish(ended);
  return false;
}

void Requester::pump(absl::Duration now) {
  while (!waiting_.empty() && !free_.empty()) {
    const OperationPtr& operation = waiting_.front();
    if (!issue_one(operation, now)) return;  // the queue is closed: the link is about to end everything
    if (operation->left == 0) {
      operation->queued = false;
      waiting_.pop_front();
    }
  }
}

bool Requester::issue_one(const OperationPtr& operation, absl::Duration now) {
  const uint16_t tag = free_.front();
  Entry& entry = entries_[tag];
  // The entry is complete before a byte leaves: the answer can be faster than the return of the send call.
  pcie::Tlp single;
  const pcie::Tlp* request = &operation->request;
  std::span<const std::byte> payload;
  uint32_t bytes = 0;
  if (operation->request.type == pcie::TlpType::kMemRead) {
    const uint64_t limit = options_.max_read_request;
    bytes = static_cast<uint32_t>(std::min<uint64_t>(operation->left, limit - operation->address % limit));
    single = pcie::make_mem_read(operation->address, bytes, tag, options_.id);
    request = &single;
    entry.reassembly.emplace(single, std::span(operation->out, bytes));
  } else {
    operation->request.tag = tag;
    operation->request.requester = options_.id;
    payload = operation->request.payload;
    entry.reassembly.reset();
  }
  if (++generation_ == 0) ++generation_;
  entry.generation = generation_;
  entry.operation = operation;
  entry.issued = now;
  entry.deadline = now + operation->deadline;
  entry.live = true;
  Packet packet;
  const absl::Status packed = pack(*request, entry.generation, payload, packet);
  if (!packed.ok() || queue_.append(std::move(packet), true) == 0) {
    entry.live = false;
    entry.operation.reset();
    return false;
  }
  free_.pop_front();
  counters_.issued.fetch_add(1, std::memory_order_relaxed);
  ++operation->in_flight;
  if (request == &single) {
    operation->address += bytes;
    operation->out += bytes;
    operation->left -= bytes;
  } else {
    operation->left = 0;
  }
  return true;
}

void Requester::count(Outcome outcome) {
  std::atomic<uint64_t>* counter = nullptr;
  switch (outcome) {
    case Outcome::kSuccess:
      counter = &counters_.success;
      break;
    case Outcome::kUnsupportedRequest:
      counter = &counters_.ur;
      break;
    case Outcome::kConfigRetry:
      counter = &counters_.crs;
      break;
    case Outcome::kCompleterAbort:
      counter = &counters_.ca;
      break;
    case Outcome::kTimeout:
      counter = &counters_.cto;
      break;
    case Outcome::kPoisoned:
      counter = &counters_.poisoned;
      break;
    case Outcome::kLinkDown:
      counter = &counters_.link_down;
      break;
  }
  if (counter != nullptr) counter->fetch_add(1, std::memory_order_relaxed);
}

void Requester::retire(Entry& entry, uint16_t tag, Outcome outcome, std::vector<OperationPtr>& ended) {
  count(outcome);
  const OperationPtr operation = std::move(entry.operation);
  entry.operation.reset();
  entry.live = false;
  free_.push_back(tag);
  --operation->in_flight;
  if (outcome != Outcome::kSuccess && operation->outcome == Outcome::kSuccess) {
    operation->outcome = outcome;
    // The rest of the operation is not asked for any more.
    operation->left = 0;
    if (operation->queued) unqueue(operation);
  }
  end_if_over(operation, ended);
}

void Requester::end_if_over(const OperationPtr& operation, std::vector<OperationPtr>& ended) {
  if (operation->ended || operation->queued || operation->left != 0 || operation->in_flight != 0) return;
  operation->ended = true;
  ended.push_back(operation);
}

void Requester::unqueue(const OperationPtr& operation) {
  const auto it = std::find(waiting_.begin(), waiting_.end(), operation);
  if (it != waiting_.end()) waiting_.erase(it);
  operation->queued = false;
}

void Requester::finish(std::vector<OperationPtr>& ended) {
  for (const OperationPtr& operation : ended) {
    const Outcome outcome = operation->outcome;
    if (operation->read_done) {
      auto done = std::move(operation->read_done);
      done(outcome,
           outcome == Outcome::kSuccess ? std::span<const std::byte>(operation->result) : std::span<const std::byte>());
    } else {
      auto done = std::move(operation->done);
      done(outcome);
    }
  }
}

bool Requester::cancel(const OperationPtr& operation) {
  std::vector<OperationPtr> ended;
  {
    std::lock_guard lock(mutex_);
    if (operation->ended) return false;
    operation->left = 0;
    operation->outcome = Outcome::kTimeout;
    if (operation->queued) unqueue(operation);
    const absl::Duration now = options_.clock->monotonic();
    for (size_t tag = 0; tag < entries_.size() && operation->in_flight != 0; ++tag) {
      if (entries_[tag].live && entries_[tag].operation == operation) {
        if (entries_[tag].issued >= last_counted_timeout_) {
          last_counted_timeout_ = now;
          ++uncounted_timeouts_;
        }
        retire(entries_[tag], static_cast<uint16_t>(tag), Outcome::kTimeout, ended);
      }
    }
    end_if_over(operation, ended);
    pump(now);
  }
  finish(ended);
  return true;
}

bool Requester::complete(const pcie::Tlp& completion, std::span<const std::byte> payload, uint32_t transaction,
                         FrameError& error) {
  std::vector<OperationPtr> ended;
  bool ok = true;
  {
    std::lock_guard lock(mutex_);
    if (completion.requester != options_.id || completion.tag >= entries_.size() ||
        entries_[completion.tag].generation == 0) {
      counters_.unexpected.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
    Entry& entry = entries_[completion.tag];
    if (!entry.live || entry.generation != transaction) {
      // Half the number space is the past: what was never issued is not "late".
      const bool past = static_cast<int32_t>(entry.generation - transaction) >= 0 && transaction != 0;
      (past ? counters_.late : counters_.unexpected).fetch_add(1, std::memory_order_relaxed);
      return true;
    }
    const absl::Duration now = options_.clock->monotonic();
    last_progress_ = now;
    Operation& operation = *entry.operation;
    const pcie::TlpType asked = operation.request.type;
    const uint16_t tag = completion.tag;
    if (completion.status != pcie::CplStatus::kSuccess) {  // status before anything else: it has no data to check
      retire(entry, tag, outcome_of(completion.status), ended);
    } else if (asked == pcie::TlpType::kMemRead) {
      const absl::StatusOr<bool> over = entry.reassembly->add(completion, payload);
      if (!over.ok()) {
        ok = bad(error, absl::StrCat("completion does not fit its request: ", over.status().message()));
      } else if (*over) {
        retire(entry, tag, entry.reassembly->poisoned() ? Outcome::kPoisoned : Outcome::kSuccess, ended);
      }
    } else if (asked == pcie::TlpType::kCfgWrite0) {
      if (completion.type != pcie::TlpType::kCompletion) {
        ok = bad(error, "data in the completion of a write");
      } else {
        retire(entry, tag, Outcome::kSuccess, ended);
      }
    } else {
      // A configuration read gives the whole DW, an atomic its operand's width.
      const size_t expected = is_atomic(asked) ? operation.result.size() : 4;
      if (completion.type != pcie::TlpType::kCompletionData || payload.size() != expected) {
        ok = bad(error, absl::StrCat("completion with ", payload.size(), " bytes, ", expected, " were asked for"));
      } else {
        std::copy(payload.begin(), payload.end(), operation.small.begin());
        retire(entry, tag, completion.poisoned ? Outcome::kPoisoned : Outcome::kSuccess, ended);
      }
    }
    pump(now);
  }
  finish(ended);
  return ok;
}

unsigned Requester::expire() {
  std::vector<OperationPtr> ended;
  unsigned counted = 0;
  {
    std::lock_guard lock(mutex_);
    const absl::Duration now = options_.clock->monotonic();
    for (size_t tag = 0; tag < entries_.size(); ++tag) {
      Entry& entry = entries_[tag];
      if (!entry.live || entry.deadline > now) continue;
      if (entry.issued >= last_counted_timeout_) counted = 1;
      retire(entry, static_cast<uint16_t>(tag), Outcome::kTimeout, ended);
    }
    if (counted != 0) last_counted_timeout_ = now;
    counted += std::exchange(uncounted_timeouts_, 0u);
    // An operation that waits for a tag is patient while the peer answers others; its own deadline runs from the last
    // answer on.
    for (size_t i = 0; i < waiting_.size();) {
      const OperationPtr operation = waiting_[i];
      if (operation->in_flight == 0 && std::max(operation->queued_at, last_progress_) + operation->deadline <= now) {
        operation->left = 0;
        operation->outcome = Outcome::kTimeout;
        unqueue(operation);
        end_if_over(operation, ended);
      } else {
        ++i;
      }
    }
    pump(now);
  }
  finish(ended);
  return counted;
}

absl::Duration Requester::next_deadline() {
  std::lock_guard lock(mutex_);
  absl::Duration next = absl::InfiniteDuration();
  if (free_.size() == entries_.size() && waiting_.empty()) return next;
  for (const Entry& entry : entries_) {
    if (entry.live) next = std::min(next, entry.deadline);
  }
  for (const OperationPtr& operation : waiting_) {
    if (operation->in_flight == 0)
      next = std::min(next, std::max(operation->queued_at, last_progress_) + operation->deadline);
  }
  return next;
}

void Requester::end_all() {
  std::vector<OperationPtr> ended;
  {
    std::lock_guard lock(mutex_);
    dead_ = true;
    for (const OperationPtr& operation : std::exchange(waiting_, {})) {
      operation->queued = false;
      operation->left = 0;
      if (operation->outcome == Outcome::kSuccess) operation->outcome = Outcome::kLinkDown;
      end_if_over(operation, ended);
    }
    for (size_t tag = 0; tag < entries_.size(); ++tag) {
      if (entries_[tag].live) retire(entries_[tag], static_cast<uint16_t>(tag), Outcome::kLinkDown, ended);
    }
  }
  finish(ended);
}

}  // namespace dxpu::fabric
