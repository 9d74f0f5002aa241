#include "proxy/fabric/link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/fabric/tlp_io.h"
#include "proxy/pcie/split.h"

namespace dxpu::fabric {
namespace {

using function::Outcome;

// One receive takes at most this much: large enough that system calls do not count, small enough to stay in the cache.
constexpr size_t kReceiveBytes = 256 * 1024;
// Unanswered requests of the peer kept beyond what it may have in flight: those it has given up on count here too.
constexpr uint32_t kAbandoned = 4096;
// Posted writes of a large range are handed to the queue in portions, so that answers get in between.
constexpr unsigned kPortion = 64;
constexpr unsigned kTimeoutsUntilDown = 3;
constexpr absl::Duration kLastWords = absl::Milliseconds(200);

// The link this thread dispatches for, or whose service thread it is.
thread_local const Link* t_inside = nullptr;

class Inside {
 public:
  explicit Inside(const Link* link) : before_(t_inside) { t_inside = link; }
  ~Inside() { t_inside = before_; }

 private:
  const Link* const before_;
};

pcie::CplStatus status_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kSuccess:
      return pcie::CplStatus::kSuccess;
    case Outcome::kUnsupportedRequest:
      return pcie::CplStatus::kUnsupportedRequest;
    case Outcome::kConfigRetry:
      return pcie::CplStatus::kConfigRetry;
    default:
      return pcie::CplStatus::kCompleterAbort;
  }
}

Outcome outcome_of_status(uint8_t status) {
  switch (status) {
    case 0:
      return Outcome::kSuccess;
    case 1:
      return Outcome::kUnsupportedRequest;
    case 2:
      return Outcome::kConfigRetry;
    default:
      return Outcome::kCompleterAbort;
  }
}

}  // namespace

std::shared_ptr<Link> Link::create(std::unique_ptr<Transport> transport, const Setup& setup, Handler* handler) {
  return std::shared_ptr<Link>(new Link(std::move(transport), setup, handler));
}

Link::Link(std::unique_ptr<Transport> transport, const Setup& setup, Handler* handler)
    : transport_(std::move(transport)),
      setup_(setup),
      clock_(*setup.options.clock),
      handler_(handler),
      queue_(*transport_, clock_, setup.options.deadlines.fast_io_fail, received_, pool_,
             {[this] { kick(); }, [this](absl::Status why) { fail(std::move(why)); }}),
      requester_({setup.id, setup.negotiated.peer_accepts, setup.negotiated.max_read_request,
                  setup.options.deadlines.read, &clock_},
                 queue_),
      parser_(Phase::kLive, setup.negotiated.max_payload, kReceiveBytes) {}

Link::~Link() {
  // Only the service thread itself can still be here: its owner closed the link from on_end.
  if (service_.joinable()) service_.detach();
}

absl::Status Link::start() {
  if (setup_.waiters_read && transport_->poll_fd() >= 0) {
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.valid() || !wake_.valid()) return base::errno_status("fabric session");
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = wake_.get();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0)
      return base::errno_status("fabric session: epoll");
    event.data.fd = transport_->poll_fd();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, transport_->poll_fd(), &event) != 0) {
      return base::errno_status("fabric session: epoll");
    }
    armed_ = true;
  }
  const absl::Duration now = clock_.monotonic();
  last_heard_ns_.store(absl::ToInt64Nanoseconds(now), std::memory_order_relaxed);
  next_ping_ = now + setup_.options.deadlines.keep_alive;
  // The threads keep the link alive; the link's owner joins them in close().
  reader_ = std::thread(
      [self = shared_from_this()] { self->epoll_.valid() ? self->reader_main_epoll() : self->reader_main(); });
  service_ = std::thread([self = shared_from_this()] { self->service_main(); });
  return absl::OkStatus();
}

bool Link::in_dispatch() const { return t_inside == this; }

// ---- requests ------------------------------------------------------------------------------------------------------

