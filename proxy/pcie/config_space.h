// A type 0 configuration space, built from a description: bytes, write masks and the capabilities dxpu functions show.
//
// Every register has a write mask: BAR sizing works, read-only bits stay, RW1C bits clear. What writes *mean* (bus
// master, MSI-X enable, function level reset) is read from the accessors after write(). Pure, thread-compatible. Memory
// BARs only: no IO BARs, no expansion ROM, no INTx.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dxpu::pcie {

inline constexpr uint32_t kConfigSpaceBytes = 4096;
inline constexpr unsigned kBarCount = 6;

struct BarDescription {
  uint64_t size = 0;      // 0: absent. A power of two, at least 128 (memory)
  bool is_64bit = false;  // takes this register and the next
  bool prefetchable = false;
  bool operator==(const BarDescription&) const = default;
};

struct MsixDescription {
  uint16_t vectors = 0;  // 0: no capability; 1 … 2048
  uint8_t table_bar = 0;
  uint32_t table_offset = 0;  // 8-byte aligned
  uint8_t pba_bar = 0;
  uint32_t pba_offset = 0;
  bool operator==(const MsixDescription&) const = default;
};

struct ConfigDescription {
  uint16_t vendor_id = 0;
  uint16_t device_id = 0;
  uint8_t revision = 0;
  uint32_t class_code = 0;  // 24 bits: base, sub, programming interface
  uint16_t subsystem_vendor_id = 0;
  uint16_t subsystem_id = 0;
  std::array<BarDescription, kBarCount> bars;
  MsixDescription msix;
  bool power_management = true;
  bool advanced_error_reporting = true;   // AER, extended capability
  uint64_t serial_number = 0;             // 0: no Device Serial Number capability
  std::string vpd_product;                // empty: no VPD capability. Identifier string of the VPD
  std::string vpd_serial;                 // SN keyword
  uint16_t max_payload_supported = 4096;  // 128 … 4096
  uint8_t link_speed = 5;                 // Gen5
  uint8_t link_width = 16;
};

class ConfigSpace {
 public:
  // INVALID_ARGUMENT names the field: a BAR whose size is not a power of two, a 64-bit BAR in the last register, an
  // MSI-X table outside its BAR, …
  static absl::StatusOr<ConfigSpace> build(const ConfigDescription& description);
  // From the 4096 bytes and 4096 mask bytes that a peer sent (fabric hello). Checked as hostile: header type, BAR sizes
  // by mask, capability chains that loop or leave the space.
  static absl::StatusOr<ConfigSpace> from_image(std::span<const std::byte> bytes, std::span<const std::byte> write_mask,
                                                std::span<const std::byte> w1c_mask);
  // The same with the VPD resource (at most 32 KiB, vpd() of the other side), which the image reaches only through
  // registers.
  static absl::StatusOr<ConfigSpace> from_image(std::span<const std::byte> bytes, std::span<const std::byte> write_mask,
                                                std::span<const std::byte> w1c_mask, std::span<const std::byte> vpd);

  // Size 1, 2 or 4, naturally aligned; anything else, or past the end: all ones / ignored. A VPD access is finished
  // when write() returns.
  uint32_t read(uint32_t offset, unsigned size) const;
  void write(uint32_t offset, unsigned size, uint32_t value);

  std::span<const std::byte, kConfigSpaceBytes> bytes() const { return bytes_; }
  std::span<const std::byte, kConfigSpaceBytes> write_mask() const { return mask_; }
  std::span<const std::byte, kConfigSpaceBytes> w1c_mask() const { return w1c_; }

  std::span<const std::byte> vpd() const { return vpd_; }

  BarDescription bar(unsigned index) const;  // size from the mask; the upper half of a 64-bit BAR counts as absent
  uint64_t bar_address(unsigned index) const;
  bool memory_enabled() const;
  bool bus_master_enabled() const;
  MsixDescription msix() const;
  bool msix_enabled() const;
  bool msix_function_masked() const;
  // Offset of a capability (or extended capability), nothing when absent.
  std::optional<uint16_t> find_capability(uint8_t id) const;
  std::optional<uint16_t> find_extended_capability(uint16_t id) const;
  // True once after a write that set Initiate Function Level Reset.
  bool take_function_level_reset();
  // All registers back to their values after build() or from_image(); BAR addresses, command and MSI-X control cleared.
  void reset();

 private:
  ConfigSpace() = default;
  void finish_vpd_access(uint32_t capability);

  std::array<std::byte, kConfigSpaceBytes> bytes_{};
  std::array<std::byte, kConfigSpaceBytes> initial_{};
  std::array<std::byte, kConfigSpaceBytes> mask_{};  // 1 = writable
  std::array<std::byte, kConfigSpaceBytes> w1c_{};   // 1 = write one to clear
  std::vector<std::byte> vpd_;                       // reached through the VPD address and data registers
  bool flr_ = false;
};

}  // namespace dxpu::pcie
