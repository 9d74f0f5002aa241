#include "proxy/box/physical_gpus.h"

#include <setjmp.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>

#include "absl/strings/str_format.h"

extern "C" {
#include <pci/pci.h>
}

namespace dxpu::box {
namespace {

// libpci's error callback must not return, and its default ends the process. Only C code lies between here and there.
jmp_buf escape;
[[noreturn]] void on_error(char* format, ...) {
  spdlog::warn("libpci=error format=\"{}\" physical_gpus=unknown", format);
  longjmp(escape, 1);
}
void on_note(char*, ...) {}

struct Row {
  int domain;
  uint8_t bus, device, function;
  uint16_t vendor_id, device_id;
  std::array<char, 160> name;
};

// Plain data only in here: a longjmp runs no destructors. Returns how many rows were found.
size_t scan(const char* sysfs, Row* rows, size_t room) {
  pci_access* access = pci_alloc();
  access->error = on_error;
  access->warning = on_note;
  access->debug = on_note;
  access->method = PCI_ACCESS_SYS_BUS_PCI;
  volatile size_t found = 0;
  if (setjmp(escape) != 0) return found;  // what libpci holds is lost: once per start at most
  pci_set_param(access, const_cast<char*>("sysfs.path"), const_cast<char*>(sysfs));
  pci_init(access);
  pci_scan_bus(access);
  for (pci_dev* device = access->devices; device != nullptr && found < room; device = device->next) {
    pci_fill_info(device, PCI_FILL_IDENT | PCI_FILL_CLASS);
    if ((device->device_class >> 8) != PCI_BASE_CLASS_DISPLAY) continue;
    Row& row = rows[found];
    row.domain = device->domain;
    row.bus = device->bus;
    row.device = device->dev;
    row.function = device->func;
    row.vendor_id = device->vendor_id;
    row.device_id = device->device_id;
    row.name[0] = '\0';
    pci_lookup_name(access, row.name.data(), row.name.size(), PCI_LOOKUP_VENDOR | PCI_LOOKUP_DEVICE, device->vendor_id,
                    device->device_id);
    found = found + 1;
  }
  pci_cleanup(access);
  return found;
}

}  // namespace

std::vector<PhysicalGpu> list_physical_gpus(const std::string& sysfs) {
  std::vector<PhysicalGpu> out;
  if (::access((sysfs + "/devices").c_str(), R_OK) != 0) return out;
  std::vector<Row> rows(256);
  const size_t found = scan(sysfs.c_str(), rows.data(), rows.size());
  for (size_t i = 0; i < found; ++i) {
    const Row& row = rows[i];
    PhysicalGpu gpu;
    gpu.pci_address = absl::StrFormat("%04x:%02x:%02x.%d", row.domain, row.bus, row.device, row.function);
    gpu.vendor_id = row.vendor_id;
    gpu.device_id = row.device_id;
    gpu.name = row.name.data();
    if (gpu.name.empty()) gpu.name = absl::StrFormat("%04x:%04x", row.vendor_id, row.device_id);
    out.push_back(std::move(gpu));
  }
  return out;
}

}  // namespace dxpu::box