void Link::begin(const Requester::OperationPtr& operation) {
  absl::Duration earliest;
  if (!requester_.start(operation, earliest)) return;
  flush();
  if (!operation->waited_for) watch(earliest);
}

void Link::watch(absl::Duration deadline) {
  if (absl::ToInt64Nanoseconds(deadline) < planned_ns_.load(std::memory_order_seq_cst)) kick();
}

void Link::kick() {
  std::lock_guard lock(service_mutex_);
  kicked_ = true;
  service_wake_.notify_one();
}

void Link::read_memory(uint64_t address, std::span<std::byte> out, function::Done done) {
  if (out.empty() || address + out.size() - 1 < address) {
    done(out.empty() ? Outcome::kSuccess : Outcome::kUnsupportedRequest);
    return;
  }
  auto operation = std::make_shared<Requester::Operation>();
  operation->request.type = pcie::TlpType::kMemRead;
  operation->address = address;
  operation->left = out.size();
  operation->out = out.data();
  operation->done = std::move(done);
  begin(operation);
}

void Link::read_memory(uint64_t address, uint32_t bytes, function::ReadDone done) {
  auto operation = std::make_shared<Requester::Operation>();
  operation->request.type = pcie::TlpType::kMemRead;
  if (bytes <= operation->small.size()) {
    operation->result = std::span(operation->small).first(bytes);
  } else {
    operation->large.resize(bytes);
    operation->result = operation->large;
  }
  operation->address = address;
  operation->left = bytes;
  operation->out = operation->result.data();
  operation->read_done = std::move(done);
  begin(operation);
}

void Link::read_config(uint32_t offset, uint8_t byte_enable, function::ReadDone done) {
  auto operation = std::make_shared<Requester::Operation>();
  pcie::Tlp& request = operation->request;
  request.type = pcie::TlpType::kCfgRead0;
  request.length_dw = 1;
  request.first_be = byte_enable;
  request.target = setup_.peer;
  request.config_register = static_cast<uint16_t>(offset & ~3u);
  operation->left = 4;
  operation->result = std::span(operation->small).first(4);
  operation->read_done = std::move(done);
  begin(operation);
}

void Link::write_config(uint32_t offset, uint8_t byte_enable, uint32_t dw, absl::Duration deadline,
                        function::Done done) {
  auto operation = std::make_shared<Requester::Operation>();
  pcie::Tlp& request = operation->request;
  request.type = pcie::TlpType::kCfgWrite0;
  request.length_dw = 1;
  request.first_be = byte_enable;
  request.target = setup_.peer;
  request.config_register = static_cast<uint16_t>(offset & ~3u);
  request.payload.resize(4);
  Le<uint32_t> wire;
  wire.set(dw);
  std::memcpy(request.payload.data(), &wire, 4);
  operation->left = 4;
  operation->deadline = deadline;
  operation->done = std::move(done);
  begin(operation);
}

void Link::atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                  function::ReadDone done) {
  if ((width != 4 && width != 8) || address % width != 0) {
    done(Outcome::kUnsupportedRequest, {});
    return;
  }
  auto operation = std::make_shared<Requester::Operation>();
  pcie::Tlp& request = operation->request;
  switch (op) {
    case function::AtomicOp::kFetchAdd:
      request.type = pcie::TlpType::kFetchAdd;
      break;
    case function::AtomicOp::kSwap:
      request.type = pcie::TlpType::kSwap;
      break;
    case function::AtomicOp::kCompareSwap:
      request.type = pcie::TlpType::kCompareSwap;
      break;
  }
  const bool cas = op == function::AtomicOp::kCompareSwap;
  request.address = address;
  request.length_dw = static_cast<uint16_t>((cas ? 2 : 1) * width / 4);
  request.payload.resize(request.length_dw * 4u);
  Le<uint64_t> wire;
  if (cas) {  // the compare value comes first
    wire.set(compare);
    std::memcpy(request.payload.data(), &wire, width);
  }
  wire.set(operand);
  std::memcpy(request.payload.data() + (cas ? width : 0), &wire, width);
  operation->left = width;
  operation->result = std::span(operation->small).first(width);
  operation->read_done = std::move(done);
  begin(operation);
}

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

