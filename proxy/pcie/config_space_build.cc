// ConfigSpace::build(): a description becomes registers, write masks and capabilities.
#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proxy/base/status.h"
#include "proxy/pcie/config_registers.h"
#include "proxy/pcie/config_space.h"

namespace dxpu::pcie {
namespace {

constexpr size_t kLongestVpdString = 255;  // the length of a VPD keyword is one byte
constexpr uint64_t kLargest32BitBar = uint64_t{1} << 31;
constexpr uint8_t kFastestLink = 6;  // 64 GT/s

template <typename... Parts>
absl::Status bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("configuration space: ", parts...));
}

absl::Status check_bars(const std::array<BarDescription, kBarCount>& bars) {
  for (unsigned i = 0; i < kBarCount; ++i) {
    const BarDescription& bar = bars[i];
    if (bar.size == 0) continue;
    if (!std::has_single_bit(bar.size)) return bad("bars[", i, "].size ", bar.size, " is not a power of two");
    if (bar.size < kSmallestBar) return bad("bars[", i, "].size ", bar.size, " is less than ", kSmallestBar);
    if (!bar.is_64bit) {
      if (bar.size > kLargest32BitBar) return bad("bars[", i, "].size ", bar.size, " needs is_64bit");
      continue;
    }
    if (i + 1 == kBarCount) return bad("bars[", i, "] is 64-bit in the last register; move it to an earlier one");
    if (bars[i + 1].size != 0)
      return bad("bars[", i + 1, "] is taken by the upper half of bars[", i, "]; its size must be 0");
    ++i;
  }
  return absl::OkStatus();
}

absl::Status check_msix_area(const std::array<BarDescription, kBarCount>& bars, absl::string_view what, unsigned bar,
                             uint32_t offset, uint64_t bytes) {
  if (bar >= kBarCount || bars[bar].size == 0)
    return bad("msix.", what, "_bar ", bar, " is not a BAR of this function");
  if (offset % 8 != 0) return bad("msix.", what, "_offset ", offset, " is not a multiple of 8");
  if (offset + bytes > bars[bar].size) {
    return bad("msix.", what, " of ", bytes, " bytes at ", offset, " leaves bars[", bar, "] of ", bars[bar].size,
               " bytes");
  }
  return absl::OkStatus();
}

absl::Status check_msix(const ConfigDescription& d) {
  const MsixDescription& msix = d.msix;
  if (msix.vectors == 0) return absl::OkStatus();
  if (msix.vectors > kMostMsixVectors) return bad("msix.vectors ", msix.vectors, " is more than ", kMostMsixVectors);
  const uint64_t table = msix_table_bytes(msix.vectors);
  const uint64_t pba = msix_pba_bytes(msix.vectors);
  DXPU_RETURN_IF_ERROR(check_msix_area(d.bars, "table", msix.table_bar, msix.table_offset, table));
  DXPU_RETURN_IF_ERROR(check_msix_area(d.bars, "pba", msix.pba_bar, msix.pba_offset, pba));
  if (msix.table_bar == msix.pba_bar && msix.table_offset < msix.pba_offset + pba &&
      msix.pba_offset < msix.table_offset + table) {
    return bad("msix.table at ", msix.table_offset, " and msix.pba at ", msix.pba_offset, " overlap in bars[",
               msix.table_bar, "]");
  }
  return absl::OkStatus();
}

absl::Status check_text(absl::string_view what, absl::string_view text) {
  if (text.size() > kLongestVpdString)
    return bad(what, " has ", text.size(), " bytes, at most ", kLongestVpdString, " fit");
  if (!std::all_of(text.begin(), text.end(), absl::ascii_isprint))
    return bad(what, " holds a byte that is not printable ASCII");
  return absl::OkStatus();
}

absl::Status check_description(const ConfigDescription& d) {
  if (d.vendor_id == 0 || d.vendor_id == 0xffff)
    return bad("vendor_id 0x", absl::Hex(d.vendor_id), " means that nothing is there");
  if (d.class_code > 0xffffff) return bad("class_code 0x", absl::Hex(d.class_code), " is wider than 24 bits");
  DXPU_RETURN_IF_ERROR(check_bars(d.bars));
  DXPU_RETURN_IF_ERROR(check_msix(d));
  DXPU_RETURN_IF_ERROR(check_text("vpd_product", d.vpd_product));
  DXPU_RETURN_IF_ERROR(check_text("vpd_serial", d.vpd_serial));
  if (d.vpd_product.empty() && !d.vpd_serial.empty()) return bad("vpd_serial needs a vpd_product");
  if (!std::has_single_bit(d.max_payload_supported) || d.max_payload_supported < 128 ||
      d.max_payload_supported > 4096) {
    return bad("max_payload_supported ", d.max_payload_supported, " is not a power of two in 128 ... 4096");
  }
  if (d.link_speed < 1 || d.link_speed > kFastestLink) return bad("link_speed ", d.link_speed, " is not in 1 ... 6");
  constexpr std::array<uint8_t, 7> kWidths = {1, 2, 4, 8, 12, 16, 32};
  if (std::find(kWidths.begin(), kWidths.end(), d.link_width) == kWidths.end()) {
    return bad("link_width ", d.link_width, " is not one of 1, 2, 4, 8, 12, 16, 32");
  }
  return absl::OkStatus();
}

