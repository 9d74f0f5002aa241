// The configuration spaces of the tests.
#pragma once

#include "proxy/pcie/config_space.h"

namespace dxpu::pcie {

// A GPU as dxpu shows one, with every capability.
inline ConfigDescription full_description() {
  ConfigDescription d;
  d.vendor_id = 0x1d94;
  d.device_id = 0x4750;
  d.revision = 0xa1;
  d.class_code = 0x030200;
  d.subsystem_vendor_id = 0x10de;
  d.subsystem_id = 0x20b0;
  d.bars[0] = {.size = 64 << 10};
  d.bars[2] = {.size = uint64_t{8} << 30, .is_64bit = true, .prefetchable = true};
  d.bars[4] = {.size = 1 << 20, .is_64bit = true};
  d.msix = {.vectors = 65, .table_bar = 0, .table_offset = 0x2000, .pba_bar = 0, .pba_offset = 0x3000};
  d.serial_number = 0x0011223344556677;
  d.vpd_product = "dxpu soft GPU";
  d.vpd_serial = "B1-S03-000042";
  return d;
}

}  // namespace dxpu::pcie
