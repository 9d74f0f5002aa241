// A port of dxpu.ko: the function plugged here becomes a PCI device of this machine's kernel, open to VFIO.
//
//   auto ports = KernelAttach::port_count();
//   auto port = KernelAttach::open(0);          // claims the port
//   (*port)->plug(function);                    // status() goes to kAttached once the kernel shows it
//   (*port)->unplug("detached");                // the function is not used any more; status() goes to kEmpty later
//
// What this is: the user end of /dev/dxpu (docs/kernel-abi.md). One thread serves the port's ring; a slow read of one
// port delays no other port. What it is not: it never loads the module and never unbinds anything.
//
// Threads: thread-safe. plug(), unplug() and destruction must not be called from a status callback or a continuation.
// Dropping a KernelAttach, or dying, is surprise removal: the kernel's port stays and another KernelAttach can claim
// it. Errors name the device or the port, and what to do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/attach/attach_point.h"
#include "proxy/function/function.h"

namespace dxpu::attach {

class KernelRings;

struct KernelOptions {
  std::string device = "/dev/dxpu";
  // The kernel answers a read with all ones after it. Longer than the function's own deadline, so that the reason is
  // known here first.
  absl::Duration read_deadline = absl::Seconds(1);
  // A posted write that finds no room for so long removes the function: this process hangs.
  absl::Duration write_deadline = absl::Seconds(5);
  absl::Duration reset_deadline = absl::Seconds(10);
};

// Counters as the module keeps them, and a few of this end.
struct KernelStats {
  uint64_t reads = 0, writes = 0, config_writes = 0, resets = 0;
  uint64_t timeouts = 0;          // reads that the kernel answered with all ones
  uint64_t late_completions = 0;  // answers that came after that
  uint64_t error_completions = 0;
  uint64_t dma_reads = 0, dma_writes = 0, dma_refused = 0, dma_unmaps = 0;
  uint64_t interrupts = 0, interrupts_dropped = 0;
  uint64_t dma_writes_lost = 0;  // posted writes that hit nothing mapped
};

class KernelAttach final : public AttachPoint {
 public:
  // Claims `port`. NOT_FOUND: no /dev/dxpu (the module is not loaded). PERMISSION_DENIED. FAILED_PRECONDITION: module
  // of another version, or another process serves the port. OUT_OF_RANGE: no such port.
  static absl::StatusOr<std::unique_ptr<KernelAttach>> open(unsigned port, const KernelOptions& options = {});
  // How many ports the loaded module has.
  static absl::StatusOr<unsigned> port_count(const std::string& device = "/dev/dxpu");
  ~KernelAttach() override;

  // AttachPoint
  absl::Status plug(function::Function& function) override;
  absl::Status unplug(const std::string& reason) override;
  absl::Status request_release() override;
  PortStatus status() const override;
  void set_status_callback(absl::AnyInvocable<void()> changed) override;

  // Waits until status() is `state`. DEADLINE_EXCEEDED says what it is instead.
  absl::Status wait_for(PortState state, absl::Duration deadline) const;
  KernelStats stats() const;
  unsigned port() const { return port_; }

  // Upstream. A range of any length; pieces that are not mapped end the whole as kUnsupportedRequest.
  void dma_read(uint64_t address, std::span<std::byte> out, function::Done done) override;
  void dma_write(uint64_t address, std::span<const std::byte> data) override;
  void dma_atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                  function::ReadDone done) override;
  void raise_msix(unsigned vector) override;

 private:
  struct Plugged;

  KernelAttach(unsigned port, const KernelOptions& options, std::shared_ptr<KernelRings> rings);
  void serve();
  void notify_changed();
  void config_write(const std::shared_ptr<Plugged>& plugged, uint32_t offset, unsigned size, uint32_t value);
  std::shared_ptr<Plugged> plugged() const;
  // True when every piece was copied.
  bool copy(uint64_t address, std::byte* data, size_t bytes, bool to_host);

  const unsigned port_;
  const KernelOptions options_;
  const std::shared_ptr<KernelRings> rings_;

  std::mutex plug_mutex_;  // plug and unplug, one at a time
  mutable std::mutex mutex_;
  mutable std::condition_variable condition_;  // the ring was drained, or the status changed
  std::shared_ptr<Plugged> plugged_;           // guarded by mutex_; nullptr: nothing plugged, or not any more
  uint64_t drains_ = 0, changes_ = 0;          // guarded by mutex_
  std::mutex callback_mutex_;
  absl::AnyInvocable<void()> changed_;  // guarded by callback_mutex_
  std::atomic<uint64_t> dma_writes_lost_{0};
  std::atomic<bool> told_memlock_{false};  // once is enough
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace dxpu::attach
