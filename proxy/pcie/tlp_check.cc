// The rules that one TLP can break by itself, in the order of the specification's chapter 2.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/pcie/tlp.h"
#include "proxy/pcie/tlp_layout.h"

namespace dxpu::pcie {
namespace {

// The smallest Read Completion Boundary there is; pieces cut at 128 end on it as well.
constexpr uint32_t kSmallestRcb = 64;
constexpr unsigned kLargestRouting = 5;  // 6 and 7 are reserved

template <typename... Parts>
absl::Status broken(const TypeRow& row, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(row.name, ": ", parts...));
}

enum Fields : unsigned {
  kAddress = 1,
  kByteEnables = 2,
  kConfigFields = 4,
  kMessageFields = 8,
  kCompletionFields = 16
};

unsigned fields_of(Shape shape) {
  switch (shape) {
    case Shape::kMemory:
    case Shape::kIo:
      return kAddress | kByteEnables;
    case Shape::kAtomic:
      return kAddress;
    case Shape::kConfig:
      return kByteEnables | kConfigFields;
    case Shape::kMessage:
      return kMessageFields;
    case Shape::kCompletion:
      return kCompletionFields;
  }
  return 0;
}

absl::Status check_absent_fields(const Tlp& t, const TypeRow& row) {
  const unsigned has = fields_of(row.shape);
  if (!(has & kAddress) && (t.address != 0 || t.force_64bit_header)) {
    return broken(row, "address must be 0, this type has none");
  }
  if (!(has & kByteEnables) && (t.first_be | t.last_be) != 0) {
    return broken(row, "first_be and last_be must be 0, they are reserved in this type");
  }
  if (!(has & kConfigFields) && (t.target | t.config_register) != 0) {
    return broken(row, "target and config_register must be 0, this type has none");
  }
  if (!(has & kMessageFields) && (t.message_code != 0 || t.message_routing != 0 || t.message_data != 0)) {
    return broken(row, "message_code, message_routing and message_data must be 0, this type has none");
  }
  if (!(has & kCompletionFields) && (t.completer != 0 || t.status != CplStatus::kSuccess || t.byte_count_modified ||
                                     t.byte_count != 0 || t.lower_address != 0)) {
    return broken(row,
                  "completer, status, byte_count_modified, byte_count and lower_address must be 0, this type has none");
  }
  return absl::OkStatus();
}

absl::Status check_common(const Tlp& t, const TypeRow& row) {
  if (t.traffic_class > 7) return broken(row, "traffic_class ", t.traffic_class, " is wider than 3 bits");
  if (t.attributes > 7) return broken(row, "attributes ", t.attributes, " is wider than 3 bits");
  if (t.tag > 0x3ff) return broken(row, "tag ", t.tag, " is wider than 10 bits");
  if (t.poisoned && !row.data) return broken(row, "poisoned (EP) is set on a TLP without data");
  return check_absent_fields(t, row);
}

absl::Status check_length(const Tlp& t, const TypeRow& row) {
  if (t.length_dw < 1 || t.length_dw > kMaxPayloadBytes / 4) {
    return broken(row, "length_dw ", t.length_dw, " is not in 1 ... 1024");
  }
  return absl::OkStatus();
}

// "First/Last DW Byte Enables Rules".
absl::Status check_byte_enables(const Tlp& t, const TypeRow& row) {
  if (t.first_be > 0xf) return broken(row, "first_be ", t.first_be, " is wider than 4 bits");
  if (t.last_be > 0xf) return broken(row, "last_be ", t.last_be, " is wider than 4 bits");
  if (t.length_dw == 1) {
    if (t.last_be != 0) return broken(row, "last_be must be 0 when length_dw is 1");
    return absl::OkStatus();
  }
  if (t.first_be == 0) return broken(row, "first_be must not be 0 when length_dw is more than 1");
  if (t.last_be == 0) return broken(row, "last_be must not be 0 when length_dw is more than 1");
  // Holes are for requests inside one aligned quad word only.
  if (t.length_dw == 2 && t.address % 8 == 0) return absl::OkStatus();
  if (((t.first_be | (t.first_be << 1)) & 0xf) != t.first_be) {
    return broken(row, "first_be 0x", absl::Hex(t.first_be), " has holes, allowed only within one aligned quad word");
  }
  if ((t.last_be & (t.last_be + 1)) != 0) {
    return broken(row, "last_be 0x", absl::Hex(t.last_be), " has holes, allowed only within one aligned quad word");
  }
  return absl::OkStatus();
}

absl::Status check_address_form(const Tlp& t, const TypeRow& row) {
  if (t.address % 4 != 0) return broken(row, "address 0x", absl::Hex(t.address), " is not DW aligned");
  if (t.force_64bit_header && t.address <= UINT32_MAX) {
    return broken(row, "address 0x", absl::Hex(t.address), " is below 4 GiB but came in a 4 DW header");
  }
  return absl::OkStatus();
}

absl::Status check_memory(const Tlp& t, const TypeRow& row) {
  DXPU_RETURN_IF_ERROR(check_length(t, row));
  DXPU_RETURN_IF_ERROR(check_address_form(t, row));
  if (t.address % kPageBoundary + t.length_dw * 4u > kPageBoundary) {
    return broken(row, "address 0x", absl::Hex(t.address), " and length_dw ", t.length_dw, " cross a 4 KiB boundary");
  }
  return check_byte_enables(t, row);
}

absl::Status check_atomic(const Tlp& t, const TypeRow& row) {
  const bool cas = t.type == TlpType::kCompareSwap;
  const unsigned operands = cas ? 2 : 1;
  const unsigned operand_dw = t.length_dw / operands;
  if (t.length_dw % operands != 0 || !(operand_dw == 1 || operand_dw == 2 || (cas && operand_dw == 4))) {
    return broken(row, "length_dw ", t.length_dw, " is not ", cas ? "2, 4 or 8" : "1 or 2");
  }
  DXPU_RETURN_IF_ERROR(check_address_form(t, row));
  if (t.address % (operand_dw * 4) != 0) {
    return broken(row, "address 0x", absl::Hex(t.address), " is not aligned to its operand of ", operand_dw * 4,
                  " bytes");
  }
  return absl::OkStatus();
}

// IO and configuration: one DW, TC 0, no attributes.
absl::Status check_single_dw(const Tlp& t, const TypeRow& row) {
  if (t.length_dw != 1) return broken(row, "length_dw must be 1, is ", t.length_dw);
  if (t.traffic_class != 0) return broken(row, "traffic_class must be 0, is ", t.traffic_class);
  if (t.attributes != 0) return broken(row, "attributes must be 0, is ", t.attributes);
  return check_byte_enables(t, row);
}

absl::Status check_io(const Tlp& t, const TypeRow& row) {
  if (t.force_64bit_header || t.address > UINT32_MAX) {
    return broken(row, "address 0x", absl::Hex(t.address), " is wider than 32 bits");
  }
  if (t.address % 4 != 0) return broken(row, "address 0x", absl::Hex(t.address), " is not DW aligned");
  return check_single_dw(t, row);
}

absl::Status check_config(const Tlp& t, const TypeRow& row) {
  if (t.config_register % 4 != 0 || t.config_register >= 4096) {
    return broken(row, "config_register 0x", absl::Hex(t.config_register), " is not DW aligned below 4096");
  }
  return check_single_dw(t, row);
}

// Messages whose routing, length and traffic class the specification fixes. Other codes are left to the receiver, which
// answers to unknown ones as unsupported, not as malformed.
struct MessageRule {
  uint8_t first_code;
  uint8_t last_code;
  uint8_t routings;  // bit r: routing r is legal
  bool plain;        // may come as Msg
  uint8_t data_dw;   // may come as MsgD of this length; 0: never, kAnyLength: any
  bool any_class;    // else TC 0 only
};
constexpr uint8_t kAnyLength = 0xff;
constexpr uint8_t kToRoot = 1 << 0, kById = 1 << 2, kBroadcast = 1 << 3, kLocal = 1 << 4, kGathered = 1 << 5;
constexpr MessageRule kMessageRules[] = {
    {0x00, 0x00, kBroadcast, true, 0, false},                                     // Unlock
    {0x01, 0x01, kById, false, 2, true},                                          // Invalidate Request
    {0x02, 0x02, kById, true, 0, true},                                           // Invalidate Completion
    {0x04, 0x04, kToRoot, true, 0, true},                                         // Page Request
    {0x05, 0x05, kById, true, 0, true},                                           // PRG Response
    {0x10, 0x10, kLocal, true, 0, false},                                         // LTR
    {0x12, 0x12, kLocal, true, 0, false},                                         // OBFF
    {0x14, 0x14, kLocal, true, 0, false},                                         // PM_Active_State_Nak
    {0x18, 0x18, kToRoot, true, 0, false},                                        // PM_PME
    {0x19, 0x19, kBroadcast, true, 0, false},                                     // PME_Turn_Off
    {0x1b, 0x1b, kGathered, true, 0, false},                                      // PME_TO_Ack
    {0x20, 0x27, kLocal, true, 0, false},                                         // Assert/Deassert_INTx
    {0x30, 0x31, kToRoot, true, 0, false},                                        // ERR_COR, ERR_NONFATAL
    {0x33, 0x33, kToRoot, true, 0, false},                                        // ERR_FATAL
    {0x50, 0x50, kLocal, false, 1, false},                                        // Set_Slot_Power_Limit
    {0x52, 0x52, kLocal, true, 0, false},                                         // PTM Request
    {0x53, 0x53, kLocal, true, 1, false},                                         // PTM Response, ResponseD
    {0x7e, 0x7f, kToRoot | kById | kBroadcast | kLocal, true, kAnyLength, true},  // vendor defined
};

absl::Status check_message(const Tlp& t, const TypeRow& row) {
  if (row.data) {
    DXPU_RETURN_IF_ERROR(check_length(t, row));
  } else if (t.length_dw != 0) {
    return broken(row, "length_dw must be 0, this type has no data");
  }
  if (t.message_routing > kLargestRouting) return broken(row, "message_routing ", t.message_routing, " is reserved");
  for (const MessageRule& rule : kMessageRules) {
    if (t.message_code < rule.first_code || t.message_code > rule.last_code) continue;
    if (!(rule.routings >> t.message_routing & 1)) {
      return broken(row, "message_routing ", t.message_routing, " does not belong to message_code 0x",
                    absl::Hex(t.message_code));
    }
    if (!row.data && !rule.plain) return broken(row, "message_code 0x", absl::Hex(t.message_code), " carries data");
    if (row.data && rule.data_dw == 0)
      return broken(row, "message_code 0x", absl::Hex(t.message_code), " carries no data");
    if (row.data && rule.data_dw != kAnyLength && t.length_dw != rule.data_dw) {
      return broken(row, "length_dw ", t.length_dw, " of message_code 0x", absl::Hex(t.message_code), " is not ",
                    rule.data_dw);
    }
    if (!rule.any_class && t.traffic_class != 0) {
      return broken(row, "traffic_class of message_code 0x", absl::Hex(t.message_code), " must be 0");
    }
    break;
  }
  return absl::OkStatus();
}

absl::Status check_completion(const Tlp& t, const TypeRow& row) {
  switch (t.status) {
    case CplStatus::kSuccess:
    case CplStatus::kUnsupportedRequest:
    case CplStatus::kConfigRetry:
    case CplStatus::kCompleterAbort:
      break;
    default:
      return broken(row, "status ", static_cast<unsigned>(t.status), " is reserved");
  }
  if (t.byte_count_modified) return broken(row, "byte_count_modified (BCM) is for PCI-X completers only");
  if (t.byte_count < 1 || t.byte_count > kMaxPayloadBytes) {
    return broken(row, "byte_count ", t.byte_count, " is not in 1 ... 4096");
  }
  if (t.lower_address > 0x7f) return broken(row, "lower_address ", t.lower_address, " is wider than 7 bits");
  if (!row.data) {
    if (t.length_dw != 0) return broken(row, "length_dw must be 0, this type has no data");
    return absl::OkStatus();
  }
  if (t.status != CplStatus::kSuccess) return broken(row, "status must be 0 (SC) in a completion with data");
  DXPU_RETURN_IF_ERROR(check_length(t, row));
  const uint32_t wanted_dw = (t.lower_address % 4u + t.byte_count + 3) / 4;
  if (t.length_dw > wanted_dw) {
    return broken(row, "length_dw ", t.length_dw, " is more than lower_address and byte_count ", t.byte_count,
                  " ask for");
  }
  if (t.length_dw < wanted_dw && (t.lower_address / 4u + t.length_dw) * 4 % kSmallestRcb != 0) {
    return broken(row, "length_dw ", t.length_dw,
                  " ends a piece that is not the last away from a Read Completion Boundary");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status check_header(const Tlp& tlp) {
  if (!known(tlp.type)) {
    return absl::InvalidArgumentError(absl::StrCat("TLP: type ", static_cast<unsigned>(tlp.type), " is unknown"));
  }
  const TypeRow& row = row_of(tlp.type);
  DXPU_RETURN_IF_ERROR(check_common(tlp, row));
  switch (row.shape) {
    case Shape::kMemory:
      return check_memory(tlp, row);
    case Shape::kAtomic:
      return check_atomic(tlp, row);
    case Shape::kIo:
      return check_io(tlp, row);
    case Shape::kConfig:
      return check_config(tlp, row);
    case Shape::kMessage:
      return check_message(tlp, row);
    case Shape::kCompletion:
      return check_completion(tlp, row);
  }
  return broken(row, "type has no shape");
}

absl::Status check(const Tlp& tlp) {
  DXPU_RETURN_IF_ERROR(check_header(tlp));
  const TypeRow& row = row_of(tlp.type);
  const size_t expected = row.data ? tlp.length_dw * size_t{4} : 0;
  if (tlp.payload.size() != expected) {
    return broken(row, "payload has ", tlp.payload.size(), " bytes, length_dw ", tlp.length_dw, " needs ", expected);
  }
  return absl::OkStatus();
}

}  // namespace dxpu::pcie
