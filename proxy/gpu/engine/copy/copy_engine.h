// The engine that moves, fills and sums, in software: what a box without a GPU offers.
//
// One thread per open queue. Host reads of one copy, and of copies that follow it without touching the same device
// memory, are in flight together (`window_bytes`), so that a host far away costs one round trip per window, not per
// page. Every wait for the host has `dma_deadline`; a read that comes later still finds its memory (shared ownership).
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/gpu/engine/device_memory.h"
#include "proxy/gpu/engine/engine.h"

namespace dxpu::gpu {

struct CopyEngineOptions {
  uint64_t window_bytes = 512 * 4096;  // host reads in flight per queue
  uint32_t read_bytes = 8 * 4096;      // one read; the session cuts it to its read request size
  uint32_t write_bytes = 16 * 4096;    // one posted write
  absl::Duration dma_deadline = absl::Seconds(30);
};

// INVALID_ARGUMENT: a size of zero, or a window smaller than one read.
absl::StatusOr<std::unique_ptr<Engine>> make_copy_engine(std::shared_ptr<DeviceMemory> memory,
                                                         const CopyEngineOptions& options);

}  // namespace dxpu::gpu
