// What fabric tests share: both ends of a session around a function, a host memory, waits with deadlines.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "proxy/fabric/session.h"
#include "proxy/fabric/transport/transport.h"
#include "proxy/function/memory_function.h"
#include "tests/fabric/fake_transport.h"

namespace dxpu::fabric::testing {

inline constexpr absl::Duration kPatience = absl::Seconds(20);

// True as soon as `condition` holds, false when it does not within the patience of a test.
template <typename Condition>
bool eventually(Condition condition, absl::Duration patience = kPatience) {
  const absl::Time until = absl::Now() + patience;
  while (!condition()) {
    if (absl::Now() > until) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

// Ends once; says so loudly when it ends twice.
class Ended {
 public:
  function::Done done() {
    return [this](function::Outcome outcome) { set(outcome, {}); };
  }
  function::ReadDone read_done() {
    return [this](function::Outcome outcome, std::span<const std::byte> data) { set(outcome, data); };
  }
  function::Outcome wait() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience), [&] { return times_ != 0; })) {
      ADD_FAILURE() << "a request never ended";
    }
    return outcome_;
  }
  std::vector<std::byte> data() {
    std::lock_guard lock(mutex_);
    return data_;
  }
  uint32_t u32() {
    uint32_t value = 0;
    std::lock_guard lock(mutex_);
    std::memcpy(&value, data_.data(), std::min<size_t>(4, data_.size()));
    return value;
  }
  int times() {
    std::lock_guard lock(mutex_);
    return times_;
  }

 private:
  void set(function::Outcome outcome, std::span<const std::byte> data) {
    std::lock_guard lock(mutex_);
    if (++times_ != 1) ADD_FAILURE() << "a request ended " << times_ << " times";
    outcome_ = outcome;
    data_.assign(data.begin(), data.end());
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  int times_ = 0;
  function::Outcome outcome_ = function::Outcome::kLinkDown;
  std::vector<std::byte> data_;
};

// Host memory at [kBase, kBase + size): what a function may reach. Records the order of what it sees.
class HostMemory : public function::Upstream {
 public:
  static constexpr uint64_t kBase = 0x40000000;
  explicit HostMemory(size_t bytes) : bytes_(bytes) {}