// "VPD Format": identifier string, a read-only section that ends in a checksum, end tag; padded to double words.
std::vector<std::byte> make_vpd(absl::string_view product, absl::string_view serial) {
  std::vector<std::byte> out;
  const auto byte = [&out](unsigned value) { out.push_back(static_cast<std::byte>(value)); };
  const auto text = [&byte](absl::string_view s) {
    for (const char c : s) byte(static_cast<unsigned char>(c));
  };
  const auto large_tag = [&byte](unsigned tag, size_t length) {
    byte(tag);
    byte(length & 0xff);
    byte(length >> 8);
  };
  large_tag(0x82, product.size());
  text(product);
  const size_t serial_bytes = serial.empty() ? 0 : 3 + serial.size();
  large_tag(0x90, serial_bytes + 4);
  if (!serial.empty()) {
    text("SN");
    byte(static_cast<unsigned>(serial.size()));
    text(serial);
  }
  text("RV");
  byte(1);
  unsigned sum = 0;
  for (const std::byte b : out) sum += std::to_integer<unsigned>(b);
  byte(0x100 - (sum & 0xff));  // everything up to here adds up to 0
  byte(0x78);
  while (out.size() % 4 != 0) byte(0);
  return out;
}

// Places registers: value, which bits can be written, which clear by a 1.
class Writer {
 public:
  Writer(std::span<std::byte> bytes, std::span<std::byte> mask, std::span<std::byte> w1c)
      : bytes_(bytes), mask_(mask), w1c_(w1c) {}

  void put(uint32_t offset, unsigned size, uint32_t value, uint32_t writable = 0, uint32_t clear_by_one = 0) {
    store(bytes_, offset, size, value);
    store(mask_, offset, size, writable);
    store(w1c_, offset, size, clear_by_one);
  }
  // Chains a capability behind the ones before; `offset` in ascending order.
  void capability(uint32_t offset, uint8_t id) {
    store(bytes_, last_ == 0 ? kRegCapabilities : last_ + 1, 1, offset);
    put(offset, 1, id);
    last_ = offset;
  }
  // Extended ones start at 0x100 and follow each other; returns the offset.
  uint32_t extended(uint16_t id, unsigned version, uint32_t bytes) {
    const uint32_t offset = next_extended_;
    if (last_extended_ != 0) {
      store(bytes_, last_extended_, 4, load(bytes_, last_extended_, 4) | offset << 20);
    }
    put(offset, 4, id | version << 16);
    last_extended_ = offset;
    next_extended_ += (bytes + 15) / 16 * 16;
    return offset;
  }

 private:
  std::span<std::byte> bytes_, mask_, w1c_;
  uint32_t last_ = 0;
  uint32_t last_extended_ = 0;
  uint32_t next_extended_ = kFirstExtendedCapability;
};

void put_header(Writer& w, const ConfigDescription& d) {
  w.put(kRegVendorId, 2, d.vendor_id);
  w.put(kRegDeviceId, 2, d.device_id);
  // Memory space, bus master, parity error response, SERR enable. No IO space, no INTx: their bits stay 0.
  w.put(kRegCommand, 2, 0, 0x0146);
  // Error bits clear by a 1: master data parity, signaled and received target abort, master abort, system error,
  // parity.
  w.put(kRegStatus, 2, kStatusCapabilities, 0, 0xf900);
  w.put(kRegRevision, 4, d.revision | d.class_code << 8);
  w.put(kRegCacheLine, 1, 0, 0xff);
  for (unsigned i = 0; i < kBarCount; ++i) {
    const BarDescription& bar = d.bars[i];
    if (bar.size == 0) continue;
    const uint64_t mask = ~(bar.size - 1);
    const uint32_t flags = (bar.is_64bit ? kBar64Bit : 0) | (bar.prefetchable ? kBarPrefetchable : 0);
    w.put(kRegBar0 + 4 * i, 4, flags, static_cast<uint32_t>(mask));
    if (bar.is_64bit) w.put(kRegBar0 + 4 * ++i, 4, 0, static_cast<uint32_t>(mask >> 32));
  }
  w.put(kRegSubsystemVendor, 4, d.subsystem_vendor_id | uint32_t{d.subsystem_id} << 16);
  w.put(kRegInterruptLine, 1, 0, 0xff);
}

void put_power_management(Writer& w, uint32_t at) {
  w.capability(at, kCapPowerManagement);
  w.put(at + 2, 2, 3);               // version 3, no D1, no D2, no PME
  w.put(at + kPmcsr, 2, 1 << 3, 3);  // state D0, No_Soft_Reset
}

