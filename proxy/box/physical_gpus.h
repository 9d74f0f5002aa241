// The display controllers (class 0x03xx) the machine's PCI bus shows, by libpci. Inventory only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dxpu::box {

struct PhysicalGpu {
  std::string pci_address;  // "dddd:bb:dd.f"
  uint16_t vendor_id = 0;
  uint16_t device_id = 0;
  std::string name;  // from pci.ids, or the two ids
};

// Empty where there is no PCI bus to look at. `sysfs` is /sys/bus/pci, another one in tests. Not thread-safe.
std::vector<PhysicalGpu> list_physical_gpus(const std::string& sysfs = "/sys/bus/pci");

}  // namespace dxpu::box