  void dma_read(uint64_t address, std::span<std::byte> out, function::Done done) override {
    if (hold_reads_) {
      std::lock_guard lock(mutex_);
      held_.push_back({address, out, std::move(done)});
      return;
    }
    finish(address, out, done);
  }
  void dma_write(uint64_t address, std::span<const std::byte> data) override {
    std::lock_guard lock(mutex_);
    ++writes_;
    if (!inside(address, data.size())) {
      ++dropped_;
      return;
    }
    std::memcpy(bytes_.data() + (address - kBase), data.data(), data.size());
  }
  void dma_atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                  function::ReadDone done) override {
    uint64_t old = 0;
    {
      std::lock_guard lock(mutex_);
      if (inside(address, width)) {
        std::memcpy(&old, bytes_.data() + (address - kBase), width);
        uint64_t next = old;
        if (op == function::AtomicOp::kFetchAdd) next = old + operand;
        if (op == function::AtomicOp::kSwap) next = operand;
        if (op == function::AtomicOp::kCompareSwap && old == compare) next = operand;
        std::memcpy(bytes_.data() + (address - kBase), &next, width);
      } else {
        width = 0;
      }
    }
    if (width == 0) {
      done(function::Outcome::kUnsupportedRequest, {});
    } else {
      done(function::Outcome::kSuccess, std::as_bytes(std::span(&old, 1)).first(width));
    }
  }
  void raise_msix(unsigned vector) override {
    std::lock_guard lock(mutex_);
    // What a driver would find in memory when the interrupt wakes it.
    uint64_t seen = 0;
    std::memcpy(&seen, bytes_.data() + watch_, sizeof(seen));
    interrupts_.push_back({vector, seen});
  }

  struct Interrupt {
    unsigned vector;
    uint64_t seen;
  };
  std::vector<Interrupt> interrupts() {
    std::lock_guard lock(mutex_);
    return interrupts_;
  }
  void watch(size_t offset) { watch_ = offset; }
  std::byte* at(size_t offset) { return bytes_.data() + offset; }
  template <typename T>
  T get(size_t offset) {
    std::lock_guard lock(mutex_);
    T out;
    std::memcpy(&out, bytes_.data() + offset, sizeof(T));
    return out;
  }
  void fill(uint32_t seed) {
    std::lock_guard lock(mutex_);
    for (std::byte& b : bytes_) b = static_cast<std::byte>((seed = seed * 1664525 + 1013904223) >> 24);
  }
  std::vector<std::byte> copy() {
    std::lock_guard lock(mutex_);
    return bytes_;
  }
  uint64_t dropped() {
    std::lock_guard lock(mutex_);
    return dropped_;
  }
  void hold_reads(bool hold) { hold_reads_ = hold; }
  size_t held() {
    std::lock_guard lock(mutex_);
    return held_.size();
  }
  void release_reads() {
    std::vector<Held> held;
    {
      std::lock_guard lock(mutex_);
      held.swap(held_);
    }
    for (Held& h : held) finish(h.address, h.out, h.done);
  }

 private:
  struct Held {
    uint64_t address;
    std::span<std::byte> out;
    function::Done done;
  };
  bool inside(uint64_t address, size_t bytes) const {
    return address >= kBase && address - kBase <= bytes_.size() && bytes <= bytes_.size() - (address - kBase);
  }
  void finish(uint64_t address, std::span<std::byte> out, function::Done& done) {
    bool ok = false;
    {
      std::lock_guard lock(mutex_);
      ok = inside(address, out.size());
      if (ok) std::memcpy(out.data(), bytes_.data() + (address - kBase), out.size());
    }
    done(ok ? function::Outcome::kSuccess : function::Outcome::kUnsupportedRequest);
  }
  std::mutex mutex_;
  std::vector<std::byte> bytes_;
  std::vector<Interrupt> interrupts_;
  std::vector<Held> held_;
  std::atomic<bool> hold_reads_{false};
  uint64_t writes_ = 0, dropped_ = 0;
  std::atomic<size_t> watch_{0};
};

// A MemoryFunction whose reads can be held back, and whose upstream tests can reach.
class TestFunction : public function::Function {
 public:
  static constexpr uint64_t kRam = 1 << 20;
  TestFunction() {
    function::MemoryFunctionOptions options;
    options.ram_bytes = kRam;
    options.vectors = 8;
    options.serial_number = 0x1122334455667788;
    auto created = function::MemoryFunction::create(options);
    EXPECT_TRUE(created.ok()) << created.status();
    inner_ = *std::move(created);
  }
  function::Identity identity() const override { return inner_->identity(); }
  pcie::ConfigSpace config() const override { return inner_->config(); }
  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override {
    inner_->config_write(offset, size, value, std::move(done));
  }
  void config_read(uint32_t offset, unsigned size, function::ReadDone done) override {
    inner_->config_read(offset, size, std::move(done));
  }
  void bar_read(unsigned bar, uint64_t offset, uint32_t length, function::ReadDone done) override {
    ++reads;
    if (swallow_reads) {
      std::lock_guard lock(mutex_);
      swallowed_.push_back({bar, offset, length, std::move(done)});
      return;
    }
    inner_->bar_read(bar, offset, length, std::move(done));
  }
  void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override {
    ++writes;
    inner_->bar_write(bar, offset, data);
  }
  void connect(function::Upstream* up) override {
    upstream = up;
    inner_->connect(up);
  }
  void reset(function::Done done) override { inner_->reset(std::move(done)); }
  absl::Status scrub() override { return inner_->scrub(); }

  size_t swallowed() {
    std::lock_guard lock(mutex_);
    return swallowed_.size();
  }
  // Answers what was held back, `times` times over the function's life it may be asked again.
  void answer_swallowed() {
    std::vector<Read> reads_held;
    {
      std::lock_guard lock(mutex_);
      reads_held.swap(swallowed_);
    }
    for (Read& r : reads_held) inner_->bar_read(r.bar, r.offset, r.length, std::move(r.done));
  }