void put_pci_express(Writer& w, uint32_t at, const ConfigDescription& d) {
  const uint32_t payload_code = static_cast<uint32_t>(std::countr_zero(d.max_payload_supported)) - 7;
  w.capability(at, kCapPciExpress);
  w.put(at + 0x02, 2, 2);  // version 2, endpoint
  // Extended tags, no limit on L0s and L1 latency, role-based error reporting, FLR.
  w.put(at + kExpressDeviceCapabilities, 4, payload_code | 1 << 5 | 7 << 6 | 7 << 9 | 1 << 15 | kFlrCapable);
  // Reset values: relaxed ordering, extended tags and no snoop enabled, MPS 128, MRRS 512. Writable: error reporting,
  // those, MPS, MRRS. Initiate FLR (bit 15) always reads 0, write() acts on it.
  w.put(at + kExpressDeviceControl, 2, 0x2910, 0x79ff);
  w.put(at + 0x0a, 2, 0, 0, 0x000f);
  w.put(at + 0x0c, 4, d.link_speed | uint32_t{d.link_width} << 4 | 1 << 22);  // no ASPM
  w.put(at + 0x10, 2, 0, 0x00cb);  // ASPM control, RCB, common clock, extended synch
  w.put(at + 0x12, 2, d.link_speed | uint32_t{d.link_width} << 4 | 1 << 12);
  const uint32_t ten_bit_completer = d.link_speed >= 4 ? 1 << 16 : 0;  // required at 16 GT/s and above
  w.put(at + 0x24, 4, 0xf | 1 << 4 | ten_bit_completer);               // completion timeout ranges A to D, disable
  w.put(at + 0x28, 2, 0, 0x005f);                                      // completion timeout, AtomicOp requester enable
  w.put(at + 0x2c, 4, ((1u << d.link_speed) - 1) << 1);
  w.put(at + 0x30, 2, d.link_speed, 0xffbf);
  // 8 GT/s and above: equalization done; Link Equalization Request clears by a 1.
  const bool equalized = d.link_speed >= 3;
  w.put(at + 0x32, 2, equalized ? 0x1e : 0, 0, equalized ? 0x20 : 0);
}

void put_msix(Writer& w, uint32_t at, const MsixDescription& msix) {
  w.capability(at, kCapMsix);
  w.put(at + kMsixControl, 2, msix.vectors - 1u, kMsixEnable | kMsixFunctionMask);
  w.put(at + kMsixTable, 4, msix.table_offset | msix.table_bar);
  w.put(at + kMsixPba, 4, msix.pba_offset | msix.pba_bar);
}

void put_vpd(Writer& w, uint32_t at) {
  w.capability(at, kCapVpd);
  w.put(at + kVpdAddress, 2, 0, 0xffff);
  w.put(at + kVpdData, 4, 0, 0xffffffff);
}

void put_aer(Writer& w) {
  // Uncorrectable: data link protocol, poisoned TLP, flow control, completion timeout, completer abort, unexpected
  // completion, receiver overflow, malformed TLP, unsupported request, internal.
  constexpr uint32_t kUncorrectable = 0x0057f010;
  // Correctable: receiver, bad TLP, bad DLLP, replay rollover, replay timeout, advisory non-fatal, internal.
  constexpr uint32_t kCorrectable = 0x000071c1;
  const uint32_t at = w.extended(kExtCapAer, 2, 0x2c);
  w.put(at + 0x04, 4, 0, 0, kUncorrectable);
  w.put(at + 0x08, 4, 0x00400000, kUncorrectable);
  w.put(at + 0x0c, 4, 0x00462010, kUncorrectable);
  w.put(at + 0x10, 4, 0, 0, kCorrectable);
  w.put(at + 0x14, 4, 0x00006000, kCorrectable);
}

void put_serial_number(Writer& w, uint64_t serial) {
  const uint32_t at = w.extended(kExtCapSerialNumber, 1, 12);
  w.put(at + 4, 4, static_cast<uint32_t>(serial));
  w.put(at + 8, 4, static_cast<uint32_t>(serial >> 32));
}

}  // namespace

absl::StatusOr<ConfigSpace> ConfigSpace::build(const ConfigDescription& description) {
  DXPU_RETURN_IF_ERROR(check_description(description));
  ConfigSpace space;
  Writer w(space.bytes_, space.mask_, space.w1c_);
  put_header(w, description);
  if (description.power_management) put_power_management(w, 0x40);
  put_pci_express(w, 0x48, description);
  if (description.msix.vectors != 0) put_msix(w, 0x84, description.msix);
  if (!description.vpd_product.empty()) {
    put_vpd(w, 0x90);
    space.vpd_ = make_vpd(description.vpd_product, description.vpd_serial);
  }
  if (description.advanced_error_reporting) put_aer(w);
  if (description.serial_number != 0) put_serial_number(w, description.serial_number);
  space.initial_ = space.bytes_;
  return space;
}

}  // namespace dxpu::pcie
