#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proxy/attach/direct/port.h"

namespace dxpu::attach {
namespace {

constexpr uint32_t kCommand = 0x04;

absl::Status check_range(const std::string& what, uint64_t offset, uint64_t bytes, uint64_t size) {
  if (size == 0) return absl::InvalidArgumentError(absl::StrCat(what, " does not exist"));
  if (bytes == 0 || offset > size || bytes > size - offset) {
    return absl::OutOfRangeError(absl::StrCat(what, ": ", bytes, " bytes at offset 0x", absl::Hex(offset),
                                              " do not lie in its ", size, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

DirectDevice::DirectDevice(std::shared_ptr<DirectAttach::Port> port) : port_(std::move(port)) {}

DirectDevice::~DirectDevice() { port_->close(); }

absl::Status DirectDevice::config_read(uint32_t offset, std::span<std::byte> out) {
  if (absl::Status status = check_range("configuration space", offset, out.size(), pcie::kConfigSpaceBytes);
      !status.ok()) {
    return status;
  }
  port_->read_config(offset, out);  // without an answer: all ones, as on a bus
  return absl::OkStatus();
}

absl::Status DirectDevice::config_write(uint32_t offset, std::span<const std::byte> data) {
  if (absl::Status status = check_range("configuration space", offset, data.size(), pcie::kConfigSpaceBytes);
      !status.ok()) {
    return status;
  }
  port_->write_config(offset, data);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DirectDevice::bar_size(unsigned bar) {
  if (bar >= pcie::kBarCount) return absl::InvalidArgumentError(absl::StrCat("BAR ", bar, ": there are 0 to 5"));
  std::lock_guard lock(port_->mutex);
  return port_->bar_sizes[bar];
}

absl::Status DirectDevice::bar_read(unsigned bar, uint64_t offset, std::span<std::byte> out) {
  const auto size = bar_size(bar);
  if (!size.ok()) return size.status();
  if (absl::Status status = check_range(absl::StrCat("BAR ", bar), offset, out.size(), *size); !status.ok())
    return status;
  port_->read_bar(bar, offset, out);  // without an answer: all ones, as on a bus
  return absl::OkStatus();
}

absl::Status DirectDevice::bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) {
  const auto size = bar_size(bar);
  if (!size.ok()) return size.status();
  if (absl::Status status = check_range(absl::StrCat("BAR ", bar), offset, data.size(), *size); !status.ok())
    return status;
  DirectAttach::Port::Use use(*port_);
  if (use) use.function->bar_write(bar, offset, data);
  return absl::OkStatus();
}

absl::Status DirectDevice::map_dma(uint64_t iova, void* memory, uint64_t bytes, bool function_reads,
                                   bool function_writes) {
  DirectAttach::Port::Use use(*port_);  // unplug() empties the map once nobody is in here
  if (!use) return absl::UnavailableError("the function is gone: close it");
  return port_->dma.add(iova, memory, bytes, function_reads, function_writes);
}

absl::Status DirectDevice::unmap_dma(uint64_t iova, uint64_t bytes) {
  absl::Status status = port_->dma.remove(iova, bytes);
  if (!status.ok()) {
    std::lock_guard lock(port_->mutex);
    if (port_->is_gone) return absl::OkStatus();  // unplug() has done it
  }
  return status;
}

absl::Status DirectDevice::set_msix_eventfd(unsigned vector, int eventfd) {
  std::lock_guard setup(port_->setup_mutex);
  bool before, after;
  auto any = [&] {
    return std::any_of(port_->eventfds.begin(), port_->eventfds.end(), [](int fd) { return fd >= 0; });
  };
  {
    std::lock_guard lock(port_->irq_mutex);
    if (vector >= port_->eventfds.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("MSI-X vector ", vector, ": the function has ", port_->eventfds.size()));
    }
    before = any();
    port_->eventfds[vector] = eventfd;
    after = any();
    if (eventfd >= 0 && port_->pending[vector]) {
      port_->pending[vector] = false;
      const uint64_t one = 1;
      if (::write(eventfd, &one, sizeof one) < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("descriptor ", eventfd, " can not be signalled: give an eventfd"));
      }
    }
  }
  if (before != after) port_->set_msix_enable(after);
  return absl::OkStatus();
}

absl::Status DirectDevice::set_removal_eventfd(int eventfd) {
  std::lock_guard lock(port_->irq_mutex);
  port_->removal_eventfd = eventfd;
  if (eventfd >= 0 && port_->removal_wanted) {
    const uint64_t one = 1;
    if (::write(eventfd, &one, sizeof one) < 0) {
      return absl::InvalidArgumentError(absl::StrCat("descriptor ", eventfd, " can not be signalled: give an eventfd"));
    }
  }
  return absl::OkStatus();
}

absl::Status DirectDevice::reset() {
  std::lock_guard setup(port_->setup_mutex);
  const uint16_t command = static_cast<uint16_t>(port_->config_value(kCommand, 2));
  bool msix;
  {
    std::lock_guard lock(port_->irq_mutex);
    msix = std::any_of(port_->eventfds.begin(), port_->eventfds.end(), [](int fd) { return fd >= 0; });
  }
  return port_->reset_keeping_bars(command, msix);
}

}  // namespace dxpu::attach
