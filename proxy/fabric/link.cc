#include "proxy/fabric/link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/fabric/tlp_io.h"

namespace dxpu::fabric {
namespace {

constexpr unsigned kTimeoutsUntilDown = 3;
constexpr absl::Duration kLastWords = absl::Milliseconds(200);

// The link this thread dispatches for, or whose service thread it is.
thread_local const Link* t_inside = nullptr;

}  // namespace

Link::Inside::Inside(const Link* link) : before_(t_inside) { t_inside = link; }
Link::Inside::~Inside() { t_inside = before_; }

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
  for (auto& done : ended) done(all ? function::Outcome::kLinkDown : function::Outcome::kTimeout);
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