void Link::write_memory(uint64_t address, std::span<const std::byte> data) {
  if (data.empty() || address + data.size() - 1 < address) {
    if (!data.empty()) count_unsupported();
    return;
  }
  const bool may_wait = !in_dispatch();
  uint64_t last = 0;
  unsigned portion = 0;
  bool referenced = false;
  bool open = true;
  size_t at = 0;
  pcie::split_request(address, data.size(), setup_.negotiated.max_payload, [&](uint64_t piece_address, uint32_t bytes) {
    if (!open) return;
    const std::span<const std::byte> piece = data.subspan(at, bytes);
    at += bytes;
    const pcie::ByteEnables be = pcie::byte_enables(piece_address, bytes);
    pcie::Tlp tlp;
    tlp.type = pcie::TlpType::kMemWrite;
    tlp.requester = setup_.id;
    tlp.address = piece_address & ~uint64_t{3};
    tlp.length_dw = be.length_dw;
    tlp.first_be = be.first;
    tlp.last_be = be.last;
    const uint32_t payload_bytes = be.length_dw * 4u;
    Packet packet;
    std::array<std::byte, 16> small;
    std::span<const std::byte> payload = piece;
    if (payload_bytes <= small.size()) {
      small.fill(std::byte{0});
      std::memcpy(small.data() + (piece_address & 3), piece.data(), bytes);
      payload = std::span(small).first(payload_bytes);
    } else if (!may_wait || payload_bytes != bytes || data.size() <= pcie::kMaxPayloadBytes) {
      // Padding to whole DWs needs a copy; so does whoever must not wait, or need not for so little.
      packet.buffer = pool_.get();
      std::memset(packet.buffer.get(), 0, 4);
      std::memset(packet.buffer.get() + payload_bytes - 4, 0, 4);
      std::memcpy(packet.buffer.get() + (piece_address & 3), piece.data(), bytes);
      payload = {packet.buffer.get(), payload_bytes};
    } else {
      referenced = true;
    }
    if (!pack(tlp, 0, payload, packet).ok()) {
      open = false;
      return;
    }
    tlps_sent_.fetch_add(1, std::memory_order_relaxed);
    const uint64_t number = queue_.append(std::move(packet), true);
    if (number == 0) {
      open = false;
      return;
    }
    last = number;
    if (may_wait && referenced && ++portion == kPortion) {
      portion = 0;
      referenced = false;
      open = queue_.wait_sent(last).ok();
    }
  });
  if (!may_wait) return;  // flushed at the end of the dispatch
  if (last != 0 && (referenced || queue_.queued_bytes() > SendQueue::kSoftBytes)) {
    queue_.wait_sent(last).IgnoreError();  // the queue has told the link
  } else {
    queue_.flush();
  }
}

void Link::reset_peer(function::Done done) {
  const absl::Duration deadline = clock_.monotonic() + setup_.options.deadlines.fast_io_fail;
  uint32_t transaction = 0;
  {
    std::lock_guard lock(service_mutex_);
    if (alive()) {
      if (++next_reset_ == 0) ++next_reset_;
      transaction = next_reset_;
      resets_.emplace(transaction, PendingReset{deadline, std::move(done)});
    }
  }
  if (transaction == 0) {
    done(Outcome::kLinkDown);
    return;
  }
  Packet packet;
  const ResetWire wire{};
  pack_control(FrameType::kReset, 0, transaction, std::as_bytes(std::span(&wire, 1)), packet);
  queue_.append(std::move(packet), true);
  flush();
  watch(deadline);
}

// ---- answers -------------------------------------------------------------------------------------------------------

