// What a user would want to see a GPU function do, on any function::LocalDevice: the logic of the VFIO demo program.
//
// exercise() checks registers, moves data both ways with the function's own DMA engine and compares checksums made on
// both sides, waits for an MSI-X interrupt, measures. leave_pattern() and find_pattern() show what survives a detach.
// hold() keeps the function open and says what a user sees when it goes away. Nothing here knows VFIO or networks.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/function/local_device.h"
#include "proxy/gpu/driver/driver.h"

namespace dxpu::gpu {

struct ExerciseOptions {
  uint64_t bytes = uint64_t{64} << 20;  // moved each way; at most the device memory
  unsigned reads = 1000;                // 4-byte register reads measured
  ChannelMode mode = ChannelMode::kRing;
  uint64_t seed = 1;
  DriverOptions driver = {};
};

struct ExerciseReport {
  GpuInfo info;
  uint64_t bytes = 0;
  double to_device_mb_s = 0, from_device_mb_s = 0;  // 10^6 bytes per second
  uint32_t host_crc32c = 0, device_crc32c = 0, returned_crc32c = 0;
  uint64_t interrupts = 0;
  absl::Duration interrupt_latency;  // doorbell of a lone fence to the eventfd
  absl::Duration read_p50, read_p99;
  unsigned reads = 0;
};

// The first thing that is not as it should be ends it: DATA_LOSS for bytes that differ, INTERNAL for registers that do
// not keep what they are given, otherwise as the Driver says.
absl::StatusOr<ExerciseReport> exercise(function::LocalDevice& device, const ExerciseOptions& options);
// Lines of "  key  value", for people.
std::string to_string(const ExerciseReport& report);

struct PatternReport {
  uint64_t bytes_looked = 0;
  uint64_t bytes_found = 0;    // as leave_pattern() with this seed wrote them
  uint64_t bytes_nonzero = 0;  // of anybody
};
// Writes 4 KiB at sixteen places of the device memory, first and last page included, through the memory aperture; how
// many bytes.
absl::StatusOr<uint64_t> leave_pattern(function::LocalDevice& device, uint64_t seed);
absl::StatusOr<PatternReport> find_pattern(function::LocalDevice& device, uint64_t seed);

struct HoldOptions {
  absl::Duration deadline = absl::Minutes(5);         // the longest to hold
  absl::Duration interval = absl::Milliseconds(200);  // between register reads
};
struct HoldReport {
  uint64_t reads = 0;
  bool told = false;      // the removal eventfd was signalled
  bool all_ones = false;  // a register read gave all ones
  absl::Duration told_after, all_ones_after;
  absl::Duration longest_read;
};
// Keeps `device` open and reads a register now and then until it has been told to close and reads give all ones, or
// until the deadline. `event` gets one line per thing that happens. The caller closes the device afterwards.
absl::StatusOr<HoldReport> hold(function::LocalDevice& device, const HoldOptions& options,
                                absl::FunctionRef<void(const std::string&)> event);

}  // namespace dxpu::gpu
