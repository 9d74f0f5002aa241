// ConfigSpace::from_image(): the bytes and masks of a peer, believed only after every structure in them has been
// walked.
#include <algorithm>
#include <bitset>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/pcie/config_registers.h"
#include "proxy/pcie/config_space.h"

namespace dxpu::pcie {
namespace {

constexpr size_t kLargestVpd = 32768;  // its address has 15 bits

template <typename... Parts>
absl::Status bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("configuration image: ", parts...));
}

struct Image {
  std::span<const std::byte> bytes, mask, w1c;

  uint32_t changeable(uint32_t offset, unsigned size) const {
    return load(mask, offset, size) | load(w1c, offset, size);
  }
};

absl::Status check_header(const Image& image) {
  struct Fixed {
    uint32_t offset;
    unsigned size;
    const char* name;
  };
  constexpr Fixed kFixed[] = {{kRegVendorId, 4, "vendor and device id"},  {kRegRevision, 4, "revision and class"},
                              {kRegHeaderType, 1, "header type"},         {kRegSubsystemVendor, 4, "subsystem ids"},
                              {kRegExpansionRom, 4, "expansion ROM"},     {kRegCapabilities, 1, "capabilities pointer"},
                              {kRegInterruptLine + 1, 1, "interrupt pin"}};
  for (const Fixed& fixed : kFixed) {
    if (image.changeable(fixed.offset, fixed.size) != 0) return bad(fixed.name, " must be read-only");
  }
  const uint32_t vendor = load(image.bytes, kRegVendorId, 2);
  if (vendor == 0 || vendor == 0xffff) return bad("vendor id 0x", absl::Hex(vendor), " means that nothing is there");
  const uint32_t header_type = load(image.bytes, kRegHeaderType, 1);
  if (header_type != 0) return bad("header type 0x", absl::Hex(header_type), " is not that of one function (0)");
  if (load(image.bytes, kRegExpansionRom, 4) != 0) return bad("an expansion ROM is not supported");
  if ((image.changeable(kRegStatus, 2) & kStatusCapabilities) != 0)
    return bad("the capabilities bit must be read-only");
  for (uint32_t i = 0; i < kConfigSpaceBytes; ++i) {
    if ((image.mask[i] & image.w1c[i]) != std::byte{0}) return bad("byte ", i, " has bits in both masks");
  }
  return absl::OkStatus();
}

absl::Status check_bars(const Image& image) {
  for (unsigned i = 0; i < kBarCount; ++i) {
    const unsigned index = i;
    const uint32_t at = kRegBar0 + 4 * i;
    const uint32_t low = load(image.bytes, at, 4);
    if (load(image.w1c, at, 4) != 0) return bad("BAR ", index, " has bits that clear by a 1");
    uint64_t mask = load(image.mask, at, 4);
    if ((mask & kBarFlags) != 0) return bad("BAR ", index, " has writable type bits");
    if (mask == 0 && low == 0) continue;
    if ((low & kBarIo) != 0) return bad("BAR ", index, " is an IO BAR, which is not supported");
    uint64_t value = low & ~kBarFlags;
    uint64_t top = uint64_t{1} << 31;
    switch (low & kBarTypeMask) {
      case 0:
        break;
      case kBar64Bit:
        if (i + 1 == kBarCount) return bad("BAR ", index, " is 64-bit in the last register");
        if (load(image.w1c, at + 4, 4) != 0) return bad("BAR ", index, " has bits that clear by a 1");
        mask |= uint64_t{load(image.mask, at + 4, 4)} << 32;
        value |= uint64_t{load(image.bytes, at + 4, 4)} << 32;
        top = uint64_t{1} << 63;
        ++i;
        break;
      default:
        return bad("BAR ", index, " has a reserved type");
    }
    const uint64_t size = mask & (~mask + 1);
    // Ones from the size's bit to the top: size + mask then carries out of the top bit.
    if ((mask & top) == 0 || mask + size != top << 1)
      return bad("BAR ", index, ": mask 0x", absl::Hex(mask), " is not that of a size");
    if (size < kSmallestBar) return bad("BAR ", index, " has a size of ", size, ", less than ", kSmallestBar);
    if ((value & ~mask) != 0) return bad("BAR ", index, ": address 0x", absl::Hex(value), " has bits outside its mask");
  }
  return absl::OkStatus();
}

// Bytes that the capabilities we act on reach; 2 for the others.
uint32_t capability_bytes(const Image& image, uint32_t at) {
  switch (load(image.bytes, at, 1)) {
    case kCapPowerManagement:
    case kCapVpd:
      return 8;
    case kCapMsix:
      return 12;
    case kCapPciExpress:
      return 0x14;  // through the link registers, which all versions have
    default:
      return 2;
  }
}