bool Link::admit() {
  if (inbound_.fetch_add(1, std::memory_order_relaxed) < setup_.negotiated.we_accept + kAbandoned) return true;
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  return false;
}

void Link::answer_data(const pcie::Tlp& request, uint32_t transaction, Buffer data) {
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  const std::byte* const bytes = data.get();
  // The buffer goes with the last piece: pieces leave in order.
  Packet previous;
  bool first = true;
  for_each_completion(request, setup_.id, setup_.negotiated.max_payload, setup_.negotiated.read_completion_boundary,
                      [&](const pcie::Tlp& completion, uint32_t offset, uint32_t length) {
                        if (!first) queue_.append(std::move(previous), true);
                        first = false;
                        previous = Packet();
                        pack(completion, transaction, {bytes + offset, length}, previous).IgnoreError();
                        tlps_sent_.fetch_add(1, std::memory_order_relaxed);
                      });
  previous.buffer = std::move(data);
  queue_.append(std::move(previous), true);
  flush();
}

void Link::answer_inline(const pcie::Tlp& request, uint32_t transaction, std::span<const std::byte> dws) {
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  pcie::Tlp completion;
  completion.type = pcie::TlpType::kCompletionData;
  completion.requester = request.requester;
  completion.tag = request.tag;
  completion.completer = setup_.id;
  completion.traffic_class = request.traffic_class;
  completion.attributes = request.attributes;
  completion.length_dw = static_cast<uint16_t>(dws.size() / 4);
  completion.byte_count = static_cast<uint16_t>(dws.size());
  if (request.type == pcie::TlpType::kMemRead) {
    const pcie::ByteRange range = pcie::range_of(request);
    completion.byte_count = static_cast<uint16_t>(std::max<uint32_t>(range.bytes, 1));
    completion.lower_address = static_cast<uint8_t>(range.address & 0x7f);
  }
  Packet packet;
  if (!pack(completion, transaction, dws, packet).ok()) return;
  tlps_sent_.fetch_add(1, std::memory_order_relaxed);
  queue_.append(std::move(packet), true);
  flush();
}

void Link::answer_status(const pcie::Tlp& request, uint32_t transaction, Outcome outcome) {
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  if (outcome == Outcome::kUnsupportedRequest) count_unsupported();
  Packet packet;
  const pcie::Tlp completion = pcie::make_completion_status(request, status_of(outcome), setup_.id);
  if (!pack(completion, transaction, {}, packet).ok()) return;
  tlps_sent_.fetch_add(1, std::memory_order_relaxed);
  queue_.append(std::move(packet), true);
  flush();
}

void Link::answer_reset(uint32_t transaction, Outcome outcome) {
  ResetWire wire{};
  wire.status.set(static_cast<uint8_t>(status_of(outcome)));
  Packet packet;
  pack_control(FrameType::kReset, kFlagAnswer, transaction, std::as_bytes(std::span(&wire, 1)), packet);
  queue_.append(std::move(packet), true);
  flush();
}

// ---- reading -------------------------------------------------------------------------------------------------------

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
      if (done) done(outcome_of_status(wire.status.get()));
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

// ---- service -------------------------------------------------------------------------------------------------------

void Link::run_later(absl::Duration delay, std::function<void()> task) {
  const absl::Duration at = clock_.monotonic() + delay;
  bool now = false;
  {
    std::lock_guard lock(service_mutex_);
    now = !alive();
    if (!now) later_.push_back({at, task});
  }
  if (now) {
    task();
    return;
  }
  watch(at);
}

