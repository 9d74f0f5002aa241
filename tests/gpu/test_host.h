// A host for the GPU function without any attach point: memory, and full control over when and how reads end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proxy/function/function.h"

namespace dxpu::gpu {

class TestHost : public function::Upstream {
 public:
  static constexpr uint64_t kBase = uint64_t{1} << 32;

  explicit TestHost(uint64_t bytes = uint64_t{8} << 20) : memory(bytes) {}

  void dma_read(uint64_t address, std::span<std::byte> out, function::Done done) override {
    Read read{address, out, std::move(done)};
    {
      std::lock_guard lock(mutex_);
      ++reads_;
      outstanding_bytes_ += out.size();
      max_outstanding_bytes_ = std::max(max_outstanding_bytes_, outstanding_bytes_);
      if (hold_) {
        held_.push_back(std::move(read));
        changed_.notify_all();
        return;
      }
    }
    end(read, function::Outcome::kSuccess);
  }
  void dma_write(uint64_t address, std::span<const std::byte> data) override {
    std::lock_guard lock(mutex_);
    if (!inside(address, data.size())) {
      ++refused_;
      return;
    }
    std::memcpy(memory.data() + (address - kBase), data.data(), data.size());
    events_.push_back({"write", address, data.size()});
    changed_.notify_all();
  }
  void dma_atomic(function::AtomicOp, uint64_t, unsigned, uint64_t, uint64_t, function::ReadDone done) override {
    done(function::Outcome::kUnsupportedRequest, {});
  }
  void raise_msix(unsigned vector) override {
    std::lock_guard lock(mutex_);
    events_.push_back({"vector", vector, 0});
    changed_.notify_all();
  }

  struct Event {
    std::string what;
    uint64_t value;  // address or vector
    uint64_t bytes;
  };
  std::vector<Event> events() {
    std::lock_guard lock(mutex_);
    return events_;
  }
  unsigned count(const std::string& what, uint64_t value) {
    unsigned n = 0;
    for (const Event& event : events()) n += event.what == what && event.value == value ? 1 : 0;
    return n;
  }
  uint64_t reads() {
    std::lock_guard lock(mutex_);
    return reads_;
  }
  uint64_t refused() {
    std::lock_guard lock(mutex_);
    return refused_;
  }
  uint64_t max_outstanding_bytes() {
    std::lock_guard lock(mutex_);
    return max_outstanding_bytes_;
  }

  // From now on reads wait until release().
  void hold() {
    std::lock_guard lock(mutex_);
    hold_ = true;
  }
  // False: fewer than `bytes` were waiting for an answer before the deadline.
  bool wait_held(uint64_t bytes) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] {
      uint64_t sum = 0;
      for (const Read& read : held_) sum += read.out.size();
      return sum >= bytes;
    });
  }
  // Ends what waits, last one first when `backwards`; with `stay` later reads wait again.
  void release(function::Outcome outcome = function::Outcome::kSuccess, bool backwards = false, bool stay = false) {
    std::deque<Read> reads;
    {
      std::lock_guard lock(mutex_);
      reads.swap(held_);
      hold_ = stay;
    }
    while (!reads.empty()) {
      Read read = std::move(backwards ? reads.back() : reads.front());
      backwards ? reads.pop_back() : reads.pop_front();
      end(read, outcome);
    }
  }
  template <typename Condition>
  bool wait_for(Condition condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), condition);
  }

  std::span<std::byte> at(uint64_t offset, uint64_t bytes) { return std::span(memory).subspan(offset, bytes); }
  uint64_t word(uint64_t offset) {
    std::lock_guard lock(mutex_);
    uint64_t value;
    std::memcpy(&value, memory.data() + offset, sizeof value);
    return value;
  }

  std::vector<std::byte> memory;

 private:
  struct Read {
    uint64_t address;
    std::span<std::byte> out;
    function::Done done;
  };
  bool inside(uint64_t address, uint64_t bytes) const {
    return address >= kBase && address - kBase <= memory.size() && bytes <= memory.size() - (address - kBase);
  }
  void end(Read& read, function::Outcome outcome) {
    {
      std::lock_guard lock(mutex_);
      outstanding_bytes_ -= read.out.size();
      if (outcome == function::Outcome::kSuccess) {
        if (inside(read.address, read.out.size())) {
          std::memcpy(read.out.data(), memory.data() + (read.address - kBase), read.out.size());
        } else {
          outcome = function::Outcome::kUnsupportedRequest;
        }
      }
    }
    read.done(outcome);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Read> held_;
  std::vector<Event> events_;
  bool hold_ = false;
  uint64_t reads_ = 0, refused_ = 0, outstanding_bytes_ = 0, max_outstanding_bytes_ = 0;
};

}  // namespace dxpu::gpu