absl::Status check_capabilities(const Image& image) {
  if ((load(image.bytes, kRegStatus, 2) & kStatusCapabilities) == 0) return absl::OkStatus();
  std::bitset<256> taken;
  uint32_t at = load(image.bytes, kRegCapabilities, 1);
  while (at != 0) {
    if (at < kFirstCapability || at % 4 != 0) return bad("capability pointer 0x", absl::Hex(at), " is not one");
    const uint32_t bytes = capability_bytes(image, at);
    if (at + bytes > taken.size()) return bad("capability at 0x", absl::Hex(at), " leaves the first 256 bytes");
    for (uint32_t i = at; i < at + bytes; ++i) {
      if (taken[i]) return bad("capability at 0x", absl::Hex(at), " is reached twice or overlaps another");
      taken.set(i);
    }
    if (image.changeable(at, 2) != 0) return bad("id and next pointer at 0x", absl::Hex(at), " must be read-only");
    at = load(image.bytes, at + 1, 1);
  }
  return absl::OkStatus();
}

absl::Status check_extended_capabilities(const Image& image) {
  std::bitset<kConfigSpaceBytes> taken;
  uint32_t at = kFirstExtendedCapability;
  while (at != 0) {
    if (at < kFirstExtendedCapability || at % 4 != 0)
      return bad("extended capability pointer 0x", absl::Hex(at), " is not one");
    if (taken[at]) return bad("extended capability at 0x", absl::Hex(at), " is reached twice");
    taken.set(at);
    if (image.changeable(at, 4) != 0)
      return bad("extended capability header at 0x", absl::Hex(at), " must be read-only");
    const uint32_t header = load(image.bytes, at, 4);
    if (header == 0 || header == UINT32_MAX) break;  // an empty list
    at = header >> 20;
  }
  return absl::OkStatus();
}

absl::Status check_msix(const ConfigSpace& space, const Image& image) {
  const auto at = space.find_capability(kCapMsix);
  if (!at) return absl::OkStatus();
  if ((image.changeable(*at + kMsixControl, 2) & 0x7ff) != 0 || image.changeable(*at + kMsixTable, 4) != 0 ||
      image.changeable(*at + kMsixPba, 4) != 0) {
    return bad("table size, table offset and PBA offset of MSI-X must be read-only");
  }
  const MsixDescription msix = space.msix();
  const uint64_t table = msix_table_bytes(msix.vectors);
  const uint64_t pba = msix_pba_bytes(msix.vectors);
  if (msix.table_offset + table > space.bar(msix.table_bar).size) {
    return bad("the MSI-X table of ", table, " bytes at ", msix.table_offset, " is not inside BAR ", msix.table_bar);
  }
  if (msix.pba_offset + pba > space.bar(msix.pba_bar).size) {
    return bad("the MSI-X PBA of ", pba, " bytes at ", msix.pba_offset, " is not inside BAR ", msix.pba_bar);
  }
  if (msix.table_bar == msix.pba_bar && msix.table_offset < msix.pba_offset + pba &&
      msix.pba_offset < msix.table_offset + table) {
    return bad("MSI-X table and PBA overlap in BAR ", msix.table_bar);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ConfigSpace> ConfigSpace::from_image(std::span<const std::byte> bytes,
                                                    std::span<const std::byte> write_mask,
                                                    std::span<const std::byte> w1c_mask) {
  return from_image(bytes, write_mask, w1c_mask, {});
}

absl::StatusOr<ConfigSpace> ConfigSpace::from_image(std::span<const std::byte> bytes,
                                                    std::span<const std::byte> write_mask,
                                                    std::span<const std::byte> w1c_mask,
                                                    std::span<const std::byte> vpd) {
  if (bytes.size() != kConfigSpaceBytes || write_mask.size() != kConfigSpaceBytes ||
      w1c_mask.size() != kConfigSpaceBytes) {
    return bad("bytes, write mask and clear mask have ", bytes.size(), ", ", write_mask.size(), " and ",
               w1c_mask.size(), " bytes, each must have ", kConfigSpaceBytes);
  }
  if (vpd.size() > kLargestVpd) return bad("a VPD of ", vpd.size(), " bytes is larger than ", kLargestVpd);
  const Image image{bytes, write_mask, w1c_mask};
  DXPU_RETURN_IF_ERROR(check_header(image));
  DXPU_RETURN_IF_ERROR(check_bars(image));
  DXPU_RETURN_IF_ERROR(check_capabilities(image));
  DXPU_RETURN_IF_ERROR(check_extended_capabilities(image));

  ConfigSpace space;
  std::copy(bytes.begin(), bytes.end(), space.bytes_.begin());
  std::copy(write_mask.begin(), write_mask.end(), space.mask_.begin());
  std::copy(w1c_mask.begin(), w1c_mask.end(), space.w1c_.begin());
  space.vpd_.assign(vpd.begin(), vpd.end());
  DXPU_RETURN_IF_ERROR(check_msix(space, image));

  // What was written before the image was taken is unknown; what must not survive a reset is cleared, the rest stays.
  space.initial_ = space.bytes_;
  const auto clear = [&space](uint32_t offset, unsigned size) {
    store(space.initial_, offset, size, load(space.initial_, offset, size) & ~load(space.mask_, offset, size));
  };
  // Every command bit resets to zero, whatever a hostile mask says of it.
  store(space.initial_, kRegCommand, 2, 0);
  for (unsigned i = 0; i < kBarCount; ++i) clear(kRegBar0 + 4 * i, 4);
  if (const auto at = space.find_capability(kCapMsix)) clear(*at + kMsixControl, 2);
  return space;
}

}  // namespace dxpu::pcie
