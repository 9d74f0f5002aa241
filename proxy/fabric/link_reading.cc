// Reading of a link: who reads, what is done with what was read.
#include <sys/epoll.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/fabric/link.h"
#include "proxy/fabric/tlp_io.h"

namespace dxpu::fabric {

using function::Outcome;

Outcome Link::read_memory_wait(uint64_t address, std::span<std::byte> out) {
  if (in_dispatch()) return Outcome::kCompleterAbort;  // a continuation must not wait: the answer could never be read
  struct Waiter {
    std::atomic<bool> over{false};
    Outcome outcome = Outcome::kTimeout;
  } waiter;
  auto operation = std::make_shared<Requester::Operation>();
  operation->request.type = pcie::TlpType::kMemRead;
  operation->address = address;
  operation->left = out.size();
  operation->out = out.data();
  operation->waited_for = true;
  operation->done = [this, &waiter](Outcome outcome) {
    waiter.outcome = outcome;
    waiter.over.store(true, std::memory_order_seq_cst);
    // From here on the waiter may be gone. Taking the lock closes the gap between its look at `over` and its sleep.
    if (followers_.load(std::memory_order_seq_cst) != 0) {
      { std::lock_guard lock(lead_mutex_); }
      lead_changed_.notify_all();
    }
  };

  const absl::Duration deadline = setup_.options.deadlines.read;
  const absl::Duration until = clock_.monotonic() + deadline;
  bool leading = epoll_.valid() && try_lead();
  absl::Duration earliest;
  if (requester_.start(operation, earliest)) queue_.flush();
  absl::Duration left = deadline;
  while (!waiter.over.load(std::memory_order_seq_cst)) {
    if (left <= absl::ZeroDuration()) {
      requester_.cancel(operation);
      watch(clock_.monotonic());  // the service thread counts timeouts
      break;
    }
    if (leading) {
      receive_once(left);
    } else {
      std::unique_lock lock(lead_mutex_);
      followers_.fetch_add(1, std::memory_order_seq_cst);
      if (!alive()) {
        lead_changed_.wait_for(lock, std::chrono::milliseconds(1));  // the service thread is about to end the operation
      } else if (!waiter.over.load(std::memory_order_seq_cst)) {
        lead_changed_.wait_for(lock, absl::ToChronoNanoseconds(left), [&] {
          return waiter.over.load(std::memory_order_seq_cst) || (epoll_.valid() && !leading_);
        });
      }
      followers_.fetch_sub(1, std::memory_order_seq_cst);
      if (epoll_.valid() && !leading_) {
        if (!waiter.over.load(std::memory_order_seq_cst) && alive()) {
          leading_ = leading = true;
          arm(false);
        } else if (followers_.load(std::memory_order_seq_cst) == 0) {
          arm(true);  // nobody is left to lead: back to the background reader
        } else {
          lock.unlock();
          lead_changed_.notify_all();
        }
      }
    }
    if (waiter.over.load(std::memory_order_seq_cst)) break;
    left = until - clock_.monotonic();
    if (!alive() && leading) {
      // Nothing comes any more; the service thread ends the operation once we are out of its way.
      stop_leading();
      leading = false;
    }
  }
  if (leading) stop_leading();
  // cancel() has run the continuation, or another thread is inside it.
  while (!waiter.over.load(std::memory_order_seq_cst)) std::this_thread::yield();
  return waiter.outcome;
}

void Link::arm(bool on) {
  if (armed_ == on) return;
  armed_ = on;
  epoll_event event{};
  event.events = on ? static_cast<uint32_t>(EPOLLIN) : 0u;
  event.data.fd = transport_->poll_fd();
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, transport_->poll_fd(), &event);
}

bool Link::try_lead() {
  std::lock_guard lock(lead_mutex_);
  if (leading_ || !alive()) return false;
  leading_ = true;
  arm(false);
  return true;
}

void Link::stop_leading() {
  bool others = false;
  {
    std::lock_guard lock(lead_mutex_);
    leading_ = false;
    others = followers_.load(std::memory_order_seq_cst) != 0;
    if (!others) arm(true);
  }
  // Also the teardown waits for this.
  if (others || !alive()) lead_changed_.notify_all();
}

void Link::reader_main() {
  while (alive() && receive_once(absl::InfiniteDuration())) {
  }
}

void Link::reader_main_epoll() {
  while (alive()) {
    std::array<epoll_event, 2> events;
    const int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    if (n < 0 && errno != EINTR) {
      fail(base::errno_status("fabric session: epoll_wait"));
      return;
    }
    if (!alive()) return;
    {
      std::lock_guard lock(lead_mutex_);
      if (leading_) continue;  // a waiter was faster; the socket is disarmed until it is done
      leading_ = true;
    }
    receive_once(absl::ZeroDuration());
    bool others = false;
    {
      std::lock_guard lock(lead_mutex_);
      leading_ = false;
      others = followers_.load(std::memory_order_seq_cst) != 0;
    }
    if (others || !alive()) lead_changed_.notify_all();
  }
}

