#include "proxy/pcie/bar_map.h"

#include <algorithm>

namespace dxpu::pcie {
namespace {

// A write here is an interrupt on x86, never memory.
constexpr uint64_t kMsiWindow = 0xfee00000;
constexpr uint64_t kMsiWindowEnd = 0xfef00000;

// The first multiple of `size` (a power of two) at or above `from`; 0 when there is none.
uint64_t align_up(uint64_t from, uint64_t size) {
  return (from + size - 1 < from) ? 0 : (from + size - 1) & ~(size - 1);
}

}  // namespace

BarMap::BarMap(const ConfigSpace& config) {
  for (unsigned i = 0; i < kBarCount; ++i) {
    const uint64_t address = config.bar_address(i);
    if (address != 0) entries_[i] = {.address = address, .size = config.bar(i).size};
  }
}

std::optional<BarMap::Hit> BarMap::find(uint64_t address, uint64_t bytes) const {
  bytes = std::max<uint64_t>(bytes, 1);
  for (unsigned i = 0; i < kBarCount; ++i) {
    const Entry& entry = entries_[i];
    if (entry.size == 0 || address < entry.address) continue;
    const uint64_t offset = address - entry.address;
    if (offset < entry.size && bytes <= entry.size - offset) return Hit{.bar = i, .offset = offset};
  }
  return std::nullopt;
}

std::array<uint64_t, kBarCount> BarMap::assign(const ConfigSpace& config, uint64_t base) {
  std::array<uint64_t, kBarCount> addresses{};
  uint64_t next = std::max<uint64_t>(base, 1);  // 0 means not programmed
  for (const bool wide : {false, true}) {
    for (unsigned i = 0; i < kBarCount; ++i) {
      const BarDescription bar = config.bar(i);
      if (bar.size == 0 || bar.is_64bit != wide) continue;
      uint64_t at = align_up(next, bar.size);
      // at + size - 1: the last byte, which cannot overflow because at is a multiple of size.
      if (at != 0 && at < kMsiWindowEnd && at + (bar.size - 1) >= kMsiWindow) at = align_up(kMsiWindowEnd, bar.size);
      if (at == 0 || (!wide && at + (bar.size - 1) > UINT32_MAX)) continue;
      addresses[i] = at;
      next = at + bar.size;
      if (next == 0) return addresses;  // the address space is full
    }
  }
  return addresses;
}

}  // namespace dxpu::pcie
