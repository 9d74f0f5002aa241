// One row per TLP type: what the codec and the rules both need to know. Private to this room.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "proxy/pcie/tlp.h"

namespace dxpu::pcie {

// What the header carries after its first double word.
enum class Shape : uint8_t { kMemory, kAtomic, kIo, kConfig, kMessage, kCompletion };

struct TypeRow {
  const char* name;
  TlpClass tlp_class;
  Shape shape;
  bool data;
  uint8_t code;  // Type[4:0]; the routing of a message goes into its low three bits
};

inline constexpr size_t kTypeCount = 15;
// In the order of TlpType.
inline constexpr std::array<TypeRow, kTypeCount> kTypeRows = {{
    {"MRd", TlpClass::kNonPosted, Shape::kMemory, false, 0b00000},
    {"MWr", TlpClass::kPosted, Shape::kMemory, true, 0b00000},
    {"IORd", TlpClass::kNonPosted, Shape::kIo, false, 0b00010},
    {"IOWr", TlpClass::kNonPosted, Shape::kIo, true, 0b00010},
    {"CfgRd0", TlpClass::kNonPosted, Shape::kConfig, false, 0b00100},
    {"CfgWr0", TlpClass::kNonPosted, Shape::kConfig, true, 0b00100},
    {"CfgRd1", TlpClass::kNonPosted, Shape::kConfig, false, 0b00101},
    {"CfgWr1", TlpClass::kNonPosted, Shape::kConfig, true, 0b00101},
    {"Msg", TlpClass::kPosted, Shape::kMessage, false, 0b10000},
    {"MsgD", TlpClass::kPosted, Shape::kMessage, true, 0b10000},
    {"Cpl", TlpClass::kCompletion, Shape::kCompletion, false, 0b01010},
    {"CplD", TlpClass::kCompletion, Shape::kCompletion, true, 0b01010},
    {"FetchAdd", TlpClass::kNonPosted, Shape::kAtomic, true, 0b01100},
    {"Swap", TlpClass::kNonPosted, Shape::kAtomic, true, 0b01101},
    {"CAS", TlpClass::kNonPosted, Shape::kAtomic, true, 0b01110},
}};

inline bool known(TlpType type) { return static_cast<size_t>(type) < kTypeCount; }
// Only for a known type.
inline const TypeRow& row_of(TlpType type) { return kTypeRows[static_cast<size_t>(type)]; }
// Memory and atomics choose between 3 and 4 DW by the address.
inline bool four_dw(const Tlp& tlp, const TypeRow& row) {
  if (row.shape == Shape::kMessage) return true;
  if (row.shape != Shape::kMemory && row.shape != Shape::kAtomic) return false;
  return tlp.force_64bit_header || tlp.address > UINT32_MAX;
}

}  // namespace dxpu::pcie
