// A function plugged into this process: no kernel between. For libcuda.so.1, tests and benchmarks.
//
//   DirectAttach port;                    port.plug(function);
//   auto device = port.open();            // a function::LocalDevice, one holder at a time, as with a VFIO group
//
// Threads: thread-safe. The attach point must outlive nothing: a DirectDevice keeps what it needs and answers all ones
// once the function or the attach point is gone. plug(), unplug(), open() and destruction must not be called from a
// status callback or a continuation.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/attach/attach_point.h"
#include "proxy/function/local_device.h"

namespace dxpu::attach {

struct DirectOptions {
  // A register read without an answer by then gives all ones. Functions that implement BlockingReads bring their own.
  absl::Duration read_deadline = absl::Seconds(1);
  // Waiting for reset().
  absl::Duration reset_deadline = absl::Seconds(10);
};

// Counters of the rare branches.
struct DirectStats {
  uint64_t dma_reads = 0, dma_writes = 0, dma_atomics = 0;
  uint64_t dma_refused = 0;                         // not mapped, in part or whole, or not in that direction
  uint64_t interrupts = 0, interrupts_pending = 0;  // pending: no eventfd set at that time
  uint64_t read_timeouts = 0, read_errors = 0;      // both gave all ones
};

class DirectDevice;

class DirectAttach final : public AttachPoint {
 public:
  explicit DirectAttach(const DirectOptions& options = {});
  ~DirectAttach() override;

  // AttachPoint
  absl::Status plug(function::Function& function) override;
  absl::Status unplug(const std::string& reason) override;
  absl::Status request_release() override;
  PortStatus status() const override;
  void set_status_callback(absl::AnyInvocable<void()> changed) override;

  // Opens the plugged function: resets it, turns memory and bus mastering on. Closing (the destructor of the device)
  // turns them off, forgets mappings and eventfds and resets it. FAILED_PRECONDITION: nothing plugged, or somebody has
  // it open (the message says who). `holder` is what status() shows, "pid 123 (name)" of this process when empty.
  absl::StatusOr<std::unique_ptr<DirectDevice>> open(const std::string& holder = "");
  DirectStats stats() const;

  // Upstream
  void dma_read(uint64_t address, std::span<std::byte> out, function::Done done) override;
  void dma_write(uint64_t address, std::span<const std::byte> data) override;
  void dma_atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                  function::ReadDone done) override;
  void raise_msix(unsigned vector) override;

 private:
  friend class DirectDevice;
  struct Port;
  const std::shared_ptr<Port> port_;
};

class DirectDevice final : public function::LocalDevice {
 public:
  ~DirectDevice() override;

  absl::Status config_read(uint32_t offset, std::span<std::byte> out) override;
  absl::Status config_write(uint32_t offset, std::span<const std::byte> data) override;
  absl::StatusOr<uint64_t> bar_size(unsigned bar) override;
  absl::Status bar_read(unsigned bar, uint64_t offset, std::span<std::byte> out) override;
  absl::Status bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override;
  absl::Status map_dma(uint64_t iova, void* memory, uint64_t bytes, bool function_reads, bool function_writes) override;
  absl::Status unmap_dma(uint64_t iova, uint64_t bytes) override;
  absl::Status set_msix_eventfd(unsigned vector, int eventfd) override;
  absl::Status set_removal_eventfd(int eventfd) override;
  absl::Status reset() override;

 private:
  friend class DirectAttach;
  explicit DirectDevice(std::shared_ptr<DirectAttach::Port> port);
  const std::shared_ptr<DirectAttach::Port> port_;
};

}  // namespace dxpu::attach
