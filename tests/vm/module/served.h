// What the module's tests share: a port with a function in it, the function as VFIO gives it, waiting for conditions.
#pragma once

#include <sys/eventfd.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "proxy/attach/kernel/kernel_attach.h"
#include "proxy/attach/vfio/vfio_device.h"
#include "proxy/base/unique_fd.h"
#include "proxy/function/memory_function.h"

namespace dxpu::vm {

// Plain emulation on a busy machine is slow; what takes this long hangs.
inline constexpr absl::Duration kPatience = absl::Seconds(20);

// Passes everything on to a MemoryFunction, but keeps reads of one register until told.
class StubbornFunction final : public function::Function {
 public:
  static constexpr uint64_t kStuck = 0x700;  // of the register BAR

  explicit StubbornFunction(function::MemoryFunctionOptions options = {});

  function::MemoryFunction& memory() { return *memory_; }
  size_t held() const;
  // Answers what is held; returns how many.
  size_t release();
  bool wait_held(size_t count, absl::Duration deadline) const;

  function::Identity identity() const override { return memory_->identity(); }
  pcie::ConfigSpace config() const override { return memory_->config(); }
  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override {
    memory_->config_write(offset, size, value, std::move(done));
  }
  void config_read(uint32_t offset, unsigned size, function::ReadDone done) override {
    memory_->config_read(offset, size, std::move(done));
  }
  void bar_read(unsigned bar, uint64_t offset, uint32_t length, function::ReadDone done) override;
  void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override {
    memory_->bar_write(bar, offset, data);
  }
  void connect(function::Upstream* upstream) override { memory_->connect(upstream); }
  void reset(function::Done done) override { memory_->reset(std::move(done)); }
  absl::Status scrub() override { return memory_->scrub(); }

 private:
  std::unique_ptr<function::MemoryFunction> memory_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<function::ReadDone> held_;
};

// A port with a function in it.
struct Served {
  explicit Served(unsigned port, const attach::KernelOptions& options = {});
  // Plugs and waits until it is offered.
  absl::Status plug();
  std::unique_ptr<attach::VfioDevice> open();
  std::string address() const { return port->status().bus_address; }

  StubbornFunction function;
  std::unique_ptr<attach::KernelAttach> port;  // goes first
};

// Little-endian registers by VFIO.
uint32_t read32(attach::VfioDevice& device, unsigned bar, uint64_t offset);
void write32(attach::VfioDevice& device, unsigned bar, uint64_t offset, uint32_t value);
uint16_t config16(attach::VfioDevice& device, uint32_t offset);
void set_config16(attach::VfioDevice& device, uint32_t offset, uint16_t value);
// Memory decoding is on after open; DMA needs bus mastering.
void enable_bus_master(attach::VfioDevice& device, bool on = true);

// True as soon as `condition` is, false after `deadline`.
bool eventually(const std::function<bool()>& condition, absl::Duration deadline = kPatience);
// True when `eventfd` is signalled within `deadline`.
bool signalled(int eventfd, absl::Duration deadline = kPatience);
base::UniqueFd make_eventfd();
std::string read_file(const std::string& path);
bool exists(const std::string& path);
// Value of a counter in /sys/class/dxpu/portN/counters.
uint64_t counter(unsigned port, const std::string& name);

}  // namespace dxpu::vm
