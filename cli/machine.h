// The machine that dxpu runs on, as `dxpu doctor` looks at it. The real one reads /proc, /sys, /dev, libpci; tests give
// a directory tree instead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dxpu::cli {

struct PciDisplay {
  std::string address;
  uint16_t vendor_id = 0;
  uint16_t device_id = 0;
  std::string name;
};

class Machine {
 public:
  virtual ~Machine() = default;
  // What to put before an absolute path to read it: "" on a real machine.
  virtual std::string root() const = 0;
  virtual std::string kernel_release() const = 0;  // uname -r
  virtual uint64_t memlock_limit() const = 0;      // bytes, UINT64_MAX when unlimited
  virtual bool is_root() const = 0;
  virtual std::vector<PciDisplay> display_controllers() const = 0;      // PCI class 03xx
  virtual bool has_library(const std::string& soname) const = 0;        // the dynamic linker finds it
  virtual std::string find_program(const std::string& name) const = 0;  // its path, empty when not in PATH

  static Machine& real();
};

}  // namespace dxpu::cli
