#include "cli/machine.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <memory>

extern "C" {
#include <pci/pci.h>
}

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace dxpu::cli {
namespace {

class RealMachine : public Machine {
 public:
  std::string root() const override { return ""; }

  std::string kernel_release() const override {
    utsname name{};
    return uname(&name) == 0 ? name.release : "";
  }

  uint64_t memlock_limit() const override {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;
    return limit.rlim_cur == RLIM_INFINITY ? std::numeric_limits<uint64_t>::max() : limit.rlim_cur;
  }

  bool is_root() const override { return geteuid() == 0; }

  std::vector<PciDisplay> display_controllers() const override {
    std::vector<PciDisplay> found;
    // libpci ends the process when it finds no way to look at the bus, which a container without /sys has not.
    if (access("/sys/bus/pci/devices", R_OK) != 0) return found;
    const std::unique_ptr<pci_access, decltype(&pci_cleanup)> bus(pci_alloc(), pci_cleanup);
    bus->method = PCI_ACCESS_SYS_BUS_PCI;
    pci_init(bus.get());
    pci_scan_bus(bus.get());
    for (pci_dev* device = bus->devices; device != nullptr; device = device->next) {
      pci_fill_info(device, PCI_FILL_IDENT | PCI_FILL_CLASS);
      if (device->device_class >> 8 != PCI_BASE_CLASS_DISPLAY) continue;
      char name[256];
      const char* text = pci_lookup_name(bus.get(), name, sizeof name, PCI_LOOKUP_VENDOR | PCI_LOOKUP_DEVICE,
                                         device->vendor_id, device->device_id);
      found.push_back({absl::StrFormat("%04x:%02x:%02x.%d", device->domain, device->bus, device->dev, device->func),
                       device->vendor_id, device->device_id, text == nullptr ? "" : text});
    }
    return found;
  }

  bool has_library(const std::string& soname) const override {
    void* handle = dlopen(soname.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) return false;
    dlclose(handle);
    return true;
  }

  std::string find_program(const std::string& name) const override {
    const char* path = std::getenv("PATH");
    for (const absl::string_view directory : absl::StrSplit(path == nullptr ? "/usr/bin:/bin" : path, ':')) {
      const std::string candidate = absl::StrFormat("%s/%s", directory, name);
      if (access(candidate.c_str(), X_OK) == 0) return candidate;
    }
    return "";
  }
};

}  // namespace

Machine& Machine::real() {
  static RealMachine machine;
  return machine;
}

}  // namespace dxpu::cli
