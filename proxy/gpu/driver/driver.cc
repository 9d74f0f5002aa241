#include "proxy/gpu/driver/driver.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proxy/base/status.h"

namespace dxpu::gpu {
namespace {

constexpr uint64_t kPage = 4096;
// Command register of the configuration space.
constexpr uint32_t kCommand = 0x04;
constexpr uint16_t kMemoryEnable = 0x2;
constexpr uint16_t kBusMaster = 0x4;

}  // namespace

absl::StatusOr<std::unique_ptr<Driver>> Driver::probe(function::LocalDevice& device, const DriverOptions& options) {
  std::unique_ptr<Driver> driver(new Driver(device, options));
  DXPU_RETURN_IF_ERROR(driver->read_info());
  return driver;
}

absl::Status Driver::read_info() {
  uint16_t ids[2];
  DXPU_RETURN_IF_ERROR(device_.config_read(0, std::as_writable_bytes(std::span(ids))));
  info_.vendor_id = ids[0];
  info_.device_id = ids[1];
  if (ids[0] == 0xffff) return absl::UnavailableError("the function does not answer: its vendor id reads as all ones");
  if (ids[0] != DXGPU_VENDOR_ID || ids[1] != DXGPU_DEVICE_ID) {
    return absl::FailedPreconditionError(absl::StrCat("not a dxpu GPU function: ", absl::Hex(ids[0], absl::kZeroPad4),
                                                      ":", absl::Hex(ids[1], absl::kZeroPad4)));
  }
  // As any driver does first: the function may decode its BARs and do DMA. VFIO leaves both off.
  uint16_t command = 0;
  DXPU_RETURN_IF_ERROR(device_.config_read(kCommand, std::as_writable_bytes(std::span(&command, 1))));
  command |= kMemoryEnable | kBusMaster;
  DXPU_RETURN_IF_ERROR(device_.config_write(kCommand, std::as_bytes(std::span(&command, 1))));
  DXPU_ASSIGN_OR_RETURN(const uint32_t magic, read32(DXGPU_REG_MAGIC));
  if (magic == 0xffffffff)
    return absl::UnavailableError("the function does not answer: its registers read as all ones");
  if (magic != DXGPU_MAGIC) {
    return absl::FailedPreconditionError(
        absl::StrCat("the MAGIC register reads 0x", absl::Hex(magic), ", not 0x", absl::Hex(DXGPU_MAGIC)));
  }
  DXPU_ASSIGN_OR_RETURN(info_.version, read32(DXGPU_REG_VERSION));
  if (info_.version >> 16 != DXGPU_VERSION_MAJOR) {
    return absl::FailedPreconditionError(absl::StrCat("register version ", info_.version >> 16, ".",
                                                      info_.version & 0xffff, ": this driver knows ",
                                                      DXGPU_VERSION_MAJOR, ".x"));
  }
  DXPU_ASSIGN_OR_RETURN(info_.capabilities, read32(DXGPU_REG_CAPABILITIES));
  DXPU_ASSIGN_OR_RETURN(info_.channels, read32(DXGPU_REG_CHANNELS));
  DXPU_ASSIGN_OR_RETURN(info_.memory_bytes, read64(DXGPU_REG_MEMORY_BYTES));
  DXPU_ASSIGN_OR_RETURN(info_.engine, read32(DXGPU_REG_ENGINE));
  DXPU_ASSIGN_OR_RETURN(info_.vectors, read32(DXGPU_REG_VECTORS));
  DXPU_ASSIGN_OR_RETURN(info_.opcodes, read32(DXGPU_REG_OPCODES));
  DXPU_ASSIGN_OR_RETURN(info_.serial, read64(DXGPU_REG_SERIAL));
  char model[DXGPU_MODEL_BYTES] = {};
  DXPU_RETURN_IF_ERROR(
      device_.bar_read(DXGPU_BAR_REGISTERS, DXGPU_REG_MODEL, std::as_writable_bytes(std::span(model))));
  info_.model.assign(model, ::strnlen(model, sizeof model));
  if (info_.channels == 0 || info_.channels > DXGPU_CHANNELS_MAX) {
    return absl::FailedPreconditionError(absl::StrCat("the CHANNELS register reads ", info_.channels));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Driver::read32(uint64_t offset) {
  uint32_t value = 0;
  DXPU_RETURN_IF_ERROR(device_.bar_read(DXGPU_BAR_REGISTERS, offset, std::as_writable_bytes(std::span(&value, 1))));
  return value;
}

absl::StatusOr<uint64_t> Driver::read64(uint64_t offset) {
  uint64_t value = 0;
  DXPU_RETURN_IF_ERROR(device_.bar_read(DXGPU_BAR_REGISTERS, offset, std::as_writable_bytes(std::span(&value, 1))));
  return value;
}

absl::Status Driver::write32(uint64_t offset, uint32_t value) {
  return device_.bar_write(DXGPU_BAR_REGISTERS, offset, std::as_bytes(std::span(&value, 1)));
}

absl::Status Driver::write64(uint64_t offset, uint64_t value) {
  return device_.bar_write(DXGPU_BAR_REGISTERS, offset, std::as_bytes(std::span(&value, 1)));
}

absl::Status Driver::reset_registers() {
  DXPU_RETURN_IF_ERROR(write32(DXGPU_REG_CONTROL, DXGPU_CONTROL_RESET));
  const absl::Time end = absl::Now() + options_.deadline;
  for (;;) {
    DXPU_ASSIGN_OR_RETURN(const uint32_t status, read32(DXGPU_REG_STATUS));
    if (status == 0xffffffff) return absl::UnavailableError("the function is gone: STATUS reads as all ones");
    if ((status & DXGPU_STATUS_READY) != 0) return absl::OkStatus();
    if (absl::Now() > end) return absl::DeadlineExceededError("the function did not finish its reset");
    absl::SleepFor(absl::Microseconds(200));
  }
}

absl::StatusOr<uint64_t> Driver::take_iova(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  uint64_t at = options_.iova_base;
  for (const auto& [taken, length] : iovas_) {  // first gap that is wide enough, a page free on either side
    if (taken >= at + bytes + kPage) break;
    at = taken + length + kPage;
  }
  if (bytes > options_.iova_bytes || at > options_.iova_base + options_.iova_bytes - bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no room for ", bytes, " bytes in the function's address space: free buffers"));
  }
  iovas_.emplace(at, bytes);
  return at;
}

void Driver::give_iova(uint64_t iova) {
  std::lock_guard lock(mutex_);
  iovas_.erase(iova);
}

absl::StatusOr<std::unique_ptr<HostBuffer>> Driver::allocate(uint64_t bytes) {
  if (bytes == 0 || bytes > options_.iova_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a host buffer of ", bytes, " bytes: must be 1 to ", options_.iova_bytes));
  }
  bytes = (bytes + kPage - 1) / kPage * kPage;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) return base::errno_status(absl::StrCat("host buffer of ", bytes, " bytes"));
  const auto iova = take_iova(bytes);
  if (!iova.ok()) {
    ::munmap(memory, bytes);
    return iova.status();
  }
  if (absl::Status status = device_.map_dma(*iova, memory, bytes, true, true); !status.ok()) {
    give_iova(*iova);
    ::munmap(memory, bytes);
    return status;
  }
  return std::unique_ptr<HostBuffer>(new HostBuffer(*this, static_cast<std::byte*>(memory), bytes, *iova));
}

HostBuffer::~HostBuffer() {
  // Memory that might still be reached is not given back; it is only leaked.
  if (!driver_.device_.unmap_dma(iova_, bytes_).ok()) return;
  driver_.give_iova(iova_);
  ::munmap(memory_, bytes_);
}

absl::StatusOr<std::unique_ptr<Channel>> Driver::open_channel(unsigned index, const ChannelOptions& options) {
  if (index >= info_.channels) {
    return absl::InvalidArgumentError(absl::StrCat("channel ", index, ": the function has ", info_.channels));
  }
  std::unique_ptr<Channel> channel(new Channel(*this, index, options));
  DXPU_RETURN_IF_ERROR(channel->open());
  return channel;
}

}  // namespace dxpu::gpu
