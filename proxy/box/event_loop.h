// boxd's single thread: descriptors, posted work, one timer.
//
// Everything that decides runs here, so nothing that decides needs a lock. post() and call() from any thread; the rest
// from the loop's own (or before run()).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proxy/base/unique_fd.h"

namespace dxpu::box {

class EventLoop {
 public:
  static absl::StatusOr<std::unique_ptr<EventLoop>> create();

  // `readable` runs when `fd` is readable or hung up, until unwatch(fd). A callback may watch and unwatch, itself too.
  absl::Status watch(int fd, std::function<void()> readable);
  void unwatch(int fd);
  // Before each wait: does what is due and says how long the wait may last.
  void set_timer(std::function<absl::Duration()> tick) { tick_ = std::move(tick); }

  void post(std::function<void()> work);
  // Runs `work` on the loop and waits until it has run. False when it did not within `deadline` (it may run later) or
  // the loop is stopped. Never from the loop's own thread.
  bool call(std::function<void()> work, absl::Duration deadline);

  void run();  // until stop()
  void stop();

 private:
  EventLoop() = default;
  void wake();

  base::UniqueFd epoll_;
  base::UniqueFd wake_;
  std::map<int, std::shared_ptr<std::function<void()>>> watches_;
  std::function<absl::Duration()> tick_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dxpu::box
