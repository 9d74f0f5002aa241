#include "proxy/box/worker.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "proxy/base/status.h"
#include "proxy/base/sync_point.h"

namespace dxpu::box {
namespace {

// A function level reset of our own function is a matter of milliseconds; past this it is broken and the worker with
// it.
constexpr absl::Duration kResetDeadline = absl::Seconds(5);
// How often a renewed lease is reported, at most.
constexpr absl::Duration kRenewalReport = absl::Seconds(1);
// boxd has one connection; a few more while one boxd replaces another.
constexpr size_t kMaxConnections = 8;

class Worker {
 public:
  Worker(const WorkerOptions& options, function::Function& function, base::UniqueFd listener, int stop_fd)
      : options_(options),
        function_(function),
        listener_(std::move(listener)),
        stop_fd_(stop_fd),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        generation_(options.generation),
        started_(monotonic()) {}

  WorkerEnd run();

 private:
  absl::Duration monotonic() { return options_.session.clock->monotonic(); }
  // Since the lease was last renewed: by the host, or by the start (a host gets one lease's time to come).
  absl::Duration lease_age() {
    const int64_t heard = heard_us_.load(std::memory_order_relaxed);
    return monotonic() - (heard == 0 ? started_ : absl::Microseconds(heard));
  }
  WorkerStatus status();
  void report();
  void accept_all();
  // False: the connection is over.
  bool take(int socket);
  void open_session(base::UniqueFd socket, const SessionMessage& message);
  void close_session(fabric::TerminateReason reason);
  absl::Status reset_function();
  WorkerEnd finish(WorkerEnd end, const std::string& detail, fabric::TerminateReason reason);

