#include "proxy/attach/vfio/vfio_device.h"

#include <fcntl.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proxy/base/status.h"

namespace dxpu::attach {
namespace {

using base::errno_status;

// "dddd:bb:dd.f" in lower case.
absl::StatusOr<std::string> full_address(const std::string& address) {
  std::string full = address;
  std::transform(full.begin(), full.end(), full.begin(), [](unsigned char c) { return std::tolower(c); });
  if (full.size() == 7) full = absl::StrCat("0000:", full);
  constexpr std::string_view kShape = "xxxx:xx:xx.x";
  bool good = full.size() == kShape.size();
  for (size_t i = 0; good && i < full.size(); i++) {
    good = kShape[i] == 'x' ? std::isxdigit(static_cast<unsigned char>(full[i])) != 0 : full[i] == kShape[i];
  }
  if (!good) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", address, "\" is no PCI address: write it as dddd:bb:dd.f (lspci -D shows them)"));
  }
  return full;
}

std::string memlock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : absl::StrCat(limit.rlim_cur >> 10, " KiB");
}

// Gone hardware answers with all ones; these are how VFIO drivers put it.
bool means_gone(int error) { return error == ENODEV || error == EIO || error == ENXIO; }

}  // namespace

absl::StatusOr<std::unique_ptr<VfioDevice>> VfioDevice::open(const std::string& address, const VfioPaths& paths) {
  DXPU_ASSIGN_OR_RETURN(std::string full, full_address(address));
  std::unique_ptr<VfioDevice> device(new VfioDevice(full));
  DXPU_RETURN_IF_ERROR(device->open_group(paths));
  DXPU_RETURN_IF_ERROR(device->describe());
  return device;
}

absl::Status VfioDevice::open_group(const VfioPaths& paths) {
  namespace fs = std::filesystem;
  const fs::path function = fs::path(paths.sysfs) / "bus/pci/devices" / address_;
  std::error_code error;
  if (!fs::exists(function, error)) {
    return absl::NotFoundError(absl::StrCat("no PCI function ", address_, " on this machine (lspci -D lists them)"));
  }
  const fs::path driver = fs::read_symlink(function / "driver", error);
  const std::string bound = error ? "no driver" : absl::StrCat("driver ", driver.filename().string());
  const fs::path group = fs::read_symlink(function / "iommu_group", error);
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat(
        address_, " has no IOMMU group (it is bound to ", bound, "): bind it to a VFIO driver first: echo dxpu-vfio > ",
        (function / "driver_override").string(), "; echo ", address_, " > ", paths.sysfs, "/bus/pci/drivers_probe"));
  }
  if (!absl::SimpleAtoi(group.filename().string(), &iommu_group_)) {
    return absl::InternalError(
        absl::StrCat(address_, ": IOMMU group \"", group.filename().string(), "\" is no number"));
  }

  const std::string container_path = absl::StrCat(paths.vfio, "/vfio");
  container_.reset(::open(container_path.c_str(), O_RDWR | O_CLOEXEC));
  if (!container_.valid()) {
    if (errno == ENOENT || errno == ENODEV) {
      return absl::FailedPreconditionError(
          absl::StrCat("no ", container_path, ": load VFIO first: modprobe vfio_iommu_type1"));
    }
    return errno_status(absl::StrCat("cannot open ", container_path));
  }
  if (int version = ::ioctl(container_.get(), VFIO_GET_API_VERSION); version != VFIO_API_VERSION) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s speaks VFIO version %d, this program %d", container_path, version, VFIO_API_VERSION));
  }
  if (::ioctl(container_.get(), VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) != 1) {
    return absl::FailedPreconditionError(
        absl::StrCat(container_path, " has no type 1 IOMMU backend: modprobe vfio_iommu_type1"));
  }

  const std::string group_path = absl::StrCat(paths.vfio, "/", iommu_group_);
  group_.reset(::open(group_path.c_str(), O_RDWR | O_CLOEXEC));
  if (!group_.valid()) {
    const int reason = errno;
    if (reason == EBUSY) {
      return absl::UnavailableError(absl::StrCat(address_, " is in use: another process has ", group_path,
                                                 " open (fuser -v ", group_path, " names it)"));
    }
    if (reason == ENOENT) {
      return absl::FailedPreconditionError(absl::StrCat(address_, ": no ", group_path,
                                                        " although the IOMMU group exists; it is bound to ", bound,
                                                        ", which offers no VFIO"));
    }
    return errno_status(absl::StrCat("cannot open ", group_path, " of ", address_), reason);
  }
  vfio_group_status status{};
  status.argsz = sizeof status;
  if (::ioctl(group_.get(), VFIO_GROUP_GET_STATUS, &status) != 0)
    return errno_status(absl::StrCat("VFIO_GROUP_GET_STATUS of ", group_path));
  if ((status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("IOMMU group ", iommu_group_, " of ", address_,
                     " is not viable: another function in it is bound to a driver that is not VFIO"));
  }
  int container = container_.get();
  if (::ioctl(group_.get(), VFIO_GROUP_SET_CONTAINER, &container) != 0) {
    return errno_status(absl::StrCat("VFIO_GROUP_SET_CONTAINER of ", group_path));
  }
  if (::ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) != 0) {
    return errno_status(absl::StrCat("VFIO_SET_IOMMU (type1v2) for ", address_));
  }
  device_.reset(::ioctl(group_.get(), VFIO_GROUP_GET_DEVICE_FD, address_.c_str()));
  if (!device_.valid()) {
    if (errno == EBUSY) return absl::UnavailableError(absl::StrCat(address_, " is in use by another process"));
    return errno_status(absl::StrCat("VFIO_GROUP_GET_DEVICE_FD of ", address_));
  }
  return absl::OkStatus();
}

