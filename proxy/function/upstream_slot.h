// Where a Function keeps its Upstream: a pointer that can be taken away while others use it.
//
// connect() returns only when nobody is inside the old upstream any more, which is what Function::connect promises.
// Reads that the old upstream has accepted but not ended are its own to end. Thread-safe. Calls made through use() may
// nest (a continuation that runs inside dma_read may call use() again). connect() must not be called from inside one.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "proxy/function/function.h"

namespace dxpu::function {

class UpstreamSlot {
 private:
  struct Target {
    Upstream* upstream = nullptr;
    unsigned users = 0;  // guarded by the slot's mutex
  };

 public:
  // Keeps the upstream it was made from in use for as long as it lives; false when there is none.
  class Use {
   public:
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();
    explicit operator bool() const { return target_ != nullptr; }
    Upstream* operator->() const { return target_->upstream; }

   private:
    friend class UpstreamSlot;
    Use(UpstreamSlot& slot, std::shared_ptr<Target> target) : slot_(slot), target_(std::move(target)) {}
    UpstreamSlot& slot_;
    std::shared_ptr<Target> target_;
  };

  void connect(Upstream* upstream);
  Use use();

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::shared_ptr<Target> target_;  // nullptr: nowhere
};

}  // namespace dxpu::function
