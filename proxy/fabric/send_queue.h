// The sending half of a session: one ordered queue, flushed by whoever comes by.
//
// Packets are numbered and ordered when they are appended. The first caller of flush() sends; others append meanwhile
// and the sender takes theirs with it, so packets coalesce without anybody waiting for a batch to fill. Nobody who must
// not wait ever waits: when the socket is full, the rest is left to wait_sent() callers and to the service thread.
//
// Threads: any. The transport sees one sender at a time.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proxy/base/clock.h"
#include "proxy/fabric/frame.h"
#include "proxy/fabric/transport/transport.h"

namespace dxpu::fabric {

// Payload buffers: one page and the DW of padding an unaligned range needs at either end.
inline constexpr size_t kBufferBytes = pcie::kMaxPayloadBytes + 8;
using Buffer = std::unique_ptr<std::byte[]>;

// Keeps a few buffers warm. Thread-safe.
class BufferPool {
 public:
  Buffer get();
  void put(std::vector<Buffer>& buffers);

 private:
  static constexpr size_t kKept = 256;
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

// One frame on its way out. Small payloads lie in `head`, others are gathered from where they are.
struct Packet {
  static constexpr size_t kHeadBytes = 64;
  std::array<std::byte, kHeadBytes> head;  // left uninitialised: head_bytes says what counts
  uint32_t head_bytes = 0;
  uint32_t payload_bytes = 0;
  const std::byte* payload = nullptr;
  Buffer buffer;  // keeps `payload` alive when it is ours
};

class SendQueue {
 public:
  struct Hooks {
    std::function<void()> backlog;             // something is left for the service thread
    std::function<void(absl::Status)> failed;  // the transport broke, or no room for fast_io_fail
  };
  // `received` is the highest sequence number taken from the peer, for the ack field.
  SendQueue(Transport& transport, base::Clock& clock, absl::Duration fast_io_fail,
            const std::atomic<uint32_t>& received, BufferPool& pool, Hooks hooks);

  // Never waits. The number to give to wait_sent(); 0 when the queue is closed or beyond its hard bound (which closes
  // it).
  uint64_t append(Packet packet, bool sequenced);
  // Sends what goes at once.
  void flush();
  // Waits until packet `number` has left (its payload is no longer referenced) or the queue is closed.
  absl::Status wait_sent(uint64_t number);
  // As wait_sent for everything appended, but gives up after `patience` without an error.
  void drain(absl::Duration patience);

  // Service thread: true while packets wait for room.
  bool backlog() const { return stuck_.load(std::memory_order_acquire); }
  void serve_backlog(absl::Duration patience);

  // More than this and posted writers wait for their own packets to leave.
  static constexpr size_t kSoftBytes = 1 << 20;
  // More than this means that a peer asks and does not read, or that a continuation writes without end.
  static constexpr size_t kHardBytes = 64 << 20;
  size_t queued_bytes() const { return queued_bytes_.load(std::memory_order_relaxed); }

  // Drops everything, wakes all waiters; append() returns 0 from now on. Returns when nobody is inside the transport.
  void close();

  uint32_t last_sequence() const { return sequence_.load(std::memory_order_acquire); }
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 private:
  enum class Step { kDone, kNoRoom, kFailed };

  // With the lock held and busy_ ours: sends until packet `target` has left.
  Step send_until(std::unique_lock<std::mutex>& lock, uint64_t target);
  void advance(size_t bytes);
  // Somebody else's packets are left: wakes a waiter or the service thread.
  void hand_over(std::unique_lock<std::mutex>& lock);
  void mark_stuck();
  bool out_of_patience() const;

  Transport& transport_;
  base::Clock& clock_;
  const absl::Duration fast_io_fail_;
  const std::atomic<uint32_t>& received_;
  BufferPool& pool_;
  Hooks hooks_;

  std::mutex mutex_;
  std::condition_variable changed_;  // packets left, busy_ fell, closed
  std::vector<Packet> pending_;      // appended, nobody has touched them
  std::vector<Packet> in_flight_;    // being sent by the holder of busy_
  size_t in_flight_at_ = 0;          // first unsent packet of in_flight_
  size_t in_flight_offset_ = 0;      // bytes of it that have left
  std::vector<Buffer> used_;         // buffers of packets that have left
  uint64_t appended_ = 0, sent_ = 0;
  bool busy_ = false;
  bool closed_ = false;
  unsigned waiters_ = 0;
  absl::Duration stuck_since_;
  absl::Status failure_;
  std::atomic<bool> stuck_{false};
  std::atomic<uint32_t> sequence_{0};
  std::atomic<size_t> queued_bytes_{0};
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace dxpu::fabric
