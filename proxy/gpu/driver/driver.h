// A user-space driver of the GPU function, on any function::LocalDevice: direct attach in tests, VFIO in a VM.
//
//   auto driver = gpu::Driver::probe(device, {});
//   auto buffer = (*driver)->allocate(bytes);
//   auto channel = (*driver)->open_channel(0, {});
//   (*channel)->copy_to_device(0, **buffer, 0, bytes);
//   auto fence = (*channel)->fence();          // queues it and rings the doorbell
//   (*channel)->wait(*fence, gpu::WaitBy::kInterrupt);
//
// Copies are queued and run while the caller goes on; a buffer stays alive until the fence after its last command.
// Errors: UNAVAILABLE the function is gone (its registers read as all ones); ABORTED the channel has a fault (named in
// the message); DEADLINE_EXCEEDED. Threads: one per channel; the Driver itself is thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/base/unique_fd.h"
#include "proxy/function/local_device.h"
#include "proxy/gpu/command_set.h"
#include "proxy/gpu/engine/engine.h"

namespace dxpu::gpu {

struct DriverOptions {
  absl::Duration deadline = absl::Seconds(30);  // of every wait for the function
  // Where buffers go in the function's address space. The default stays clear of the interrupt window below 4 GiB and
  // inside the 39 bits that the smallest IOMMUs have.
  uint64_t iova_base = uint64_t{1} << 32;
  uint64_t iova_bytes = uint64_t{1} << 38;
};

struct GpuInfo {
  uint16_t vendor_id = 0, device_id = 0;
  uint32_t version = 0, capabilities = 0, channels = 0, engine = 0, vectors = 0, opcodes = 0;
  uint64_t memory_bytes = 0, serial = 0;
  std::string model;
};

class Channel;

// Host memory that the function reaches. Zeroed, page aligned, one piece of the function's address space.
class HostBuffer {
 public:
  ~HostBuffer();
  std::span<std::byte> bytes() { return {memory_, bytes_}; }
  std::span<const std::byte> bytes() const { return {memory_, bytes_}; }
  uint64_t iova() const { return iova_; }
  uint64_t size() const { return bytes_; }

 private:
  friend class Driver;
  HostBuffer(class Driver& driver, std::byte* memory, uint64_t bytes, uint64_t iova)
      : driver_(driver), memory_(memory), bytes_(bytes), iova_(iova) {}
  Driver& driver_;
  std::byte* memory_;
  uint64_t bytes_;
  uint64_t iova_;
};

enum class ChannelMode { kRing, kPush };
enum class WaitBy { kInterrupt, kPoll };

struct ChannelOptions {
  ChannelMode mode = ChannelMode::kRing;
  uint32_t ring_log2 = 8;
  // MSI-X vector for fences and faults; 0xffffffff: none, wait by polling only. Default: 1 + the channel's number.
  uint32_t vector = 0xfffffffe;
};

class Driver {
 public:
  // FAILED_PRECONDITION: not a GPU function, or of another major version; UNAVAILABLE: all ones. `device` outlives the
  // driver.
  static absl::StatusOr<std::unique_ptr<Driver>> probe(function::LocalDevice& device, const DriverOptions& options);

  const GpuInfo& info() const { return info_; }
  const DriverOptions& options() const { return options_; }
  function::LocalDevice& device() { return device_; }

  absl::StatusOr<std::unique_ptr<HostBuffer>> allocate(uint64_t bytes);
  // Channels and buffers end before the driver.
  absl::StatusOr<std::unique_ptr<Channel>> open_channel(unsigned index, const ChannelOptions& options);

  absl::StatusOr<uint32_t> read32(uint64_t offset);
  absl::StatusOr<uint64_t> read64(uint64_t offset);
  absl::Status write32(uint64_t offset, uint32_t value);
  absl::Status write64(uint64_t offset, uint64_t value);
  // Through CONTROL.RESET; returns when STATUS says ready.
  absl::Status reset_registers();

 private:
  friend class HostBuffer;
  Driver(function::LocalDevice& device, const DriverOptions& options) : device_(device), options_(options) {}
  absl::Status read_info();
  absl::StatusOr<uint64_t> take_iova(uint64_t bytes);
  void give_iova(uint64_t iova);

  function::LocalDevice& device_;
  const DriverOptions options_;
  GpuInfo info_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> iovas_;  // taken: address → length
};

struct ChannelFault {
  uint32_t state = 0, code = 0, index = 0, cookie = 0;
  uint64_t address = 0;
};

class Channel {
 public:
  // Stops the channel and waits until it has.
  ~Channel();

  // Queued; nothing runs before fence() or kick(). DEADLINE_EXCEEDED when the ring stays full.
  absl::Status copy_to_device(uint64_t memory, const HostBuffer& from, uint64_t offset, uint64_t bytes);
  absl::Status copy_from_device(HostBuffer& to, uint64_t offset, uint64_t memory, uint64_t bytes);
  // A list in host memory: `count` segments that the caller wrote at `offset` of `list`.
  absl::Status copy_list(dxgpu_opcode direction, uint64_t memory, uint64_t bytes, const HostBuffer& list,
                         uint64_t offset, uint32_t count);
  absl::Status copy_on_device(uint64_t destination, uint64_t source, uint64_t bytes);
  absl::Status fill(uint64_t memory, uint64_t bytes, uint64_t pattern, uint32_t pattern_bytes = 8);
  // Any command, as it is.
  absl::Status queue(const Command& command);

  // Queues a fence and rings the doorbell; the value to wait for. Signals the vector when the channel has one.
  absl::StatusOr<uint64_t> fence();
  absl::Status wait(uint64_t fence, WaitBy by);
  // CRC32C of device memory, computed there. Waits.
  absl::StatusOr<uint32_t> checksum(uint64_t memory, uint64_t bytes, WaitBy by = WaitBy::kPoll);
  absl::Status kick();

  absl::StatusOr<ChannelFault> fault();
  // Out of the error state: stops, clears, and enables the channel again as it was opened. What was queued is lost.
  absl::Status reset();
  uint64_t interrupts() const { return interrupts_; }
  unsigned index() const { return index_; }

 private:
  friend class Driver;
  Channel(Driver& driver, unsigned index, const ChannelOptions& options)
      : driver_(driver), index_(index), options_(options) {}
  absl::Status open();
  absl::Status enable();
  absl::Status stop(uint32_t control);
  absl::Status make_room();
  absl::Status copy_host(dxgpu_opcode direction, uint64_t memory, uint64_t iova, uint64_t bytes);
  absl::Status check_alive();
  uint64_t fence_seen() const;
  uint32_t entries() const;
  uint64_t control_page() const { return DXGPU_CHANNEL_BASE + uint64_t{index_} * DXGPU_PAGE; }
  uint64_t user_page() const { return DXGPU_USER_BASE + uint64_t{index_} * DXGPU_PAGE; }

  Driver& driver_;
  const unsigned index_;
  ChannelOptions options_;
  std::unique_ptr<HostBuffer> shared_;  // fence value, checksum result, then the ring
  base::UniqueFd eventfd_;
  bool enabled_ = false;
  uint32_t put_ = 0, get_ = 0, rung_ = 0;
  uint64_t last_fence_ = 0;
  uint64_t interrupts_ = 0;
};

}  // namespace dxpu::gpu
