#include "tests/pcie/tlp_samples.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>

namespace dxpu::pcie {

std::vector<std::byte> from_hex(const std::string& text) {
  std::string digits;
  std::copy_if(text.begin(), text.end(), std::back_inserter(digits), [](char c) { return c != ' '; });
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<std::byte> counting_bytes(size_t count, unsigned first) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + i * 7 + i / 256);
  return bytes;
}

namespace {

Golden golden(std::string name, const std::string& header, const std::vector<std::byte>& payload, Tlp tlp) {
  Golden g{std::move(name), from_hex(header), std::move(tlp)};
  g.wire.insert(g.wire.end(), payload.begin(), payload.end());
  g.tlp.payload = payload;
  return g;
}

std::vector<Golden> make_goldens() {
  using enum TlpType;
  const auto hex = from_hex;
  std::vector<Golden> g;
  g.push_back(golden("MRd32", "00000004 010012ff 00001000", {},
                     {.type = kMemRead,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .address = 0x1000,
                      .length_dw = 4,
                      .first_be = 0xf,
                      .last_be = 0xf}));
  g.push_back(golden("MRd64 of 1024 DW is written as Length 0", "20000000 01007fff 00000001 00000000", {},
                     {.type = kMemRead,
                      .requester = 0x0100,
                      .tag = 0x7f,
                      .address = 0x100000000,
                      .length_dw = 1024,
                      .first_be = 0xf,
                      .last_be = 0xf}));
  g.push_back(golden("MRd32 of nothing", "00000001 00080500 fedcba98", {},
                     {.type = kMemRead, .requester = 0x0008, .tag = 5, .address = 0xfedcba98, .length_dw = 1}));
  g.push_back(golden(
      "MRd32 just below 4 GiB", "00000001 0008050f fffffffc", {},
      {.type = kMemRead, .requester = 0x0008, .tag = 5, .address = 0xfffffffc, .length_dw = 1, .first_be = 0xf}));
  g.push_back(golden("MRd64 at the last address", "20000001 0008050f ffffffff fffffffc", {},
                     {.type = kMemRead,
                      .requester = 0x0008,
                      .tag = 5,
                      .address = 0xfffffffffffffffc,
                      .length_dw = 1,
                      .first_be = 0xf}));
  g.push_back(golden(
      "MRd32 with holes inside a quad word", "00000002 000806a5 00000008", {},
      {.type = kMemRead, .requester = 0x0008, .tag = 6, .address = 8, .length_dw = 2, .first_be = 5, .last_be = 0xa}));
  g.push_back(golden("MWr32 of three bytes", "40000001 0000000e 00002000", hex("00aabbcc"),
                     {.type = kMemWrite, .address = 0x2000, .length_dw = 1, .first_be = 0xe}));
  g.push_back(golden("MWr64 unaligned at both ends", "60000002 0203003c 00000008 00000ff8", hex("0000010203040000"),
                     {.type = kMemWrite,
                      .requester = 0x0203,
                      .address = 0x800000ff8,
                      .length_dw = 2,
                      .first_be = 0xc,
                      .last_be = 0x3}));
  g.push_back(golden("MWr32 with every common field", "40dc7001 0010ab0f 00000040", hex("01020304"),
                     {.type = kMemWrite,
                      .traffic_class = 5,
                      .attributes = 7,
                      .poisoned = true,
                      .requester = 0x0010,
                      .tag = 0x3ab,
                      .address = 0x40,
                      .length_dw = 1,
                      .first_be = 0xf}));
  g.push_back(golden("MWr32 relaxed ordering, tag bit 8", "40082001 0010ab0f 00000040", hex("01020304"),
                     {.type = kMemWrite,
                      .attributes = 2,
                      .requester = 0x0010,
                      .tag = 0x1ab,
                      .address = 0x40,
                      .length_dw = 1,
                      .first_be = 0xf}));
  g.push_back(golden("MWr32 no snoop, tag bit 9", "40801001 0010ab0f 00000040", hex("01020304"),
                     {.type = kMemWrite,
                      .attributes = 1,
                      .requester = 0x0010,
                      .tag = 0x2ab,
                      .address = 0x40,
                      .length_dw = 1,
                      .first_be = 0xf}));
  g.push_back(golden("MWr32 of 1024 DW", "40000000 000000ff 00003000", counting_bytes(4096),
                     {.type = kMemWrite, .address = 0x3000, .length_dw = 1024, .first_be = 0xf, .last_be = 0xf}));
  g.push_back(golden("IORd", "02000001 00000303 000003f8", {},
                     {.type = kIoRead, .tag = 3, .address = 0x3f8, .length_dw = 1, .first_be = 3}));
  g.push_back(golden("IOWr", "42000001 00000401 000003f8", hex("55000000"),
                     {.type = kIoWrite, .tag = 4, .address = 0x3f8, .length_dw = 1, .first_be = 1}));
  g.push_back(golden(
      "CfgRd0 of an extended register", "04000001 0000090f 03010104", {},
      {.type = kCfgRead0, .tag = 9, .length_dw = 1, .first_be = 0xf, .target = 0x0301, .config_register = 0x104}));
  g.push_back(golden(
      "CfgWr0", "44000001 00000a0c 03000ffc", hex("00001234"),
      {.type = kCfgWrite0, .tag = 10, .length_dw = 1, .first_be = 0xc, .target = 0x0300, .config_register = 0xffc}));
  g.push_back(golden("CfgRd1", "05000001 00000b01 ff1f0000", {},
                     {.type = kCfgRead1, .tag = 11, .length_dw = 1, .first_be = 1, .target = 0xff1f}));
  g.push_back(golden(
      "CfgWr1", "45000001 00000c0f 05000010", hex("ffffffff"),
      {.type = kCfgWrite1, .tag = 12, .length_dw = 1, .first_be = 0xf, .target = 0x0500, .config_register = 0x10}));
  g.push_back(golden("Msg Assert_INTA", "34000000 01000020 00000000 00000000", {},
                     {.type = kMessage, .requester = 0x0100, .message_code = 0x20, .message_routing = 4}));
  g.push_back(golden("Msg ERR_FATAL", "30000000 01000033 00000000 00000000", {},
                     {.type = kMessage, .requester = 0x0100, .message_code = 0x33}));
  g.push_back(golden("Msg vendor defined, by id", "32000000 0100057f 020010de 11223344", {},
                     {.type = kMessage,
                      .requester = 0x0100,
                      .tag = 5,
                      .message_code = 0x7f,
                      .message_routing = 2,
                      .message_data = 0x020010de11223344}));
  g.push_back(golden("MsgD Set_Slot_Power_Limit", "74000001 00000050 00000000 00000000", hex("4b000000"),
                     {.type = kMessageData, .length_dw = 1, .message_code = 0x50, .message_routing = 4}));
  g.push_back(golden("Cpl UR", "0a000000 02002004 01001200", {},
                     {.type = kCompletion,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .completer = 0x0200,
                      .status = CplStatus::kUnsupportedRequest,
                      .byte_count = 4}));
  g.push_back(golden("Cpl CRS", "0a000000 02004004 01001200", {},
                     {.type = kCompletion,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .completer = 0x0200,
                      .status = CplStatus::kConfigRetry,
                      .byte_count = 4}));
  g.push_back(golden("Cpl CA, Byte Count 4096 is written as 0", "0a000000 02008000 01001240", {},
                     {.type = kCompletion,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .completer = 0x0200,
                      .status = CplStatus::kCompleterAbort,
                      .byte_count = 4096,
                      .lower_address = 0x40}));
  g.push_back(golden("Cpl SC", "0a000000 02000004 01001200", {},
                     {.type = kCompletion, .requester = 0x0100, .tag = 0x12, .completer = 0x0200, .byte_count = 4}));
  g.push_back(golden("CplD one DW", "4a000001 02000004 01001204", hex("deadbeef"),
                     {.type = kCompletionData,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .length_dw = 1,
                      .completer = 0x0200,
                      .byte_count = 4,
                      .lower_address = 4}));
  g.push_back(golden("CplD 1024 DW", "4a000000 02000000 01001200", counting_bytes(4096),
                     {.type = kCompletionData,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .length_dw = 1024,
                      .completer = 0x0200,
                      .byte_count = 4096}));
  g.push_back(golden("CplD a first piece that ends at the boundary", "4a000002 0200007b 0100127a", counting_bytes(8),
                     {.type = kCompletionData,
                      .requester = 0x0100,
                      .tag = 0x12,
                      .length_dw = 2,
                      .completer = 0x0200,
                      .byte_count = 123,
                      .lower_address = 0x7a}));
  g.push_back(golden("FetchAdd of 4 bytes", "4c000001 01000100 00000104", hex("01000000"),
                     {.type = kFetchAdd, .requester = 0x0100, .tag = 1, .address = 0x104, .length_dw = 1}));
  g.push_back(golden("Swap of 8 bytes, 64-bit", "6d000002 01000200 0000000a 00000008", counting_bytes(8),
                     {.type = kSwap, .requester = 0x0100, .tag = 2, .address = 0xa00000008, .length_dw = 2}));
  g.push_back(golden("CAS of 16 bytes", "4e000008 01000300 00000010", counting_bytes(32),
                     {.type = kCompareSwap, .requester = 0x0100, .tag = 3, .address = 0x10, .length_dw = 8}));
  return g;
}

unsigned pick(std::mt19937_64& random, unsigned from, unsigned to) {
  return std::uniform_int_distribution<unsigned>(from, to)(random);
}

uint64_t random_address(std::mt19937_64& random, uint64_t alignment, uint64_t room) {
  uint64_t address = pick(random, 0, 1) != 0 ? random() : random() & 0xffffffff;
  const uint64_t in_page = random() % (kPageBoundary - room + 1);
  address = (address & ~(kPageBoundary - 1)) + in_page;
  return address & ~(alignment - 1);
}

}  // namespace

