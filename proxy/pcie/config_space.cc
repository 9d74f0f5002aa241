#include "proxy/pcie/config_space.h"

#include <utility>

#include "proxy/pcie/config_registers.h"

namespace dxpu::pcie {
namespace {

bool valid_access(uint32_t offset, unsigned size) {
  return (size == 1 || size == 2 || size == 4) && offset % size == 0 && offset < kConfigSpaceBytes;
}

bool covers(uint32_t offset, unsigned size, uint32_t byte) { return offset <= byte && byte - offset < size; }

}  // namespace

uint32_t ConfigSpace::read(uint32_t offset, unsigned size) const {
  if (!valid_access(offset, size)) return size == 1 ? 0xff : size == 2 ? 0xffff : 0xffffffff;
  return load(bytes_, offset, size);
}

void ConfigSpace::write(uint32_t offset, unsigned size, uint32_t value) {
  if (!valid_access(offset, size)) return;
  const std::optional<uint16_t> pm = find_capability(kCapPowerManagement);
  const uint32_t power_before = pm ? load(bytes_, *pm + kPmcsr, 1) & 3 : 0;

  const uint32_t mask = load(mask_, offset, size);
  const uint32_t cleared = load(w1c_, offset, size) & value;
  store(bytes_, offset, size, ((load(bytes_, offset, size) & ~mask) | (value & mask)) & ~cleared);

  if (pm && covers(offset, size, *pm + kPmcsr)) {
    // A state the function does not have (D1, D2) is taken and discarded.
    const uint32_t now = load(bytes_, *pm + kPmcsr, 1);
    const uint32_t capabilities = load(bytes_, *pm + 2, 2);
    const uint32_t state = now & 3;
    const bool supported = state == 0 || state == 3 || (capabilities >> (8 + state) & 1) != 0;
    if (!supported) store(bytes_, *pm + kPmcsr, 1, (now & ~3u) | power_before);
  }
  if (const auto express = find_capability(kCapPciExpress)) {
    const uint32_t flr_byte = *express + kExpressDeviceControl + 1;
    if (covers(offset, size, flr_byte) && (value >> (8 * (flr_byte - offset)) & 0x80) != 0 &&
        (load(bytes_, *express + kExpressDeviceCapabilities, 4) & kFlrCapable) != 0) {
      flr_ = true;
    }
  }
  if (const auto vpd = find_capability(kCapVpd); vpd && covers(offset, size, *vpd + kVpdAddress + 1)) {
    finish_vpd_access(*vpd);
  }
}

// The address register was written. Flag 0 asks for a read: the data appears and the flag becomes 1. Flag 1 asks for a
// write: our VPD is read-only, the data is dropped and the flag becomes 0.
void ConfigSpace::finish_vpd_access(uint32_t capability) {
  const uint32_t word = load(bytes_, capability + kVpdAddress, 2);
  if ((word & kVpdFlag) == 0) {
    const uint32_t address = word & ~uint32_t{kVpdFlag} & ~3u;
    for (uint32_t i = 0; i < 4; ++i) {
      bytes_[capability + kVpdData + i] = address + i < vpd_.size() ? vpd_[address + i] : std::byte{0xff};
    }
  }
  store(bytes_, capability + kVpdAddress, 2, word ^ kVpdFlag);
}

BarDescription ConfigSpace::bar(unsigned index) const {
  for (unsigned i = 0; i <= index && i < kBarCount; ++i) {
    const uint32_t at = kRegBar0 + 4 * i;
    const uint32_t low = load(mask_, at, 4) & ~kBarFlags;
    const uint32_t flags = load(bytes_, at, 4) & kBarFlags;
    const bool wide = (flags & kBarTypeMask) == kBar64Bit && i + 1 < kBarCount;
    if (i == index) {
      const uint64_t mask = wide ? uint64_t{load(mask_, at + 4, 4)} << 32 | low : low;
      if (mask == 0) return {};
      return {.size = mask & (~mask + 1), .is_64bit = wide, .prefetchable = (flags & kBarPrefetchable) != 0};
    }
    if (wide) ++i;
  }
  return {};
}

uint64_t ConfigSpace::bar_address(unsigned index) const {
  const BarDescription description = bar(index);
  if (description.size == 0) return 0;
  const uint32_t at = kRegBar0 + 4 * index;
  const uint64_t low = load(bytes_, at, 4) & ~kBarFlags;
  return description.is_64bit ? uint64_t{load(bytes_, at + 4, 4)} << 32 | low : low;
}

bool ConfigSpace::memory_enabled() const { return (load(bytes_, kRegCommand, 2) & kCommandMemory) != 0; }
bool ConfigSpace::bus_master_enabled() const { return (load(bytes_, kRegCommand, 2) & kCommandBusMaster) != 0; }

MsixDescription ConfigSpace::msix() const {
  const auto at = find_capability(kCapMsix);
  if (!at) return {};
  const uint32_t table = load(bytes_, *at + kMsixTable, 4);
  const uint32_t pba = load(bytes_, *at + kMsixPba, 4);
  return {.vectors = static_cast<uint16_t>((load(bytes_, *at + kMsixControl, 2) & 0x7ff) + 1),
          .table_bar = static_cast<uint8_t>(table & 7),
          .table_offset = table & ~7u,
          .pba_bar = static_cast<uint8_t>(pba & 7),
          .pba_offset = pba & ~7u};
}

bool ConfigSpace::msix_enabled() const {
  const auto at = find_capability(kCapMsix);
  return at && (load(bytes_, *at + kMsixControl, 2) & kMsixEnable) != 0;
}

bool ConfigSpace::msix_function_masked() const {
  const auto at = find_capability(kCapMsix);
  return at && (load(bytes_, *at + kMsixControl, 2) & kMsixFunctionMask) != 0;
}

// build() and from_image() let no chain loop or leave the space; the counts below are a second lock on the same door.
std::optional<uint16_t> ConfigSpace::find_capability(uint8_t id) const {
  if ((load(bytes_, kRegStatus, 2) & kStatusCapabilities) == 0) return std::nullopt;
  uint32_t at = load(bytes_, kRegCapabilities, 1) & ~3u;
  for (unsigned hops = 0; hops < 48 && at >= kFirstCapability; ++hops) {
    if (load(bytes_, at, 1) == id) return static_cast<uint16_t>(at);
    at = load(bytes_, at + 1, 1) & ~3u;
  }
  return std::nullopt;
}

std::optional<uint16_t> ConfigSpace::find_extended_capability(uint16_t id) const {
  uint32_t at = kFirstExtendedCapability;
  for (unsigned hops = 0; hops < 960 && at >= kFirstExtendedCapability; ++hops) {
    const uint32_t header = load(bytes_, at, 4);
    if (header == 0 || header == UINT32_MAX) return std::nullopt;
    if ((header & 0xffff) == id) return static_cast<uint16_t>(at);
    at = header >> 20 & ~3u;
  }
  return std::nullopt;
}

bool ConfigSpace::take_function_level_reset() { return std::exchange(flr_, false); }

void ConfigSpace::reset() {
  bytes_ = initial_;
  flr_ = false;
}

}  // namespace dxpu::pcie