  const WorkerOptions& options_;
  function::Function& function_;
  base::UniqueFd listener_;
  const int stop_fd_;
  base::UniqueFd wake_;
  std::vector<base::UniqueFd> connections_;
  std::unique_ptr<fabric::FunctionServer> server_;
  uint64_t generation_;
  uint64_t epoch_ = 0;
  const absl::Duration started_;
  std::atomic<int64_t> heard_us_{0};
  int64_t reported_heard_us_ = 0;
  absl::Duration reported_ = absl::ZeroDuration();
  bool reported_up_ = false;
  bool stop_asked_ = false;
  bool function_failed_ = false;
};

WorkerStatus Worker::status() {
  WorkerStatus out;
  out.box_id = options_.box_id;
  out.slot = options_.slot;
  out.attachment_id = options_.attachment_id;
  out.generation = generation_;
  out.pid = ::getpid();
  out.epoch = epoch_;
  out.session_up = server_ != nullptr && server_->alive();
  const int64_t heard = heard_us_.load(std::memory_order_relaxed);
  if (heard != 0) out.heard_ago = std::max(monotonic() - absl::Microseconds(heard), absl::ZeroDuration());
  return out;
}

void Worker::report() {
  const StatusMessage message{status()};
  reported_ = monotonic();
  reported_heard_us_ = heard_us_.load(std::memory_order_relaxed);
  reported_up_ = message.status.session_up;
  // A boxd that does not read is dead or stuck; it asks again when it comes back.
  for (const auto& connection : connections_) control_send(connection.get(), message).IgnoreError();
}

void Worker::accept_all() {
  for (;;) {
    auto accepted = control_accept(listener_.get());
    if (!accepted.ok()) {
      spdlog::error("slot={} control=accept reason=\"{}\"", options_.slot, accepted.status().ToString());
      return;
    }
    if (!accepted->has_value()) return;
    if (connections_.size() >= kMaxConnections) connections_.erase(connections_.begin());
    control_send((*accepted)->get(), StatusMessage{status()}).IgnoreError();
    connections_.push_back(std::move(**accepted));
  }
}

bool Worker::take(int socket) {
  base::UniqueFd passed;
  auto message = control_receive(socket, &passed);
  if (!message.ok()) {
    if (absl::IsUnavailable(message.status())) return false;
    spdlog::warn("slot={} control=ignored reason=\"{}\"", options_.slot, message.status().ToString());
    return true;
  }
  if (!message->has_value()) return true;
  if (std::holds_alternative<StopMessage>(**message)) {
    stop_asked_ = true;
  } else if (const auto* session = std::get_if<SessionMessage>(&**message)) {
    open_session(std::move(passed), *session);
    report();
  }
  return true;
}

void Worker::close_session(fabric::TerminateReason reason) {
  if (server_ == nullptr) return;
  server_->close(reason);
  server_.reset();
}

absl::Status Worker::reset_function() {
  struct Wait {
    absl::Notification done;
    function::Outcome outcome = function::Outcome::kTimeout;
  };
  auto wait = std::make_shared<Wait>();
  function_.reset([wait](function::Outcome outcome) {
    wait->outcome = outcome;
    wait->done.Notify();
  });
  if (!wait->done.WaitForNotificationWithTimeout(kResetDeadline)) return absl::DeadlineExceededError("function reset");
  if (wait->outcome != function::Outcome::kSuccess) {
    return absl::InternalError(absl::StrCat("function reset: ", function::name_of(wait->outcome)));
  }
  return absl::OkStatus();
}

void Worker::open_session(base::UniqueFd socket, const SessionMessage& message) {
  if (!socket.valid()) {
    spdlog::error("slot={} session=refused reason=\"no socket came with the message\"", options_.slot);
    return;
  }
  auto hello = fabric::parse_hello(message.hello);
  if (!hello.ok()) {
    spdlog::error("slot={} session=refused reason=\"{}\"", options_.slot, hello.status().ToString());
    return;
  }
  close_session(fabric::TerminateReason::kShutdown);
  auto transport = fabric::tcp_adopt(socket.release());
  const std::string description = transport->description();
  if (epoch_ != 0) {
    // A new epoch: the host sees a removal and a fresh device. Memory stays, it is the same tenant's.
    if (absl::Status reset = reset_function(); !reset.ok()) {
      spdlog::error("slot={} epoch={} session=refused reason=\"{}\"", options_.slot, message.epoch, reset.ToString());
      fabric::send_terminate(*transport, fabric::TerminateReason::kFunctionFailed, 0, reset.ToString()).IgnoreError();
      function_failed_ = true;
      return;
    }
  }
  epoch_ = message.epoch;
  generation_ = hello->ticket.generation;
  base::sync_point("worker.session");
  const int wake = wake_.get();
  fabric::FunctionServer::Callbacks callbacks;
  callbacks.on_heard = [this] { heard_us_.store(absl::ToInt64Microseconds(monotonic()), std::memory_order_relaxed); };
  callbacks.on_end = [wake, slot = options_.slot, epoch = epoch_](absl::Status status) {
    spdlog::info("slot={} epoch={} session=ended reason=\"{}\"", slot, epoch, status.ToString());
    uint64_t one = 1;
    [[maybe_unused]] ssize_t n = ::write(wake, &one, sizeof(one));
  };
  auto server = fabric::FunctionServer::serve(function_, std::move(transport), *hello, epoch_, options_.session,
                                              std::move(callbacks));
  if (!server.ok()) {
    spdlog::error("slot={} epoch={} session=failed reason=\"{}\"", options_.slot, epoch_, server.status().ToString());
    return;
  }
  server_ = *std::move(server);
  spdlog::info("slot={} attachment={} generation={} epoch={} session=up transport=\"{}\"", options_.slot,
               options_.attachment_id, generation_, epoch_, description);
  base::sync_point("worker.serving");
}

WorkerEnd Worker::finish(WorkerEnd end, const std::string& detail, fabric::TerminateReason reason) {
  close_session(reason);
  for (const auto& connection : connections_) control_send(connection.get(), EndedMessage{end, detail}).IgnoreError();
  spdlog::info("slot={} attachment={} worker=ends reason=\"{}\"", options_.slot, options_.attachment_id, detail);
  return end;
}

WorkerEnd Worker::run() {
  const absl::Duration lease = options_.session.deadlines.lease;
  for (;;) {
    const absl::Duration age = lease_age();
    if (age >= lease) {
      return finish(WorkerEnd::kLeaseExpired, absl::StrCat("nothing heard of the host for ", absl::FormatDuration(age)),
                    fabric::TerminateReason::kLeaseExpired);
    }
    if (stop_asked_) return finish(WorkerEnd::kStopped, "told to stop", fabric::TerminateReason::kShutdown);
    if (function_failed_) {
      return finish(WorkerEnd::kDied, "the function could not be reset", fabric::TerminateReason::kFunctionFailed);
    }
    const bool up = server_ != nullptr && server_->alive();
    const bool renewed = heard_us_.load(std::memory_order_relaxed) != reported_heard_us_;
    if (up != reported_up_ || (renewed && monotonic() - reported_ >= kRenewalReport)) report();

    std::vector<pollfd> fds = {{stop_fd_, POLLIN, 0}, {wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& connection : connections_) fds.push_back({connection.get(), POLLIN, 0});
    const absl::Duration wait = std::min(lease - age, kRenewalReport);
    const int n = ::poll(fds.data(), fds.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
    if (n <= 0) continue;
    if (fds[0].revents != 0) stop_asked_ = true;
    if (fds[1].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] ssize_t got = ::read(wake_.get(), &count, sizeof(count));
    }
    // Connections before the listener: accept_all() changes the list.
    for (size_t i = 3; i < fds.size(); ++i) {
      if (fds[i].revents == 0 || take(fds[i].fd)) continue;
      std::erase_if(connections_, [&](const base::UniqueFd& c) { return c.get() == fds[i].fd; });
    }
    if (fds[2].revents != 0) accept_all();
  }
}

}  // namespace

WorkerEnd run_worker(const WorkerOptions& options, function::Function& function, base::UniqueFd listener, int stop_fd) {
  return Worker(options, function, std::move(listener), stop_fd).run();
}

}  // namespace dxpu::box
