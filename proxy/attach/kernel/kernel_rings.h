// The user end of one port's rings in /dev/dxpu: requests out, completions in. Knows records, not functions.
//
// Threads: peek() and consume() by one thread; complete(), run() and close() by any, at any time. After close() the
// port is free for another process and every call does nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kmod/uapi/dxpu.h"
#include "proxy/base/unique_fd.h"

namespace dxpu::attach {

class KernelRings {
 public:
  // Opens the device and agrees on the version.
  static absl::StatusOr<std::shared_ptr<KernelRings>> open(const std::string& device);
  ~KernelRings();

  unsigned ports() const { return hello_.ports; }
  // Claims `claim.port` and maps the rings.
  absl::Status claim(const dxpu_claim& claim);

  struct Request {
    dxpu_request head{};
    std::span<const std::byte> data;  // in the ring, until consume()
  };
  // The next request, nothing when the ring is empty.
  std::optional<Request> peek();
  void consume(const Request& request);
  bool empty() const;

  // Answers a request; `data` is its length bytes on success, else empty. Taken in by the kernel at the next WAIT or
  // COMPLETE.
  void complete(uint64_t id, uint16_t status, std::span<const std::byte> data);

  // An ioctl; 0 up, or negative errno. -EINTR is retried. Not WAIT together with close(), which waits for it.
  int run(unsigned long command, void* argument) const;
  int run(unsigned long command, unsigned long argument) const;

  void close();

 private:
  KernelRings() = default;
  int run_alive(unsigned long command, unsigned long argument) const;  // with life_ held
  dxpu_control* control() const { return static_cast<dxpu_control*>(map_); }
  std::byte* at(size_t offset) const { return static_cast<std::byte*>(map_) + offset; }

  // Held by every command, taken before mutex_: the descriptor must not become somebody else's under it.
  mutable std::shared_mutex life_;
  base::UniqueFd fd_;
  dxpu_hello hello_{};
  void* map_ = nullptr;
  uint32_t sq_head_ = 0;
  std::mutex mutex_;      // completion ring, closing
  uint32_t cq_tail_ = 0;  // guarded by mutex_
  std::atomic<bool> closed_{false};
};

}  // namespace dxpu::attach