absl::Status VfioDevice::describe() {
  vfio_device_info info{};
  info.argsz = sizeof info;
  if (::ioctl(device_.get(), VFIO_DEVICE_GET_INFO, &info) != 0)
    return errno_status(absl::StrCat("VFIO_DEVICE_GET_INFO of ", address_));
  if ((info.flags & VFIO_DEVICE_FLAGS_PCI) == 0 || info.num_regions <= VFIO_PCI_CONFIG_REGION_INDEX) {
    return absl::FailedPreconditionError(
        absl::StrCat(address_, ": its VFIO driver does not show it as a PCI function"));
  }
  has_reset_ = (info.flags & VFIO_DEVICE_FLAGS_RESET) != 0;
  for (uint32_t index = 0; index <= VFIO_PCI_CONFIG_REGION_INDEX; index++) {
    if (index == VFIO_PCI_ROM_REGION_INDEX) continue;
    vfio_region_info region{};
    region.argsz = sizeof region;
    region.index = index;
    if (::ioctl(device_.get(), VFIO_DEVICE_GET_REGION_INFO, &region) != 0) {
      return errno_status(absl::StrCat("VFIO_DEVICE_GET_REGION_INFO ", index, " of ", address_));
    }
    (index < bars_.size() ? bars_[index] : config_) = {.size = region.size,
                                                       .file_offset = region.offset,
                                                       .readable = (region.flags & VFIO_REGION_INFO_FLAG_READ) != 0,
                                                       .writable = (region.flags & VFIO_REGION_INFO_FLAG_WRITE) != 0};
  }
  for (uint32_t index : {VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX}) {
    if (index >= info.num_irqs) continue;
    vfio_irq_info irq{};
    irq.argsz = sizeof irq;
    irq.index = index;
    // Drivers answer EINVAL for what they do not have.
    if (::ioctl(device_.get(), VFIO_DEVICE_GET_IRQ_INFO, &irq) != 0) continue;
    if ((irq.flags & VFIO_IRQ_INFO_EVENTFD) == 0) continue;
    if (index == VFIO_PCI_MSIX_IRQ_INDEX) {
      msix_count_ = irq.count;
    } else {
      has_removal_irq_ = irq.count > 0;
    }
  }
  return absl::OkStatus();
}

absl::Status VfioDevice::check_range(const Region& region, const std::string& what, uint64_t offset,
                                     size_t bytes) const {
  if (bytes > region.size || offset > region.size - bytes) {
    return absl::OutOfRangeError(
        absl::StrFormat("%s %s: %d bytes at 0x%x leave its 0x%x bytes", address_, what, bytes, offset, region.size));
  }
  return absl::OkStatus();
}

