#include "proxy/function/upstream_slot.h"

namespace dxpu::function {

UpstreamSlot::Use::~Use() {
  if (target_ == nullptr) return;
  std::lock_guard lock(slot_.mutex_);
  if (--target_->users == 0) slot_.idle_.notify_all();
}

void UpstreamSlot::connect(Upstream* upstream) {
  std::shared_ptr<Target> next;
  if (upstream != nullptr) {
    next = std::make_shared<Target>();
    next->upstream = upstream;
  }
  std::unique_lock lock(mutex_);
  std::shared_ptr<Target> old = std::exchange(target_, std::move(next));
  // New uses find the new target, so the old one can only drain. Its users are calls into an Upstream, each of which
  // has a deadline of its own.
  if (old != nullptr) idle_.wait(lock, [&] { return old->users == 0; });
}

UpstreamSlot::Use UpstreamSlot::use() {
  std::lock_guard lock(mutex_);
  if (target_ != nullptr) ++target_->users;
  return Use(*this, target_);
}

}  // namespace dxpu::function
