#include "proxy/box/gate.h"

#include <spdlog/spdlog.h>

#include <set>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "proxy/base/status.h"

namespace dxpu::box {
namespace {

constexpr absl::Duration kAcceptSlice = absl::Milliseconds(200);

class TcpGate : public Gate {
 public:
  TcpGate(std::unique_ptr<fabric::TcpListener> listener, absl::Duration hello_deadline, Handler handler)
      : listener_(std::move(listener)), hello_deadline_(hello_deadline), handler_(std::move(handler)) {
    thread_ = std::thread([this] { accept_loop(); });
  }
  ~TcpGate() override { close(); }

  std::string endpoint() const override { return listener_->endpoint(); }

  void close() override {
    {
      absl::MutexLock lock(&mutex_);
      closing_ = true;
      for (fabric::Transport* stranger : strangers_) stranger->shutdown();
    }
    listener_->shutdown();
    if (thread_.joinable()) thread_.join();
    absl::MutexLock lock(&mutex_);
    auto empty = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return threads_ == 0; };
    mutex_.Await(absl::Condition(&empty));  // each has hello_deadline_ and is shut down
  }

 private:
  void accept_loop();
  void greet(std::unique_ptr<fabric::Transport> transport);

  std::unique_ptr<fabric::TcpListener> listener_;
  const absl::Duration hello_deadline_;
  const Handler handler_;
  absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  size_t threads_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<fabric::Transport*> strangers_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

void TcpGate::accept_loop() {
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      if (closing_) return;
    }
    auto accepted = listener_->accept(kAcceptSlice);
    if (!accepted.ok()) {
      // Out of descriptors, most likely: wait for some to come back, do not spin.
      spdlog::warn("gate={} accept=failed reason=\"{}\"", listener_->endpoint(), accepted.status().ToString());
      absl::MutexLock lock(&mutex_);
      auto closing = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return closing_; };
      mutex_.AwaitWithTimeout(absl::Condition(&closing), kAcceptSlice);
      continue;
    }
    if (*accepted == nullptr) continue;
    absl::MutexLock lock(&mutex_);
    if (closing_) return;
    if (strangers_.size() >= kMaxStrangers) {
      spdlog::warn("gate={} peer=\"{}\" refused=crowded", listener_->endpoint(), (*accepted)->description());
      continue;
    }
    strangers_.insert(accepted->get());
    ++threads_;
    std::thread([this, transport = std::move(*accepted)]() mutable { greet(std::move(transport)); }).detach();
  }
}

void TcpGate::greet(std::unique_ptr<fabric::Transport> transport) {
  auto hello = fabric::read_hello(*transport, hello_deadline_);
  bool go = false;
  {
    absl::MutexLock lock(&mutex_);
    strangers_.erase(transport.get());
    go = !closing_ && hello.ok();
  }
  if (go) {
    handler_(std::move(transport), *std::move(hello));
  } else if (!hello.ok()) {
    spdlog::info("gate={} peer=\"{}\" hello=refused reason=\"{}\"", listener_->endpoint(), transport->description(),
                 hello.status().ToString());
  }
  transport.reset();
  absl::MutexLock lock(&mutex_);
  --threads_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Gate>> Gate::open(const std::string& endpoint, absl::Duration hello_deadline,
                                                 Handler handler) {
  DXPU_ASSIGN_OR_RETURN(auto listener, fabric::TcpListener::listen(endpoint));
  return std::make_unique<TcpGate>(std::move(listener), hello_deadline, std::move(handler));
}

}  // namespace dxpu::box