absl::Status VfioDevice::read_region(const Region& region, const std::string& what, uint64_t offset,
                                     std::span<std::byte> out) {
  DXPU_RETURN_IF_ERROR(check_range(region, what, offset, out.size()));
  if (!region.readable)
    return absl::FailedPreconditionError(absl::StrCat(address_, " ", what, " cannot be read through VFIO"));
  while (!out.empty()) {
    const ssize_t got = ::pread(device_.get(), out.data(), out.size(), static_cast<off_t>(region.file_offset + offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && !means_gone(errno))
      return errno_status(absl::StrFormat("reading %s %s at 0x%x", address_, what, offset));
    if (got <= 0) {
      std::fill(out.begin(), out.end(), std::byte{0xff});
      return absl::OkStatus();
    }
    out = out.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::Status VfioDevice::write_region(const Region& region, const std::string& what, uint64_t offset,
                                      std::span<const std::byte> data) {
  DXPU_RETURN_IF_ERROR(check_range(region, what, offset, data.size()));
  if (!region.writable)
    return absl::FailedPreconditionError(absl::StrCat(address_, " ", what, " cannot be written through VFIO"));
  while (!data.empty()) {
    const ssize_t put =
        ::pwrite(device_.get(), data.data(), data.size(), static_cast<off_t>(region.file_offset + offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && !means_gone(errno))
      return errno_status(absl::StrFormat("writing %s %s at 0x%x", address_, what, offset));
    if (put <= 0) return absl::OkStatus();
    data = data.subspan(static_cast<size_t>(put));
    offset += static_cast<uint64_t>(put);
  }
  return absl::OkStatus();
}

absl::Status VfioDevice::config_read(uint32_t offset, std::span<std::byte> out) {
  return read_region(config_, "configuration space", offset, out);
}

absl::Status VfioDevice::config_write(uint32_t offset, std::span<const std::byte> data) {
  return write_region(config_, "configuration space", offset, data);
}

absl::StatusOr<uint64_t> VfioDevice::bar_size(unsigned bar) {
  if (bar >= bars_.size()) return absl::InvalidArgumentError(absl::StrCat("a function has BARs 0 to 5, not ", bar));
  return bars_[bar].size;
}

absl::Status VfioDevice::bar_read(unsigned bar, uint64_t offset, std::span<std::byte> out) {
  if (bar >= bars_.size()) return absl::InvalidArgumentError(absl::StrCat("a function has BARs 0 to 5, not ", bar));
  return read_region(bars_[bar], absl::StrCat("BAR", bar), offset, out);
}

absl::Status VfioDevice::bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) {
  if (bar >= bars_.size()) return absl::InvalidArgumentError(absl::StrCat("a function has BARs 0 to 5, not ", bar));
  return write_region(bars_[bar], absl::StrCat("BAR", bar), offset, data);
}

absl::Status VfioDevice::map_dma(uint64_t iova, void* memory, uint64_t bytes, bool function_reads,
                                 bool function_writes) {
  vfio_iommu_type1_dma_map map{};
  map.argsz = sizeof map;
  map.flags = (function_reads ? VFIO_DMA_MAP_FLAG_READ : 0) | (function_writes ? VFIO_DMA_MAP_FLAG_WRITE : 0);
  map.vaddr = reinterpret_cast<uintptr_t>(memory);
  map.iova = iova;
  map.size = bytes;
  if (::ioctl(container_.get(), VFIO_IOMMU_MAP_DMA, &map) == 0) return absl::OkStatus();
  const int reason = errno;
  const std::string what = absl::StrFormat("mapping %d bytes at 0x%x for %s", bytes, iova, address_);
  switch (reason) {
    case ENOMEM:
      return absl::ResourceExhaustedError(
          absl::StrCat(what, ": the memory cannot be locked: RLIMIT_MEMLOCK is ", memlock_limit(),
                       "; raise it (ulimit -l unlimited, or LimitMEMLOCK= of the service) or map less"));
    case EEXIST:
      return absl::AlreadyExistsError(absl::StrCat(what, ": a part of that range is mapped already"));
    case ENOSPC:
      return absl::ResourceExhaustedError(
          absl::StrCat(what, ": too many mappings (dma_entry_limit of vfio_iommu_type1); map larger pieces"));
    case EINVAL:
      return absl::InvalidArgumentError(absl::StrCat(
          what,
          ": address, memory and size must be page aligned and not empty, and the function must be let read or write"));
    default:
      return errno_status(what, reason);
  }
}

absl::Status VfioDevice::unmap_dma(uint64_t iova, uint64_t bytes) {
  vfio_iommu_type1_dma_unmap unmap{};
  unmap.argsz = sizeof unmap;
  unmap.iova = iova;
  unmap.size = bytes;
  const std::string what = absl::StrFormat("unmapping %d bytes at 0x%x of %s", bytes, iova, address_);
  if (::ioctl(container_.get(), VFIO_IOMMU_UNMAP_DMA, &unmap) != 0) {
    if (errno == EINVAL) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": the range must be page aligned and must not cut a mapping in two"));
    }
    return errno_status(what);
  }
  if (unmap.size == 0) return absl::NotFoundError(absl::StrCat(what, ": nothing is mapped there"));
  return absl::OkStatus();
}

