// Which BAR an address hits. Pure value.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "proxy/pcie/config_space.h"

namespace dxpu::pcie {

class BarMap {
 public:
  struct Hit {
    unsigned bar = 0;
    uint64_t offset = 0;
  };

  BarMap() = default;
  // The BARs as programmed in `config` (sizes by mask, addresses by value); absent ones match nothing,
  // nor do those at address 0, which have not been programmed.
  explicit BarMap(const ConfigSpace& config);

  // The BAR that holds all of [address, address + bytes), nothing when none does or the range leaves it. bytes 0 counts
  // as 1.
  std::optional<Hit> find(uint64_t address, uint64_t bytes) const;
  // Addresses for every BAR of `config`, naturally aligned, ascending from `base` (32-bit BARs first), none
  // overlapping, none in the MSI window, never 0. 0 for absent BARs and for those that find no room: a 32-bit BAR with
  // `base` above 4 GiB.
  static std::array<uint64_t, kBarCount> assign(const ConfigSpace& config, uint64_t base);

 private:
  struct Entry {
    uint64_t address = 0;
    uint64_t size = 0;  // 0: absent
  };
  std::array<Entry, kBarCount> entries_{};
};

}  // namespace dxpu::pcie