bool Link::receive_once(absl::Duration wait) {
  const absl::StatusOr<size_t> n = transport_->receive(parser_.writable(), wait);
  if (!n.ok()) {
    fail(n.status());
    return false;
  }
  if (*n == 0) return true;
  Inside inside(this);
  last_heard_ns_.store(absl::ToInt64Nanoseconds(clock_.monotonic()), std::memory_order_relaxed);
  bytes_received_.fetch_add(*n, std::memory_order_relaxed);
  parser_.commit(*n);
  Frame frame;
  FrameError error;
  size_t before = queue_.queued_bytes();
  while (true) {
    const FrameParser::Result result = parser_.next(frame, error);
    if (result == FrameParser::Result::kMore) break;
    if (result == FrameParser::Result::kBad || !dispatch(frame, error)) {
      if (alive()) {
        malformed_.fetch_add(1, std::memory_order_relaxed);
        terminate(error.reason, error.offset, error.detail,
                  absl::InvalidArgumentError(absl::StrCat(description(), ": protocol error of the peer at byte ",
                                                          error.offset, " of a frame: ", error.detail)));
      }
      return false;
    }
    // Long batches are sent on their way before the last frame of them has been looked at.
    if (queue_.queued_bytes() > before + kReceiveBytes / 4) {
      queue_.flush();
      before = queue_.queued_bytes();
    }
  }
  queue_.flush();
  handler_->on_heard();
  return alive();
}

bool Link::take_sequence(const Frame& frame, FrameError& error) {
  const uint32_t expected = received_.load(std::memory_order_relaxed) + 1;
  if (frame.envelope.sequence != expected) {
    error = {TerminateReason::kProtocolError, offsetof(EnvelopeWire, sequence),
             absl::StrCat("sequence ", frame.envelope.sequence, " where ", expected, " was due")};
    return false;
  }
  received_.store(expected, std::memory_order_release);
  return true;
}

bool Link::dispatch(const Frame& frame, FrameError& error) {
  frames_heard_.fetch_add(1, std::memory_order_relaxed);
  const Envelope& envelope = frame.envelope;
  if (static_cast<int32_t>(queue_.last_sequence() - envelope.ack) < 0) {
    error = {TerminateReason::kProtocolError, offsetof(EnvelopeWire, ack),
             absl::StrCat("ack ", envelope.ack, " of a frame never sent")};
    return false;
  }
  switch (envelope.type) {
    case FrameType::kTlp:
      return take_sequence(frame, error) && dispatch_tlp(frame, error);
    case FrameType::kPing: {
      Packet packet;
      pack_control(FrameType::kPong, 0, 0, frame.header, packet);
      queue_.append(std::move(packet), false);
      return true;
    }
    case FrameType::kPong: {
      PingWire wire;
      std::memcpy(&wire, frame.header.data(), sizeof(wire));
      const int64_t now = absl::ToInt64Nanoseconds(clock_.monotonic());
      round_trip_ns_.store(std::max<int64_t>(0, now - static_cast<int64_t>(wire.stamp.get())),
                           std::memory_order_relaxed);
      pongs_.fetch_add(1, std::memory_order_relaxed);
      ping_out_.store(false, std::memory_order_relaxed);
      return true;
    }
    case FrameType::kReset: {
      if (!take_sequence(frame, error)) return false;
      if ((envelope.flags & kFlagAnswer) == 0) {
        handler_->on_reset(envelope.transaction);
        return true;
      }
      ResetWire wire;
      std::memcpy(&wire, frame.header.data(), sizeof(wire));
      function::Done done;
      {
        std::lock_guard lock(service_mutex_);
        const auto it = resets_.find(envelope.transaction);
        if (it != resets_.end()) {
          done = std::move(it->second.done);
          resets_.erase(it);
        }
      }
      if (done) done(outcome_of(static_cast<pcie::CplStatus>(wire.status.get())));
      return true;
    }
    case FrameType::kTerminate:
      fail(to_status(decode_terminate(frame.header, frame.payload)));
      return false;
    case FrameType::kHello:
    case FrameType::kHelloAck:
      break;
  }
  error = {TerminateReason::kProtocolError, 0, "hello inside a session"};
  return false;
}

bool Link::dispatch_tlp(const Frame& frame, FrameError& error) {
  tlps_received_.fetch_add(1, std::memory_order_relaxed);
  pcie::Tlp tlp;
  if (!unpack(frame, tlp, error)) return false;
  if (pcie::class_of(tlp.type) == pcie::TlpClass::kCompletion) {
    return requester_.complete(tlp, frame.payload, frame.envelope.transaction, error);
  }
  if (tlp.requester != setup_.peer) {
    error = {TerminateReason::kProtocolError, kEnvelopeBytes + 4,
             absl::StrCat("requester id ", tlp.requester, " is not the peer's")};
    return false;
  }
  if (tlp.type == pcie::TlpType::kMemRead && tlp.length_dw * 4u > setup_.negotiated.max_read_request) {
    error = {
        TerminateReason::kProtocolError, kEnvelopeBytes,
        absl::StrCat("read of ", tlp.length_dw * 4u, " bytes, ", setup_.negotiated.max_read_request, " were agreed")};
    return false;
  }
  if (pcie::class_of(tlp.type) == pcie::TlpClass::kNonPosted && !admit()) {
    inbound_.fetch_add(1, std::memory_order_relaxed);  // answer_status takes it back
    answer_status(tlp, frame.envelope.transaction, Outcome::kCompleterAbort);
    return true;
  }
  handler_->on_request(tlp, frame.payload, frame.envelope.transaction);
  return true;
}

}  // namespace dxpu::fabric