const std::vector<Golden>& goldens() {
  static const std::vector<Golden> all = make_goldens();
  return all;
}

Tlp random_tlp(std::mt19937_64& random) {
  Tlp t;
  t.type = static_cast<TlpType>(pick(random, 0, static_cast<unsigned>(TlpType::kCompareSwap)));
  t.requester = static_cast<uint16_t>(random());
  t.tag = random() & 0x3ff;
  const auto common = [&] {
    t.traffic_class = random() & 7;
    t.attributes = random() & 7;
  };
  switch (t.type) {
    case TlpType::kMemRead:
    case TlpType::kMemWrite: {
      common();
      t.length_dw = static_cast<uint16_t>(pick(random, 0, 3) == 0 ? pick(random, 1, 1024) : pick(random, 1, 4));
      t.address = random_address(random, 4, t.length_dw * 4);
      if (t.length_dw == 1) {
        t.first_be = random() & 0xf;
      } else if (t.length_dw == 2 && t.address % 8 == 0) {
        t.first_be = static_cast<uint8_t>(pick(random, 1, 15));
        t.last_be = static_cast<uint8_t>(pick(random, 1, 15));
      } else {
        t.first_be = 0xf << pick(random, 0, 3) & 0xf;
        t.last_be = static_cast<uint8_t>(0xf >> pick(random, 0, 3));
      }
      break;
    }
    case TlpType::kIoRead:
    case TlpType::kIoWrite:
      t.address = random() & 0xfffffffc;
      t.length_dw = 1;
      t.first_be = random() & 0xf;
      break;
    case TlpType::kCfgRead0:
    case TlpType::kCfgRead1:
    case TlpType::kCfgWrite0:
    case TlpType::kCfgWrite1:
      t.target = static_cast<uint16_t>(random());
      t.config_register = random() & 0xffc;
      t.length_dw = 1;
      t.first_be = random() & 0xf;
      break;
    case TlpType::kMessage:
    case TlpType::kMessageData: {
      common();
      constexpr uint8_t kVendorRoutings[] = {0, 2, 3, 4};
      t.message_code = pick(random, 0, 1) != 0 ? 0x7e : 0x7f;
      t.message_routing = kVendorRoutings[pick(random, 0, 3)];
      t.message_data = random();
      if (t.type == TlpType::kMessageData) t.length_dw = static_cast<uint16_t>(pick(random, 1, 1024));
      break;
    }
    case TlpType::kCompletion: {
      common();
      constexpr CplStatus kStatuses[] = {CplStatus::kSuccess, CplStatus::kUnsupportedRequest, CplStatus::kConfigRetry,
                                         CplStatus::kCompleterAbort};
      t.completer = static_cast<uint16_t>(random());
      t.status = kStatuses[pick(random, 0, 3)];
      t.byte_count = static_cast<uint16_t>(pick(random, 1, 4096));
      t.lower_address = random() & 0x7f;
      break;
    }
    case TlpType::kCompletionData: {
      common();
      t.completer = static_cast<uint16_t>(random());
      t.lower_address = random() & 0x7f;
      t.byte_count = static_cast<uint16_t>(pick(random, 1, 4096u - t.lower_address % 4u));
      t.length_dw = static_cast<uint16_t>((t.lower_address % 4u + t.byte_count + 3) / 4);
      // Sometimes a piece that is not the last: up to a multiple of 64.
      const unsigned to_boundary = 16 - t.lower_address / 4u % 16;
      if (to_boundary < t.length_dw && pick(random, 0, 1) != 0) t.length_dw = static_cast<uint16_t>(to_boundary);
      break;
    }
    case TlpType::kFetchAdd:
    case TlpType::kSwap:
    case TlpType::kCompareSwap: {
      common();
      const bool cas = t.type == TlpType::kCompareSwap;
      const unsigned operand = 4u << pick(random, 0, cas ? 2 : 1);
      t.length_dw = static_cast<uint16_t>(operand / 4 * (cas ? 2 : 1));
      t.address = random_address(random, operand, operand);
      break;
    }
  }
  if (has_data(t.type)) {
    t.poisoned = pick(random, 0, 7) == 0;
    t.payload.resize(t.length_dw * size_t{4});
    for (std::byte& b : t.payload) b = static_cast<std::byte>(random());
  }
  return t;
}

uint64_t test_seed() {
  const char* given = std::getenv("DXPU_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::stoull(given, nullptr, 0) : std::random_device()();
  std::cout << "DXPU_TEST_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace dxpu::pcie
