// Offsets and bits of configuration space that more than one file of this room needs. Private to this room.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dxpu::pcie {

inline constexpr uint32_t kRegVendorId = 0x00;
inline constexpr uint32_t kRegDeviceId = 0x02;
inline constexpr uint32_t kRegCommand = 0x04;
inline constexpr uint32_t kRegStatus = 0x06;
inline constexpr uint32_t kRegRevision = 0x08;
inline constexpr uint32_t kRegCacheLine = 0x0c;
inline constexpr uint32_t kRegHeaderType = 0x0e;
inline constexpr uint32_t kRegBar0 = 0x10;
inline constexpr uint32_t kRegSubsystemVendor = 0x2c;
inline constexpr uint32_t kRegExpansionRom = 0x30;
inline constexpr uint32_t kRegCapabilities = 0x34;
inline constexpr uint32_t kRegInterruptLine = 0x3c;
inline constexpr uint32_t kFirstCapability = 0x40;
inline constexpr uint32_t kFirstExtendedCapability = 0x100;

inline constexpr uint16_t kCommandMemory = 1 << 1;
inline constexpr uint16_t kCommandBusMaster = 1 << 2;
inline constexpr uint16_t kStatusCapabilities = 1 << 4;

inline constexpr uint8_t kCapPowerManagement = 0x01;
inline constexpr uint8_t kCapVpd = 0x03;
inline constexpr uint8_t kCapPciExpress = 0x10;
inline constexpr uint8_t kCapMsix = 0x11;
inline constexpr uint16_t kExtCapAer = 0x0001;
inline constexpr uint16_t kExtCapSerialNumber = 0x0003;

// BAR register, low bits.
inline constexpr uint32_t kBarIo = 1;
inline constexpr uint32_t kBarTypeMask = 6;
inline constexpr uint32_t kBar64Bit = 4;
inline constexpr uint32_t kBarPrefetchable = 8;
inline constexpr uint32_t kBarFlags = 0xf;
inline constexpr uint64_t kSmallestBar = 128;

// Offsets within capabilities.
inline constexpr uint32_t kPmcsr = 4;  // its low two bits: the power state
inline constexpr uint32_t kMsixControl = 2;
inline constexpr uint32_t kMsixTable = 4;
inline constexpr uint32_t kMsixPba = 8;
inline constexpr uint16_t kMsixEnable = 1 << 15;
inline constexpr uint16_t kMsixFunctionMask = 1 << 14;
inline constexpr uint32_t kExpressDeviceCapabilities = 4;
inline constexpr uint32_t kExpressDeviceControl = 8;
inline constexpr uint32_t kFlrCapable = 1u << 28;
inline constexpr uint32_t kVpdAddress = 2;
inline constexpr uint32_t kVpdData = 4;
inline constexpr uint16_t kVpdFlag = 1 << 15;

inline constexpr uint32_t kMsixEntryBytes = 16;
inline constexpr unsigned kMostMsixVectors = 2048;
inline uint64_t msix_table_bytes(unsigned vectors) { return uint64_t{vectors} * kMsixEntryBytes; }
inline uint64_t msix_pba_bytes(unsigned vectors) { return (uint64_t{vectors} + 63) / 64 * 8; }

// Little-endian, `size` 1 … 4; the caller keeps within the span.
inline uint32_t load(std::span<const std::byte> from, uint32_t offset, unsigned size) {
  uint32_t value = 0;
  for (unsigned i = 0; i < size; ++i) value |= std::to_integer<uint32_t>(from[offset + i]) << (8 * i);
  return value;
}
inline void store(std::span<std::byte> to, uint32_t offset, unsigned size, uint32_t value) {
  for (unsigned i = 0; i < size; ++i) to[offset + i] = static_cast<std::byte>(value >> (8 * i));
}

}  // namespace dxpu::pcie
