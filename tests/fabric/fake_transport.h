// A transport pair in memory that can be slow, narrow, deaf or cut.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "proxy/fabric/transport/transport.h"

namespace dxpu::fabric::testing {

struct FakeOptions {
  size_t chunk = 1 << 20;        // receive() gives at most this much: 1 = byte by byte
  size_t capacity = 256 * 1024;  // bytes on their way before try_send finds no room
  absl::Duration delay;          // of every byte
};

// Both directions of a pair. Thread-safe.
class FakeWire {
 public:
  explicit FakeWire(const FakeOptions& options) : options_(options) {}

  // Bytes are taken and never arrive, as behind a stopped peer.
  void set_deaf(bool deaf) {
    std::lock_guard lock(mutex_);
    deaf_ = deaf;
    changed_.notify_all();
  }
  // The connection breaks; what is on its way is lost.
  void cut() {
    std::lock_guard lock(mutex_);
    cut_ = true;
    changed_.notify_all();
  }

 private:
  friend class FakeTransport;
  struct Chunk {
    absl::Time due;
    std::vector<std::byte> bytes;
    size_t at = 0;
  };
  struct Direction {
    std::deque<Chunk> chunks;
    size_t bytes = 0;
  };
  const FakeOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Direction directions_[2];
  bool deaf_ = false;
  bool cut_ = false;
  bool ended_[2] = {false, false};  // shutdown: what is on its way still arrives
};

class FakeTransport : public Transport {
 public:
  static std::pair<std::unique_ptr<Transport>, std::unique_ptr<Transport>> pair(
      const FakeOptions& options, std::shared_ptr<FakeWire>* wire = nullptr) {
    auto shared = std::make_shared<FakeWire>(options);
    if (wire != nullptr) *wire = shared;
    return {std::make_unique<FakeTransport>(shared, 0), std::make_unique<FakeTransport>(shared, 1)};
  }
  FakeTransport(std::shared_ptr<FakeWire> wire, int end) : wire_(std::move(wire)), end_(end) {}
  ~FakeTransport() override { FakeTransport::shutdown(); }

  absl::Status send(std::span<const iovec> batch, absl::Duration deadline) override {
    const absl::Time until = absl::Now() + deadline;
    for (const iovec& part : batch) {
      size_t at = 0;
      while (at < part.iov_len) {
        const iovec rest{static_cast<std::byte*>(part.iov_base) + at, part.iov_len - at};
        absl::StatusOr<size_t> n = try_send({&rest, 1});
        if (!n.ok()) return n.status();
        at += *n;
        if (*n == 0 && !wait_room(until - absl::Now())) return absl::DeadlineExceededError("fake: no room");
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> try_send(std::span<const iovec> batch) override {
    std::lock_guard lock(wire_->mutex_);
    if (over()) return absl::UnavailableError("fake: cut");
    FakeWire::Direction& out = wire_->directions_[end_];
    FakeWire::Chunk chunk;
    chunk.due = absl::Now() + wire_->options_.delay;
    size_t room = wire_->options_.capacity - std::min(out.bytes, wire_->options_.capacity);
    for (const iovec& part : batch) {
      const size_t n = std::min(room, part.iov_len);
      const auto* from = static_cast<const std::byte*>(part.iov_base);
      chunk.bytes.insert(chunk.bytes.end(), from, from + n);
      room -= n;
      if (n < part.iov_len) break;
    }
    const size_t taken = chunk.bytes.size();
    if (taken != 0) {
      out.bytes += taken;
      out.chunks.push_back(std::move(chunk));
      wire_->changed_.notify_all();
    }
    return taken;
  }

  bool wait_room(absl::Duration deadline) override {
    std::unique_lock lock(wire_->mutex_);
    return wire_->changed_.wait_for(lock, absl::ToChronoNanoseconds(deadline), [&] {
      return over() || wire_->directions_[end_].bytes < wire_->options_.capacity;
    });
  }

  absl::StatusOr<size_t> receive(std::span<std::byte> out, absl::Duration deadline) override {
    const absl::Time until = deadline == absl::InfiniteDuration() ? absl::InfiniteFuture() : absl::Now() + deadline;
    std::unique_lock lock(wire_->mutex_);
    FakeWire::Direction& in = wire_->directions_[1 - end_];
    while (true) {
      if (wire_->cut_ || wire_->ended_[end_]) return absl::UnavailableError("fake: cut");
      const absl::Time now = absl::Now();
      absl::Time wake = std::min(until, now + absl::Seconds(1));
      if (!in.chunks.empty() && !wire_->deaf_) {
        FakeWire::Chunk& chunk = in.chunks.front();
        if (chunk.due <= now) {
          const size_t n = std::min({out.size(), wire_->options_.chunk, chunk.bytes.size() - chunk.at});
          std::memcpy(out.data(), chunk.bytes.data() + chunk.at, n);
          chunk.at += n;
          in.bytes -= n;
          if (chunk.at == chunk.bytes.size()) in.chunks.pop_front();
          wire_->changed_.notify_all();
          return n;
        }
        wake = std::min(wake, chunk.due);
      } else if (over()) {
        return absl::UnavailableError("fake: ended");
      }
      if (now >= until) return size_t{0};
      wire_->changed_.wait_for(lock, absl::ToChronoNanoseconds(wake - now));
    }
  }

  void shutdown() override {
    std::lock_guard lock(wire_->mutex_);
    wire_->ended_[end_] = true;
    wire_->changed_.notify_all();
  }
  int poll_fd() const override { return -1; }
  int release_fd() override { return -1; }
  std::string description() const override { return end_ == 0 ? "fake host end" : "fake box end"; }

 private:
  // A deaf end does not hear that the other one has gone either.
  bool over() const { return wire_->cut_ || wire_->ended_[end_] || (wire_->ended_[1 - end_] && !wire_->deaf_); }

  const std::shared_ptr<FakeWire> wire_;
  const int end_;
};

}  // namespace dxpu::fabric::testing
