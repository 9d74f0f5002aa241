#include "proxy/fabric/send_queue.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

namespace dxpu::fabric {
namespace {

// One system call carries at most this; more would only hold the queue's lock-free part longer.
constexpr size_t kMaxParts = 256;

}  // namespace

Buffer BufferPool::get() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Buffer out = std::move(free_.back());
      free_.pop_back();
      return out;
    }
  }
  return Buffer(new std::byte[kBufferBytes]);
}

void BufferPool::put(std::vector<Buffer>& buffers) {
  std::lock_guard lock(mutex_);
  for (Buffer& buffer : buffers) {
    if (free_.size() < kKept) free_.push_back(std::move(buffer));
  }
  buffers.clear();
}

SendQueue::SendQueue(Transport& transport, base::Clock& clock, absl::Duration fast_io_fail,
                     const std::atomic<uint32_t>& received, BufferPool& pool, Hooks hooks)
    : transport_(transport),
      clock_(clock),
      fast_io_fail_(fast_io_fail),
      received_(received),
      pool_(pool),
      hooks_(std::move(hooks)) {}

uint64_t SendQueue::append(Packet packet, bool sequenced) {
  std::unique_lock lock(mutex_);
  if (closed_) return 0;
  const size_t bytes = packet.head_bytes + packet.payload_bytes;
  if (queued_bytes_.load(std::memory_order_relaxed) + bytes > kHardBytes) {
    closed_ = true;
    failure_ =
        absl::ResourceExhaustedError(absl::StrCat("the peer takes nothing: ", kHardBytes, " bytes wait to be sent"));
    const absl::Status failure = failure_;
    changed_.notify_all();
    lock.unlock();
    hooks_.failed(failure);
    return 0;
  }
  // Numbers are given where the order is made, so that order and number can not differ.
  auto* wire = reinterpret_cast<EnvelopeWire*>(packet.head.data());
  if (sequenced) {
    const uint32_t next = sequence_.load(std::memory_order_relaxed) + 1;
    sequence_.store(next, std::memory_order_release);
    wire->sequence.set(next);
  }
  wire->ack.set(received_.load(std::memory_order_acquire));
  queued_bytes_.store(queued_bytes_.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  pending_.push_back(std::move(packet));
  return ++appended_;
}

void SendQueue::flush() {
  std::unique_lock lock(mutex_);
  // A full socket is the service thread's: trying again here would cost a system call per packet for nothing.
  if (busy_ || closed_ || sent_ == appended_ || stuck_.load(std::memory_order_relaxed)) return;
  busy_ = true;
  const Step step = send_until(lock, appended_);
  busy_ = false;
  if (step == Step::kFailed) return;
  hand_over(lock);
}

SendQueue::Step SendQueue::send_until(std::unique_lock<std::mutex>& lock, uint64_t target) {
  std::array<iovec, kMaxParts> parts;
  while (sent_ < target) {
    if (closed_) return Step::kFailed;
    if (in_flight_at_ == in_flight_.size()) {
      in_flight_.clear();
      in_flight_at_ = in_flight_offset_ = 0;
      in_flight_.swap(pending_);
    }
    // Only the holder of busy_ touches in_flight_, so the parts can be built without the lock.
    lock.unlock();
    if (!used_.empty()) pool_.put(used_);
    size_t count = 0;
    size_t skip = in_flight_offset_;
    for (size_t i = in_flight_at_; i < in_flight_.size() && count + 2 <= kMaxParts; ++i) {
      Packet& p = in_flight_[i];
      if (skip < p.head_bytes) {
        parts[count++] = {p.head.data() + skip, p.head_bytes - skip};
        skip = 0;
      } else {
        skip -= p.head_bytes;
      }
      if (p.payload_bytes > skip) {
        parts[count++] = {const_cast<std::byte*>(p.payload) + skip, p.payload_bytes - skip};
      }
      skip = 0;
    }
    const absl::StatusOr<size_t> taken = transport_.try_send({parts.data(), count});
    lock.lock();
    if (!taken.ok()) {
      const bool first = !closed_;
      closed_ = true;
      failure_ = taken.status();
      busy_ = false;
      changed_.notify_all();
      if (first) {
        lock.unlock();
        hooks_.failed(taken.status());
        lock.lock();
      }
      return Step::kFailed;
    }
    if (*taken == 0) {
      mark_stuck();
      return Step::kNoRoom;
    }
    stuck_.store(false, std::memory_order_release);
    advance(*taken);
    if (waiters_ != 0) changed_.notify_all();
  }
  return Step::kDone;
}

void SendQueue::advance(size_t bytes) {
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  queued_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  while (bytes != 0) {
    Packet& p = in_flight_[in_flight_at_];
    const size_t left = p.head_bytes + p.payload_bytes - in_flight_offset_;
    if (bytes < left) {
      in_flight_offset_ += bytes;
      return;
    }
    bytes -= left;
    in_flight_offset_ = 0;
    ++in_flight_at_;
    ++sent_;
    if (p.buffer) used_.push_back(std::move(p.buffer));
  }
}

void SendQueue::mark_stuck() {
  if (stuck_.load(std::memory_order_relaxed)) return;
  stuck_since_ = clock_.monotonic();
  stuck_.store(true, std::memory_order_release);
}

bool SendQueue::out_of_patience() const {
  return stuck_.load(std::memory_order_relaxed) && clock_.monotonic() - stuck_since_ > fast_io_fail_;
}

void SendQueue::hand_over(std::unique_lock<std::mutex>& lock) {
  if (sent_ == appended_ || closed_) {
    if (waiters_ != 0) changed_.notify_all();
    return;
  }
  if (waiters_ != 0) {
    changed_.notify_all();
    return;
  }
  mark_stuck();
  lock.unlock();
  hooks_.backlog();
}

absl::Status SendQueue::wait_sent(uint64_t number) {
  std::unique_lock lock(mutex_);
  ++waiters_;
  absl::Status out;
  while (sent_ < number) {
    if (closed_) {
      // Until the holder is out of the transport it may still read our payload.
      if (busy_) {
        changed_.wait_for(lock, std::chrono::milliseconds(10));
        continue;
      }
      out = failure_.ok() ? absl::UnavailableError("the session has ended") : failure_;
      break;
    }
    if (out_of_patience()) {
      closed_ = true;
      failure_ = absl::UnavailableError(
          absl::StrCat("no room for a posted write within fast_io_fail (", absl::FormatDuration(fast_io_fail_), ")"));
      const absl::Status failure = failure_;
      changed_.notify_all();
      lock.unlock();
      hooks_.failed(failure);
      lock.lock();
      continue;
    }
    if (busy_) {
      changed_.wait_for(lock, std::chrono::milliseconds(20));
      continue;
    }
    busy_ = true;
    const Step step = send_until(lock, number);
    busy_ = false;
    if (step == Step::kNoRoom) {
      lock.unlock();
      transport_.wait_room(std::min(fast_io_fail_, absl::Milliseconds(20)));
      lock.lock();
    }
  }
  --waiters_;
  if (!busy_) hand_over(lock);
  return out;
}

void SendQueue::drain(absl::Duration patience) {
  const absl::Duration until = clock_.monotonic() + patience;
  std::unique_lock lock(mutex_);
  while (sent_ < appended_ && !closed_ && clock_.monotonic() < until) {
    if (busy_) {
      changed_.wait_for(lock, std::chrono::milliseconds(5));
      continue;
    }
    busy_ = true;
    const Step step = send_until(lock, appended_);
    busy_ = false;
    if (step == Step::kNoRoom) {
      lock.unlock();
      transport_.wait_room(absl::Milliseconds(5));
      lock.lock();
    }
  }
}

void SendQueue::serve_backlog(absl::Duration patience) {
  const bool room = transport_.wait_room(patience);
  std::unique_lock lock(mutex_);
  if (closed_) {
    stuck_.store(false, std::memory_order_release);
    return;
  }
  if (out_of_patience() && !room) {
    closed_ = true;
    failure_ = absl::UnavailableError(
        absl::StrCat("no room to send within fast_io_fail (", absl::FormatDuration(fast_io_fail_), ")"));
    const absl::Status failure = failure_;
    changed_.notify_all();
    lock.unlock();
    hooks_.failed(failure);
    return;
  }
  if (busy_) {
    // Somebody is sending, and will hand over when something is left.
    changed_.wait_for(lock, std::chrono::milliseconds(5));
    return;
  }
  if (sent_ == appended_) {
    stuck_.store(false, std::memory_order_release);
    return;
  }
  busy_ = true;
  send_until(lock, appended_);
  busy_ = false;
  if (closed_) return;
  if (sent_ == appended_) {
    stuck_.store(false, std::memory_order_release);
    if (waiters_ != 0) changed_.notify_all();
    return;
  }
  mark_stuck();
}

void SendQueue::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  while (busy_) changed_.wait_for(lock, std::chrono::milliseconds(10));
  pending_.clear();
  in_flight_.clear();
  in_flight_at_ = in_flight_offset_ = 0;
  queued_bytes_.store(0, std::memory_order_relaxed);
  stuck_.store(false, std::memory_order_release);
}

}  // namespace dxpu::fabric