void Link::run_due(bool all) {
  const absl::Duration now = clock_.monotonic();
  std::vector<std::function<void()>> due;
  {
    std::lock_guard lock(service_mutex_);
    for (size_t i = 0; i < later_.size();) {
      if (all || later_[i].at <= now) {
        due.push_back(std::move(later_[i].task));
        later_.erase(later_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }
  for (auto& task : due) task();
}

void Link::expire_resets(bool all) {
  const absl::Duration now = clock_.monotonic();
  std::vector<function::Done> ended;
  {
    std::lock_guard lock(service_mutex_);
    for (auto it = resets_.begin(); it != resets_.end();) {
      if (all || it->second.deadline <= now) {
        ended.push_back(std::move(it->second.done));
        it = resets_.erase(it);
      } else {
        ++it;
      }
    }
  }
  for (auto& done : ended) done(all ? Outcome::kLinkDown : Outcome::kTimeout);
}

void Link::send_ping() {
  PingWire wire;
  wire.stamp.set(static_cast<uint64_t>(absl::ToInt64Nanoseconds(clock_.monotonic())));
  Packet packet;
  pack_control(FrameType::kPing, 0, 0, std::as_bytes(std::span(&wire, 1)), packet);
  ping_out_.store(true, std::memory_order_relaxed);
  pings_.fetch_add(1, std::memory_order_relaxed);
  queue_.append(std::move(packet), false);
}

void Link::serve_timers() {
  const absl::Duration now = clock_.monotonic();
  const absl::Duration heard = absl::Nanoseconds(last_heard_ns_.load(std::memory_order_relaxed));
  const Deadlines& deadlines = setup_.options.deadlines;
  if (now - heard > deadlines.ctrl_loss) {
    terminate(TerminateReason::kKeepAliveLost, 0, "nothing heard",
              absl::DeadlineExceededError(absl::StrCat(description(), ": nothing heard from the peer for ctrl_loss (",
                                                       absl::FormatDuration(deadlines.ctrl_loss), ")")));
    return;
  }
  const uint64_t heard_frames = frames_heard_.load(std::memory_order_relaxed);
  if (heard_frames != heard_at_timeout_) {
    heard_at_timeout_ = heard_frames;
    timeouts_in_a_row_ = 0;
  }
  if (const unsigned timeouts = requester_.expire(); timeouts != 0) {
    timeouts_in_a_row_ += timeouts;
    if (timeouts_in_a_row_ >= kTimeoutsUntilDown) {
      terminate(TerminateReason::kKeepAliveLost, 0, "requests time out and nothing is heard",
                absl::DeadlineExceededError(
                    absl::StrCat(description(), ": ", timeouts_in_a_row_,
                                 " requests in a row timed out and nothing was heard from the peer")));
      return;
    }
    // A slow function is not a dead peer: its session answers pings. Ask at once, not at the next interval.
    if (!ping_out_.load(std::memory_order_relaxed)) send_ping();
  }
  if (now >= next_ping_) {
    send_ping();
    next_ping_ = now + deadlines.keep_alive;
  }
  expire_resets(false);
  run_due(false);
  queue_.flush();
}

void Link::service_main() {
  Inside inside(this);
  while (alive()) {
    // A deadline that is set while we look at the others must wake us: until we have a plan, everything does.
    planned_ns_.store(INT64_MAX, std::memory_order_seq_cst);
    serve_timers();
    const absl::Duration heard = absl::Nanoseconds(last_heard_ns_.load(std::memory_order_relaxed));
    absl::Duration next = std::min(next_ping_, heard + setup_.options.deadlines.ctrl_loss + absl::Milliseconds(1));
    next = std::min(next, requester_.next_deadline());
    if (queue_.backlog()) {
      const absl::Duration wait = std::clamp(next - clock_.monotonic(), absl::ZeroDuration(), absl::Milliseconds(10));
      queue_.serve_backlog(wait);
      continue;
    }
    std::unique_lock lock(service_mutex_);
    for (const auto& [transaction, pending] : resets_) next = std::min(next, pending.deadline);
    for (const Later& later : later_) next = std::min(next, later.at);
    planned_ns_.store(absl::ToInt64Nanoseconds(next), std::memory_order_seq_cst);
    const absl::Duration wait = next - clock_.monotonic();
    if (!kicked_ && wait > absl::ZeroDuration() && alive()) {
      service_wake_.wait_for(lock, absl::ToChronoNanoseconds(wait), [&] { return kicked_ || !alive(); });
    }
    kicked_ = false;
  }
  teardown();
}

// ---- end -----------------------------------------------------------------------------------------------------------

void Link::fail(absl::Status why) { end(std::move(why), false); }

void Link::end(absl::Status why, bool last_words) {
  {
    std::lock_guard lock(end_mutex_);
    if (dead_.load(std::memory_order_relaxed)) return;
    why_ = std::move(why);
    last_words_ = last_words;
    dead_.store(true, std::memory_order_seq_cst);
  }
  if (!last_words) transport_->shutdown();
  if (wake_.valid()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof(one));
  }
  kick();
  { std::lock_guard lock(lead_mutex_); }
  lead_changed_.notify_all();
}

void Link::terminate(TerminateReason reason, uint32_t offset, const std::string& detail, absl::Status why) {
  if (!alive()) return;
  const std::vector<std::byte> frame = encode_terminate_frame(reason, offset, detail);
  Packet packet;
  std::memcpy(packet.head.data(), frame.data(), kEnvelopeBytes + sizeof(TerminateWire));
  packet.head_bytes = kEnvelopeBytes + sizeof(TerminateWire);
  packet.payload_bytes = static_cast<uint32_t>(frame.size()) - packet.head_bytes;
  if (packet.payload_bytes != 0) {
    packet.buffer = pool_.get();
    std::memcpy(packet.buffer.get(), frame.data() + packet.head_bytes, packet.payload_bytes);
    packet.payload = packet.buffer.get();
  }
  queue_.append(std::move(packet), false);
  // Somebody else may be sending just now, so it is the service thread that sees the last words out.
  queue_.flush();
  end(std::move(why), true);
}

void Link::teardown() {
  // Setup in reverse: no more bytes in, no more bytes out, nobody waits any more, the user is told.
  requester_.end_all();
  absl::Status why;
  bool last_words = false;
  {
    std::lock_guard lock(end_mutex_);
    why = why_;
    last_words = last_words_;
  }
  if (last_words) queue_.drain(kLastWords);
  transport_->shutdown();
  {
    // A waiter that leads leaves as soon as its receive returns, which shutdown() made sure of.
    std::unique_lock lock(lead_mutex_);
    while (leading_) lead_changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
  if (reader_.joinable()) reader_.join();
  queue_.close();
  expire_resets(true);
  run_due(true);
  handler_->on_end(why, local_close_.load(std::memory_order_acquire));
}

void Link::close(TerminateReason reason) {
  if (alive()) {
    local_close_.store(true, std::memory_order_release);
    terminate(reason, 0, "", absl::CancelledError(absl::StrCat("closed here: ", name_of(reason))));
  }
  if (in_dispatch()) return;  // from on_end, the last thing the service thread does
  std::lock_guard close_lock(close_mutex_);
  if (service_.joinable()) service_.join();
}

SessionStats Link::stats() const {
  SessionStats out;
  const Requester::Counters& c = requester_.counters();
  out.non_posted_issued = c.issued;
  out.tlps_sent = tlps_sent_ + c.issued;
  out.tlps_received = tlps_received_;
  out.bytes_sent = queue_.bytes_sent();
  out.bytes_received = bytes_received_;
  out.completed_success = c.success;
  out.completed_ur = c.ur;
  out.completed_crs = c.crs;
  out.completed_ca = c.ca;
  out.completed_cto = c.cto;
  out.completed_poisoned = c.poisoned;
  out.completed_link_down = c.link_down;
  out.late_completions = c.late;
  out.unexpected_completions = c.unexpected;
  out.requests_unsupported = unsupported_;
  out.malformed = malformed_;
  out.pings_sent = pings_;
  out.pongs_received = pongs_;
  out.last_round_trip = absl::Nanoseconds(round_trip_ns_.load(std::memory_order_relaxed));
  return out;
}

}  // namespace dxpu::fabric