  std::atomic<function::Upstream*> upstream{nullptr};
  std::atomic<bool> swallow_reads{false};
  std::atomic<int> reads{0}, writes{0};

 private:
  struct Read {
    unsigned bar;
    uint64_t offset;
    uint32_t length;
    function::ReadDone done;
  };
  std::unique_ptr<function::MemoryFunction> inner_;
  std::mutex mutex_;
  std::vector<Read> swallowed_;
};

inline Ticket ticket() {
  Ticket t;
  t.host_id = "vm1";
  t.box_id = "b1";
  t.slot = 3;
  t.attachment_id = "att-7";
  t.generation = 7;
  for (size_t i = 0; i < t.token.size(); ++i) t.token[i] = static_cast<std::byte>(i * 7 + 1);
  return t;
}

// Two connected TCP sockets over loopback.
inline std::pair<std::unique_ptr<Transport>, std::unique_ptr<Transport>> tcp_pair() {
  auto listener = TcpListener::listen("127.0.0.1:0");
  EXPECT_TRUE(listener.ok()) << listener.status();
  auto host = tcp_connect((*listener)->endpoint(), kPatience);
  EXPECT_TRUE(host.ok()) << host.status();
  auto box = (*listener)->accept(kPatience);
  EXPECT_TRUE(box.ok() && *box != nullptr);
  return {*std::move(host), *std::move(box)};
}

// Deadlines that a loaded test machine keeps.
inline SessionOptions patient_options() {
  SessionOptions options;
  options.deadlines.read = absl::Seconds(5);
  options.deadlines.fast_io_fail = absl::Seconds(10);
  options.deadlines.ctrl_loss = absl::Seconds(20);
  options.deadlines.lease = absl::Seconds(30);
  return options;
}

// Both ends of a session around a TestFunction.
struct Joined {
  Joined(std::pair<std::unique_ptr<Transport>, std::unique_ptr<Transport>> transports, SessionOptions host_options,
         SessionOptions box_options)
      : memory(4 << 20) {
    std::thread box([&] {
      absl::StatusOr<Hello> got = read_hello(*transports.second, kPatience);
      if (!got.ok()) {
        box_status = got.status();
        return;
      }
      hello = *got;
      FunctionServer::Callbacks callbacks;
      callbacks.on_heard = [this] { ++heard; };
      callbacks.on_end = [this](absl::Status status) {
        std::lock_guard lock(mutex);
        box_end = status;
        ++box_ended;
      };
      auto served =
          FunctionServer::serve(function, std::move(transports.second), *got, 9, box_options, std::move(callbacks));
      box_status = served.status();
      if (served.ok()) server = *std::move(served);
    });
    auto connected = RemoteFunction::connect(std::move(transports.first), ticket(), host_options, kPatience,
                                             [this](absl::Status status) {
                                               std::lock_guard lock(mutex);
                                               host_end = status;
                                               ++losses;
                                             });
    box.join();
    host_status = connected.status();
    if (connected.ok()) remote = *std::move(connected);
    if (remote) remote->connect(&memory);
  }
  explicit Joined(SessionOptions options = patient_options()) : Joined(tcp_pair(), options, options) {}
  ~Joined() {
    if (remote) remote->close();
    if (server) server->close(TerminateReason::kShutdown);
  }
  bool up() const { return host_status.ok() && box_status.ok(); }
  function::Upstream& upstream() { return *function.upstream.load(); }
  absl::Status loss() {
    std::lock_guard lock(mutex);
    return host_end;
  }
  absl::Status end() {
    std::lock_guard lock(mutex);
    return box_end;
  }

  HostMemory memory;
  TestFunction function;
  Hello hello;
  std::atomic<int> heard{0}, losses{0}, box_ended{0};
  std::mutex mutex;
  absl::Status host_status, box_status, host_end, box_end;
  std::unique_ptr<FunctionServer> server;
  std::unique_ptr<RemoteFunction> remote;
};

}  // namespace dxpu::fabric::testing
