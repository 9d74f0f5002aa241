#include "proxy/box/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "proxy/base/status.h"

namespace dxpu::box {

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::create() {
  std::unique_ptr<EventLoop> loop(new EventLoop);
  loop->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_.valid()) return base::errno_status("epoll_create1");
  loop->wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->wake_.valid()) return base::errno_status("eventfd");
  int fd = loop->wake_.get();
  DXPU_RETURN_IF_ERROR(loop->watch(fd, [fd] {
    uint64_t count = 0;
    [[maybe_unused]] ssize_t n = ::read(fd, &count, sizeof(count));
  }));
  return loop;
}

absl::Status EventLoop::watch(int fd, std::function<void()> readable) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return base::errno_status("epoll_ctl");
  watches_[fd] = std::make_shared<std::function<void()>>(std::move(readable));
  return absl::OkStatus();
}

void EventLoop::unwatch(int fd) {
  if (watches_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void EventLoop::wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = ::write(wake_.get(), &one, sizeof(one));
}

void EventLoop::post(std::function<void()> work) {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    posted_.push_back(std::move(work));
  }
  wake();
}

bool EventLoop::call(std::function<void()> work, absl::Duration deadline) {
  auto done = std::make_shared<absl::Notification>();
  post([done, work = std::move(work)] {
    work();
    done->Notify();
  });
  const absl::Time end = absl::Now() + deadline;
  while (!done->WaitForNotificationWithTimeout(
      std::min(absl::Milliseconds(50), std::max(end - absl::Now(), absl::ZeroDuration())))) {
    absl::MutexLock lock(&mutex_);
    if (stopping_ || absl::Now() >= end) return done->HasBeenNotified();
  }
  return true;
}

void EventLoop::stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake();
}

void EventLoop::run() {
  std::array<epoll_event, 32> events;
  for (;;) {
    std::deque<std::function<void()>> work;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      work.swap(posted_);
    }
    for (auto& item : work) item();
    absl::Duration wait = tick_ ? tick_() : absl::InfiniteDuration();
    {
      absl::MutexLock lock(&mutex_);
      if (!posted_.empty() || stopping_) wait = absl::ZeroDuration();
    }
    const int64_t ms = wait >= absl::Hours(1) ? -1 : absl::ToInt64Milliseconds(absl::Ceil(wait, absl::Milliseconds(1)));
    int n = ::epoll_wait(epoll_.get(), events.data(), events.size(), static_cast<int>(ms));
    for (int i = 0; i < n; ++i) {
      // Looked up anew: an earlier callback may have unwatched it.
      auto it = watches_.find(events[i].data.fd);
      if (it == watches_.end()) continue;
      std::shared_ptr<std::function<void()>> readable = it->second;
      (*readable)();
    }
  }
}

}  // namespace dxpu::box
