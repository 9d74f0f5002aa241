// What a driver sees of an attached function: registers, DMA mappings, interrupts. VFIO's vocabulary.
//
// Implementations: attach::DirectDevice (same process, no kernel) and attach::VfioDevice (/dev/vfio). A driver written
// against this runs on both. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dxpu::function {

class LocalDevice {
 public:
  virtual ~LocalDevice() = default;

  virtual absl::Status config_read(uint32_t offset, std::span<std::byte> out) = 0;
  virtual absl::Status config_write(uint32_t offset, std::span<const std::byte> data) = 0;
  // Size in bytes, 0 when the BAR is absent.
  virtual absl::StatusOr<uint64_t> bar_size(unsigned bar) = 0;
  // As on hardware: a read that gets no answer in time gives all ones and OK. An error means a bad argument or a closed
  // device.
  virtual absl::Status bar_read(unsigned bar, uint64_t offset, std::span<std::byte> out) = 0;
  virtual absl::Status bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) = 0;
  // Lets the function reach [memory, memory + bytes) at [iova, iova + bytes). Page aligned. The memory stays the
  // caller's.
  virtual absl::Status map_dma(uint64_t iova, void* memory, uint64_t bytes, bool function_reads,
                               bool function_writes) = 0;
  // After it returns the function reaches nothing there.
  virtual absl::Status unmap_dma(uint64_t iova, uint64_t bytes) = 0;
  // `eventfd` is signalled on each interrupt of `vector`; -1 disables. The descriptor stays the caller's.
  virtual absl::Status set_msix_eventfd(unsigned vector, int eventfd) = 0;
  // Signalled when the function is going away and should be closed (VFIO's REQ interrupt).
  virtual absl::Status set_removal_eventfd(int eventfd) = 0;
  virtual absl::Status reset() = 0;
};

}  // namespace dxpu::function