absl::Status VfioDevice::set_eventfds(uint32_t index, uint32_t start, std::span<const int> fds) {
  std::vector<std::byte> buffer(sizeof(vfio_irq_set) + fds.size_bytes());
  vfio_irq_set header{};
  header.argsz = static_cast<uint32_t>(buffer.size());
  header.flags = (fds.empty() ? VFIO_IRQ_SET_DATA_NONE : VFIO_IRQ_SET_DATA_EVENTFD) | VFIO_IRQ_SET_ACTION_TRIGGER;
  header.index = index;
  header.start = start;
  header.count = static_cast<uint32_t>(fds.size());
  std::memcpy(buffer.data(), &header, sizeof header);
  if (!fds.empty()) std::memcpy(buffer.data() + sizeof header, fds.data(), fds.size_bytes());
  if (::ioctl(device_.get(), VFIO_DEVICE_SET_IRQS, buffer.data()) != 0) {
    return errno_status(
        absl::StrFormat("VFIO_DEVICE_SET_IRQS of %s, index %d, %d from %d", address_, index, fds.size(), start));
  }
  return absl::OkStatus();
}

absl::Status VfioDevice::set_msix_eventfd(unsigned vector, int eventfd) {
  if (msix_count_ == 0) return absl::FailedPreconditionError(absl::StrCat(address_, " has no MSI-X interrupts"));
  if (vector >= msix_count_) {
    return absl::OutOfRangeError(absl::StrCat(address_, " has the vectors 0 to ", msix_count_ - 1, ", not ", vector));
  }
  std::lock_guard lock(msix_mutex_);
  std::vector<int> wanted = msix_fds_;
  const bool off = wanted.empty();
  if (off) wanted.assign(msix_count_, -1);
  wanted[vector] = eventfd;
  if (std::all_of(wanted.begin(), wanted.end(), [](int fd) { return fd < 0; })) {
    if (!off) DXPU_RETURN_IF_ERROR(set_eventfds(VFIO_PCI_MSIX_IRQ_INDEX, 0, {}));
    msix_fds_.clear();
    return absl::OkStatus();
  }
  // The first call says how many vectors there can ever be: in 6.1 vfio-pci cannot add any later.
  DXPU_RETURN_IF_ERROR(off ? set_eventfds(VFIO_PCI_MSIX_IRQ_INDEX, 0, wanted)
                           : set_eventfds(VFIO_PCI_MSIX_IRQ_INDEX, vector, std::span(&wanted[vector], 1)));
  msix_fds_ = std::move(wanted);
  return absl::OkStatus();
}

absl::Status VfioDevice::set_removal_eventfd(int eventfd) {
  if (!has_removal_irq_)
    return absl::UnimplementedError(absl::StrCat(address_, ": its VFIO driver does not tell about removal"));
  return set_eventfds(VFIO_PCI_REQ_IRQ_INDEX, 0, std::span(&eventfd, 1));
}

absl::Status VfioDevice::reset() {
  if (!has_reset_) return absl::UnimplementedError(absl::StrCat(address_, " cannot be reset through VFIO"));
  if (::ioctl(device_.get(), VFIO_DEVICE_RESET) != 0)
    return errno_status(absl::StrCat("VFIO_DEVICE_RESET of ", address_));
  return absl::OkStatus();
}

}  // namespace dxpu::attach
