// The GPU function: a PCI 3D controller with registers, device memory, command channels, DMA and MSI-X.
//
// What it shows to the host is proxy/gpu/command_set.h (manual: docs/gpu-function.md). What it does with commands is an
// Engine's business. It knows nothing of sessions or networks.
//
// Threads: as function::Function. Commands run on threads of the engine. The destructor stops everything and waits for
// reads in flight, at most GpuOptions::stop_deadline; disconnect the upstream first.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/function/function.h"
#include "proxy/gpu/command_set.h"
#include "proxy/gpu/engine/copy/copy_engine.h"

namespace dxpu::gpu {

struct GpuOptions {
  std::string model = "dxpu-soft";  // 1 … 63 printable ASCII characters
  uint64_t memory_bytes = uint64_t{256} << 20;
  uint64_t serial = 1;
  std::string vram_file = {};                      // empty: anonymous memory, gone with the process
  std::string engine = "copy";                     // the only one of this build
  uint16_t subsystem_vendor_id = DXGPU_VENDOR_ID;  // the backing GPU's, where there is one
  uint16_t subsystem_id = DXGPU_SUBSYSTEM_SOFT;
  CopyEngineOptions copy = {};
  absl::Duration stop_deadline = absl::Seconds(40);  // longer than the engine's DMA deadline
};

class GpuFunction : public function::Function {
 public:
  // INVALID_ARGUMENT names the option; the errors of DeviceMemory::open.
  static absl::StatusOr<std::unique_ptr<GpuFunction>> create(const GpuOptions& options);

  // Only with no upstream connected, for a slot that is about to be given to the next tenant: OK when every byte of
  // memory is zero, every register has its reset value, and fill, copy, checksum and fence work. Leaves both as it
  // found them. DATA_LOSS: something was left behind (what and where); INTERNAL: the engine does not work.
  virtual absl::Status self_test_wiped() = 0;
};

}  // namespace dxpu::gpu
