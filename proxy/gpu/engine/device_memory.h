// The memory of a software GPU: a shared mapping of a file, or of anonymous memory.
//
// Shared by reference: a DMA read in flight keeps it mapped. A file outlives the process, which is what makes wiping it
// mean something: what one process left there, the next would find. The file is locked against a second user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proxy/base/unique_fd.h"

namespace dxpu::gpu {

class DeviceMemory {
 public:
  static constexpr uint64_t kMinBytes = uint64_t{1} << 16;
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 40;

  // `path` empty: anonymous. Otherwise a regular file, created (mode 0600, sparse) or of exactly `bytes`.
  // INVALID_ARGUMENT: size not a power of two in bounds, or the file has another one; FAILED_PRECONDITION: in use;
  // RESOURCE_EXHAUSTED: the file system has less room than `bytes`.
  static absl::StatusOr<std::shared_ptr<DeviceMemory>> open(const std::string& path, uint64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uint64_t size() const { return size_; }
  std::span<std::byte> range(uint64_t offset, uint64_t bytes) const { return {base_ + offset, bytes}; }

  // Aligned accesses of 1, 2, 4 or 8 bytes are single and ordered (acquire, release): fences are polled here.
  void read(uint64_t offset, std::span<std::byte> out) const;
  void write(uint64_t offset, std::span<const std::byte> data);
  void move(uint64_t destination, uint64_t source, uint64_t bytes);
  void fill(uint64_t offset, uint64_t bytes, uint64_t pattern, uint32_t pattern_bytes);

  // Gives the pages back where the file system can, so that a wiped memory costs nothing; writes zeros where not.
  absl::Status wipe();
  absl::Status check_zero() const;

 private:
  DeviceMemory(base::UniqueFd fd, std::byte* base, uint64_t size, std::string name);
  base::UniqueFd fd_;
  std::byte* base_;
  uint64_t size_;
  std::string name_;
};

}  // namespace dxpu::gpu
