// An attached function as a program on the host gets it: /dev/vfio, ordinary VFIO calls, nothing special-cased for
// dxpu.
//
// What this is: the user side of Linux VFIO (group, type1v2 container, device) behind function::LocalDevice, for one
// function per container. It works on any function whose driver offers VFIO: dxpu.ko's dxpu-vfio, or vfio-pci on real
// hardware. What it is not: a binder of drivers; who opens a function has bound it before.
//
// Threads: every method from any thread, several at once. The kernel orders BAR accesses of one thread only.
// Errors: open() says which of the many steps was refused and what to do. Afterwards an access outside a region is
// OUT_OF_RANGE; a function that is gone reads all ones, swallows writes and still lets itself be unmapped and closed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proxy/base/unique_fd.h"
#include "proxy/function/local_device.h"

namespace dxpu::attach {

// Where the kernel shows itself; tests point these elsewhere.
struct VfioPaths {
  std::string sysfs = "/sys";
  std::string vfio = "/dev/vfio";
};

class VfioDevice : public function::LocalDevice {
 public:
  // `address` is "dddd:bb:dd.f", or "bb:dd.f" in domain 0.
  static absl::StatusOr<std::unique_ptr<VfioDevice>> open(const std::string& address, const VfioPaths& paths = {});

  const std::string& address() const { return address_; }
  int iommu_group() const { return iommu_group_; }
  // Vectors that can be signalled; 0 without MSI-X.
  unsigned msix_vectors() const { return msix_count_; }

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
  struct Region {
    uint64_t size = 0;
    uint64_t file_offset = 0;
    bool readable = false;
    bool writable = false;
  };

  explicit VfioDevice(std::string address) : address_(std::move(address)) {}
  absl::Status open_group(const VfioPaths& paths);
  absl::Status describe();
  absl::Status check_range(const Region& region, const std::string& what, uint64_t offset, size_t bytes) const;
  absl::Status read_region(const Region& region, const std::string& what, uint64_t offset, std::span<std::byte> out);
  absl::Status write_region(const Region& region, const std::string& what, uint64_t offset,
                            std::span<const std::byte> data);
  absl::Status set_eventfds(uint32_t index, uint32_t start, std::span<const int> fds);

  const std::string address_;
  int iommu_group_ = -1;
  // In this order: the device is closed before its container and group are.
  base::UniqueFd container_, group_, device_;
  std::array<Region, 6> bars_;
  Region config_;
  uint32_t msix_count_ = 0;
  bool has_removal_irq_ = false;
  bool has_reset_ = false;

  std::mutex msix_mutex_;
  std::vector<int> msix_fds_;  // guarded by msix_mutex_; empty while MSI-X is off
};

}  // namespace dxpu::attach
