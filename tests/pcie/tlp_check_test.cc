// Each rule of check() broken by itself, and each reserved encoding on the wire.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/pcie/tlp_samples.h"

namespace dxpu::pcie {
namespace {

using ::testing::HasSubstr;

const Tlp& sample(const std::string& name) {
  for (const Golden& g : goldens()) {
    if (g.name == name) return g.tlp;
  }
  ADD_FAILURE() << "no golden " << name;
  return goldens().front().tlp;
}

struct Break {
  const char* golden;
  const char* names;  // what the message must name
  std::function<void(Tlp&)> change;
};

// Sets the length and the payload with it, so that only the length itself is at fault.
void set_length(Tlp& t, uint16_t length_dw) {
  t.length_dw = length_dw;
  if (has_data(t.type)) t.payload.resize(length_dw * size_t{4});
}

const std::vector<Break>& breaks() {
  static const std::vector<Break> all = {
      {"MRd32", "type", [](Tlp& t) { t.type = static_cast<TlpType>(15); }},
      {"MRd32", "traffic_class", [](Tlp& t) { t.traffic_class = 8; }},
      {"MRd32", "attributes", [](Tlp& t) { t.attributes = 8; }},
      {"MRd32", "tag", [](Tlp& t) { t.tag = 1024; }},
      {"MRd32", "poisoned", [](Tlp& t) { t.poisoned = true; }},
      {"Cpl UR", "poisoned", [](Tlp& t) { t.poisoned = true; }},
      // Lengths.
      {"MRd32", "length_dw", [](Tlp& t) { t.length_dw = 0; }},
      {"MRd64 of 1024 DW is written as Length 0", "length_dw", [](Tlp& t) { t.length_dw = 1025; }},
      {"MWr32 of three bytes", "length_dw", [](Tlp& t) { set_length(t, 0); }},
      {"MWr32 of 1024 DW", "length_dw", [](Tlp& t) { set_length(t, 1025); }},
      {"MWr32 of three bytes", "payload", [](Tlp& t) { t.payload.pop_back(); }},
      {"MWr32 of three bytes", "payload", [](Tlp& t) { t.payload.push_back({}); }},
      {"MWr32 of three bytes", "payload", [](Tlp& t) { t.payload.clear(); }},
      {"MRd32", "payload", [](Tlp& t) { t.payload.resize(16); }},
      {"Cpl UR", "payload", [](Tlp& t) { t.payload.resize(4); }},
      // 4 KiB.
      {"MRd32", "4 KiB", [](Tlp& t) { t.address = 0x1ff4; }},
      {"MWr32 of 1024 DW", "4 KiB", [](Tlp& t) { t.address += 4; }},
      {"MRd64 of 1024 DW is written as Length 0", "4 KiB", [](Tlp& t) { t.address += 4092; }},
      // Byte enables.
      {"MRd32", "first_be", [](Tlp& t) { t.first_be = 0x1f; }},
      {"MRd32", "last_be", [](Tlp& t) { t.last_be = 0x1f; }},
      {"MRd32", "first_be", [](Tlp& t) { t.first_be = 0; }},
      {"MRd32", "last_be", [](Tlp& t) { t.last_be = 0; }},
      {"MRd32 of nothing", "last_be", [](Tlp& t) { t.last_be = 1; }},
      {"MWr32 of three bytes", "last_be", [](Tlp& t) { t.last_be = 0xf; }},
      {"MRd32", "first_be", [](Tlp& t) { t.first_be = 0x5; }},
      {"MRd32", "first_be", [](Tlp& t) { t.first_be = 0x7; }},
      {"MRd32", "last_be", [](Tlp& t) { t.last_be = 0xe; }},
      {"MRd32", "last_be", [](Tlp& t) { t.last_be = 0xb; }},
      {"MRd32 with holes inside a quad word", "first_be", [](Tlp& t) { t.address += 4; }},
      {"MRd32 with holes inside a quad word", "first_be", [](Tlp& t) { t.length_dw = 3; }},
      {"MRd32 with holes inside a quad word", "first_be", [](Tlp& t) { t.first_be = 0; }},
      {"MRd32 with holes inside a quad word", "last_be", [](Tlp& t) { t.last_be = 0; }},
      // Addresses.
      {"MRd32", "address", [](Tlp& t) { t.address = 0x1001; }},
      {"MRd32", "4 GiB", [](Tlp& t) { t.force_64bit_header = true; }},
      {"FetchAdd of 4 bytes", "4 GiB", [](Tlp& t) { t.force_64bit_header = true; }},
      {"FetchAdd of 4 bytes", "address", [](Tlp& t) { t.address += 2; }},
      {"Swap of 8 bytes, 64-bit", "aligned", [](Tlp& t) { t.address += 4; }},
      {"CAS of 16 bytes", "aligned", [](Tlp& t) { t.address += 8; }},
      // Atomics: lengths and reserved byte enables.
      {"FetchAdd of 4 bytes", "length_dw", [](Tlp& t) { set_length(t, 0); }},
      {"FetchAdd of 4 bytes", "length_dw", [](Tlp& t) { set_length(t, 3); }},
      {"FetchAdd of 4 bytes", "length_dw", [](Tlp& t) { set_length(t, 4); }},
      {"Swap of 8 bytes, 64-bit", "length_dw", [](Tlp& t) { set_length(t, 4); }},
      {"CAS of 16 bytes", "length_dw", [](Tlp& t) { set_length(t, 1); }},
      {"CAS of 16 bytes", "length_dw", [](Tlp& t) { set_length(t, 6); }},
      {"CAS of 16 bytes", "length_dw", [](Tlp& t) { set_length(t, 16); }},
      {"FetchAdd of 4 bytes", "first_be", [](Tlp& t) { t.first_be = 0xf; }},
      // IO and configuration.
      {"IORd", "length_dw", [](Tlp& t) { t.length_dw = 2; }},
      {"IOWr", "length_dw", [](Tlp& t) { set_length(t, 2); }},
      {"IORd", "traffic_class", [](Tlp& t) { t.traffic_class = 1; }},
      {"IORd", "attributes", [](Tlp& t) { t.attributes = 1; }},
      {"IORd", "last_be", [](Tlp& t) { t.last_be = 1; }},
      {"IORd", "address", [](Tlp& t) { t.address = 0x100000000; }},
      {"IORd", "address", [](Tlp& t) { t.address = 0x3f9; }},
      {"IORd", "address", [](Tlp& t) { t.force_64bit_header = true; }},
      {"CfgRd0 of an extended register", "length_dw", [](Tlp& t) { t.length_dw = 2; }},
      {"CfgWr0", "length_dw", [](Tlp& t) { set_length(t, 2); }},
      {"CfgWr1", "last_be", [](Tlp& t) { t.last_be = 0xf; }},
      {"CfgRd1", "traffic_class", [](Tlp& t) { t.traffic_class = 1; }},
      {"CfgRd1", "attributes", [](Tlp& t) { t.attributes = 4; }},
      {"CfgRd1", "config_register", [](Tlp& t) { t.config_register = 2; }},
      {"CfgRd1", "config_register", [](Tlp& t) { t.config_register = 4096; }},
      // Messages.
      {"Msg Assert_INTA", "message_routing", [](Tlp& t) { t.message_routing = 6; }},
      {"Msg vendor defined, by id", "message_routing", [](Tlp& t) { t.message_routing = 7; }},
      {"Msg vendor defined, by id", "message_routing", [](Tlp& t) { t.message_routing = 5; }},
      {"Msg Assert_INTA", "message_routing", [](Tlp& t) { t.message_routing = 0; }},
      {"Msg Assert_INTA", "traffic_class", [](Tlp& t) { t.traffic_class = 1; }},
      {"Msg Assert_INTA", "length_dw", [](Tlp& t) { t.length_dw = 1; }},
      {"Msg Assert_INTA", "carries no data", [](Tlp& t) { t.type = TlpType::kMessageData, set_length(t, 1); }},
      {"MsgD Set_Slot_Power_Limit", "length_dw", [](Tlp& t) { set_length(t, 0); }},
      {"MsgD Set_Slot_Power_Limit", "length_dw", [](Tlp& t) { set_length(t, 2); }},
      {"MsgD Set_Slot_Power_Limit", "carries data",
       [](Tlp& t) { t.type = TlpType::kMessage, t.length_dw = 0, t.payload.clear(); }},
      {"MsgD Set_Slot_Power_Limit", "length_dw", [](Tlp& t) { t.message_code = 0x7e, set_length(t, 1025); }},
      {"MsgD Set_Slot_Power_Limit", "length_dw", [](Tlp& t) { t.message_code = 0x01, t.message_routing = 2; }},
      // Completions.
      {"Cpl UR", "status", [](Tlp& t) { t.status = static_cast<CplStatus>(3); }},
      {"Cpl UR", "status", [](Tlp& t) { t.status = static_cast<CplStatus>(5); }},
      {"Cpl UR", "status", [](Tlp& t) { t.status = static_cast<CplStatus>(8); }},
      {"CplD one DW", "status", [](Tlp& t) { t.status = CplStatus::kUnsupportedRequest; }},
      {"Cpl UR", "byte_count_modified", [](Tlp& t) { t.byte_count_modified = true; }},
      {"Cpl UR", "byte_count", [](Tlp& t) { t.byte_count = 0; }},
      {"Cpl UR", "byte_count", [](Tlp& t) { t.byte_count = 4097; }},
      {"Cpl UR", "lower_address", [](Tlp& t) { t.lower_address = 0x80; }},
      {"Cpl UR", "length_dw", [](Tlp& t) { t.length_dw = 1; }},
      {"CplD one DW", "length_dw", [](Tlp& t) { set_length(t, 0); }},
      {"CplD one DW", "length_dw", [](Tlp& t) { set_length(t, 2); }},
      {"CplD one DW", "Read Completion Boundary", [](Tlp& t) { t.byte_count = 5; }},
      {"CplD a first piece that ends at the boundary", "Read Completion Boundary", [](Tlp& t) { set_length(t, 1); }},
      {"CplD 1024 DW", "Read Completion Boundary", [](Tlp& t) { set_length(t, 1023); }},
      {"CplD 1024 DW", "length_dw", [](Tlp& t) { set_length(t, 1025); }},
      // Fields of other types.
      {"Cpl UR", "address", [](Tlp& t) { t.address = 4; }},
      {"Cpl UR", "first_be", [](Tlp& t) { t.first_be = 1; }},
      {"CfgRd1", "address", [](Tlp& t) { t.address = 4; }},
      {"CfgRd1", "address", [](Tlp& t) { t.force_64bit_header = true; }},
      {"Msg Assert_INTA", "last_be", [](Tlp& t) { t.last_be = 1; }},
      {"MRd32", "target", [](Tlp& t) { t.target = 1; }},
      {"MRd32", "config_register", [](Tlp& t) { t.config_register = 4; }},
      {"MRd32", "message_code", [](Tlp& t) { t.message_code = 1; }},
      {"MRd32", "message_routing", [](Tlp& t) { t.message_routing = 1; }},
      {"MRd32", "message_data", [](Tlp& t) { t.message_data = 1; }},
      {"MRd32", "completer", [](Tlp& t) { t.completer = 1; }},
      {"MRd32", "status", [](Tlp& t) { t.status = CplStatus::kCompleterAbort; }},
      {"MRd32", "byte_count", [](Tlp& t) { t.byte_count = 16; }},
      {"MRd32", "byte_count_modified", [](Tlp& t) { t.byte_count_modified = true; }},
      {"MRd32", "lower_address", [](Tlp& t) { t.lower_address = 1; }},
  };
  return all;
}

TEST(TlpCheck, GoldensPass) {
  for (const Golden& g : goldens()) EXPECT_TRUE(check(g.tlp).ok()) << g.name << ": " << check(g.tlp);
}

TEST(TlpCheck, EachRuleBrokenIsNamedAndNothingIsEncoded) {
  for (size_t i = 0; i < breaks().size(); ++i) {
    const Break& b = breaks()[i];
    SCOPED_TRACE("break " + std::to_string(i) + ": " + b.golden + ", " + b.names);
    Tlp tlp = sample(b.golden);
    b.change(tlp);
    const absl::Status status = check(tlp);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << to_string(tlp);
    EXPECT_THAT(std::string(status.message()), HasSubstr(b.names));
    std::vector<std::byte> out = from_hex("01");
    EXPECT_EQ(encode(tlp, out), status);
    EXPECT_EQ(out, from_hex("01"));
    // Everything but the payload is a matter of the header.
    std::array<std::byte, kMaxHeaderBytes> header{};
    EXPECT_EQ(encode_header(tlp, header).ok(), std::string(b.names) == "payload");
    EXPECT_FALSE(to_string(tlp).empty());
  }
}

TEST(TlpCheck, LegalEdges) {
  struct Edge {
    const char* golden;
    std::function<void(Tlp&)> change;
  };
  const std::vector<Edge> edges = {
      {"MRd32", [](Tlp& t) { t.address = 0x1ff0; }},                     // ends at the page's end
      {"MWr32 of three bytes", [](Tlp& t) { t.first_be = 0; }},          // a write of nothing
      {"MWr32 of three bytes", [](Tlp& t) { t.first_be = 0x9; }},        // holes in one DW
      {"MWr64 unaligned at both ends", [](Tlp& t) { t.address -= 4; }},  // not quad word aligned, but one run
      {"MRd32", [](Tlp& t) { t.first_be = 8, t.last_be = 1; }},          // shortest run over 4 DW
      {"IORd", [](Tlp& t) { t.first_be = 0; }},
      {"CfgRd1", [](Tlp& t) { t.first_be = 0xa; }},
      {"FetchAdd of 4 bytes", [](Tlp& t) { t.address = 0xffc; }},
      {"CAS of 16 bytes", [](Tlp& t) { t.address = 0xff0; }},  // 32 bytes of operands, 16 touched
      {"CAS of 16 bytes", [](Tlp& t) { set_length(t, 2), t.address = 0x14; }},
      {"Msg ERR_FATAL",
       [](Tlp& t) { t.message_code = 0xee, t.message_routing = 5; }},  // unknown codes are the receiver's affair
      {"MsgD Set_Slot_Power_Limit", [](Tlp& t) { t.message_code = 0x7e, set_length(t, 1024); }},
      {"Cpl UR", [](Tlp& t) { t.byte_count = 4096, t.lower_address = 0x7f; }},
      {"CplD one DW", [](Tlp& t) { t.byte_count = 1, t.lower_address = 7; }},
      {"CplD a first piece that ends at the boundary", [](Tlp& t) { t.byte_count = 4095; }},
  };
  for (size_t i = 0; i < edges.size(); ++i) {
    Tlp tlp = sample(edges[i].golden);
    edges[i].change(tlp);
    EXPECT_TRUE(check(tlp).ok()) << "edge " << i << " " << to_string(tlp) << ": " << check(tlp);
  }
}

TEST(TlpCheck, ByteEnableRulesAgreeWithTheirDefinition) {
  // All 256 pairs at every length that matters, against a count of enabled bytes.
  for (const uint64_t address : {0x1000u, 0x1004u}) {
    for (const uint16_t length : {1, 2, 3, 5}) {
      for (unsigned pair = 0; pair < 256; ++pair) {
        Tlp tlp = make_mem_read(address, length * 4u, 0, 0);
        tlp.first_be = pair & 0xf;
        tlp.last_be = pair >> 4;
        std::string map;  // one character a byte
        for (int i = 0; i < 4; ++i) map += (tlp.first_be >> i & 1) ? '1' : '0';
        for (int i = 1; i < length - 1; ++i) map += "1111";
        if (length > 1) {
          for (int i = 0; i < 4; ++i) map += (tlp.last_be >> i & 1) ? '1' : '0';
        }
        const size_t first = map.find('1'), last = map.rfind('1');
        const bool one_run =
            first == std::string::npos || map.substr(first, last - first + 1).find('0') == std::string::npos;
        bool legal = true;
        if (length == 1) {
          legal = tlp.last_be == 0;
        } else {
          legal = tlp.first_be != 0 && tlp.last_be != 0 && (one_run || (length == 2 && address % 8 == 0));
        }
        EXPECT_EQ(check(tlp).ok(), legal) << to_string(tlp);
        if (!legal) continue;
        EXPECT_EQ(contiguous(tlp), one_run) << to_string(tlp);
        const ByteRange range = range_of(tlp);
        EXPECT_EQ(range.bytes, first == std::string::npos ? 0 : last - first + 1) << to_string(tlp);
        EXPECT_EQ(range.address, address + (first == std::string::npos ? 0 : first)) << to_string(tlp);
      }
    }
  }
}

struct WireBreak {
  const char* what;
  const char* names;
  std::string wire;
};

TEST(TlpCheck, ReservedEncodingsOnTheWire) {
  const std::vector<WireBreak> wires = {
      {"Fmt 100, a prefix", "prefix", "80000004 010012ff 00001000"},
      {"end-to-end prefix", "prefix", "90000004 010012ff 00001000"},
      {"Fmt 101", "Fmt 5", "a0000004 010012ff 00001000"},
      {"Fmt 111", "Fmt 7", "e0000004 010012ff 00001000"},
      {"MRdLk", "reserved or not supported", "01000004 010012ff 00001000"},
      {"CplLk", "reserved or not supported", "0b000000 02002004 01001200"},
      {"CplDLk", "reserved or not supported", "4b000001 02000004 01001204 deadbeef"},
      {"Type 00011", "reserved or not supported", "03000001 0000000f 00001000"},
      {"DMWr (deferrable memory write)", "reserved or not supported", "5b000001 0000000f 00001000 00000000"},
      {"Type 11111", "reserved or not supported", "1f000001 0000000f 00001000"},
      {"FetchAdd without data", "reserved or not supported", "0c000001 01000100 00000104"},
      {"IORd with a 4 DW header", "header of 4 DW", "22000001 00000303 00000000 000003f8"},
      {"CfgRd0 with a 4 DW header", "header of 4 DW", "24000001 0000090f 03010104 00000000"},
      {"CplD with a 4 DW header", "header of 4 DW", "6a000001 02000004 01001204 00000000 deadbeef"},
      {"Msg with a 3 DW header", "header of 3 DW", "14000000 01000020 00000000"},
      {"reserved routing", "message_routing", "37000000 0100007f 00000000 00000000"},
      {"LN", "LN", "00020004 010012ff 00001000"},
      {"TH", "TH", "00010004 010012ff 00001000"},
      {"TD, no digest there", "TD", "00008004 010012ff 00001000"},
      {"TD, digest there", "TD", "00008004 010012ff 00001000 12345678"},
      {"AT translated", "AT", "00000804 010012ff 00001000"},
      {"AT translation request", "AT", "00000404 010012ff 00001000"},
      {"PH bits", "PH", "00000004 010012ff 00001001"},
      {"low bits of a 64-bit address", "PH", "20000001 0008050f 00000001 00000002"},
      {"configuration, reserved nibble", "register", "04000001 0000090f 03011104"},
      {"configuration, low bits", "register", "04000001 0000090f 03010106"},
      {"bit above Lower Address", "Lower Address", "4a000001 02000004 01001284 deadbeef"},
      {"Cpl with Length", "Length", "0a000001 02002004 01001200"},
      {"Msg with Length", "Length", "34000001 01000020 00000000 00000000"},
      {"BCM", "byte_count_modified", "4a000001 02001004 01001204 deadbeef"},
      {"reserved status", "status", "0a000000 02006004 01001200"},
      {"CplD with UR", "status", "4a000001 02002004 01001204 deadbeef"},
      {"EP on a read", "poisoned", "00004004 010012ff 00001000"},
      {"atomic with byte enables", "first_be", "4c000001 0100010f 00000104 01000000"},
      {"read across 4 KiB", "4 KiB", "00000004 010012ff 00001ff4"},
      {"read of Length 0 across 4 KiB", "4 KiB", "00000000 010012ff 00001004"},
      {"IORd of 2 DW", "length_dw", "02000002 00000303 000003f8"},
      {"IORd of Length 0", "length_dw", "02000000 00000303 000003f8"},
  };
  for (const WireBreak& w : wires) {
    SCOPED_TRACE(w.what);
    const auto tlp = decode(from_hex(w.wire));
    ASSERT_FALSE(tlp.ok()) << to_string(*tlp);
    EXPECT_EQ(tlp.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(tlp.status().message()), HasSubstr(w.names));
  }
}

TEST(TlpCheck, ShortAddressInALongHeaderIsCarriedButFailsCheck) {
  const auto tlp = decode(from_hex("20000004 010012ff 00000000 00001000"));
  ASSERT_TRUE(tlp.ok()) << tlp.status();
  EXPECT_TRUE(tlp->force_64bit_header);
  EXPECT_EQ(tlp->address, 0x1000u);
  EXPECT_THAT(std::string(check(*tlp).message()), HasSubstr("4 GiB"));
  std::vector<std::byte> out;
  EXPECT_FALSE(encode(*tlp, out).ok());
}

TEST(TlpBuild, ByteEnablesOfEveryRange) {
  for (uint64_t skip = 0; skip < 4; ++skip) {
    for (uint32_t bytes = 1; bytes <= 4096 - skip; ++bytes) {
      const Tlp tlp = make_mem_read(0x7000 + skip, bytes, 3, 0x0108);
      ASSERT_TRUE(check(tlp).ok()) << to_string(tlp) << check(tlp);
      const ByteRange range = range_of(tlp);
      ASSERT_EQ(range.address, 0x7000 + skip);
      ASSERT_EQ(range.bytes, bytes);
      ASSERT_TRUE(contiguous(tlp));
      ASSERT_EQ(tlp.length_dw, (skip + bytes + 3) / 4);
    }
  }
  const Tlp nothing = make_mem_read(0x7002, 0, 3, 0x0108);
  EXPECT_TRUE(check(nothing).ok());
  EXPECT_EQ(nothing.length_dw, 1);
  EXPECT_EQ(nothing.first_be, 0);
  EXPECT_EQ(range_of(nothing).bytes, 0u);
  EXPECT_EQ(range_of(nothing).address, 0x7000u);
}

TEST(TlpBuild, TooLongOrCrossingIsLeftToCheck) {
  EXPECT_FALSE(check(make_mem_read(0x7001, 4096, 0, 0)).ok());
  EXPECT_FALSE(check(make_mem_read(0x7000, 4097, 0, 0)).ok());
  EXPECT_FALSE(check(make_mem_read(0x7000, UINT32_MAX, 0, 0)).ok());
  EXPECT_FALSE(check(make_mem_read(0x7ffc, 8, 0, 0)).ok());
  EXPECT_FALSE(check(make_mem_write(0x7000, counting_bytes(4100), 0)).ok());
}

TEST(TlpBuild, WritePutsEachByteAtItsAddress) {
  for (uint64_t skip = 0; skip < 4; ++skip) {
    for (const uint32_t bytes : {0u, 1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 63u, 64u, 4092u,
                                 4093u - static_cast<uint32_t>(skip), 4096u - static_cast<uint32_t>(skip)}) {
      SCOPED_TRACE(std::to_string(skip) + "+" + std::to_string(bytes));
      const std::vector<std::byte> data = counting_bytes(bytes, 1);
      const Tlp tlp = make_mem_write(0x200007000 + skip, data, 0x0108);
      ASSERT_TRUE(check(tlp).ok()) << check(tlp);
      const ByteRange range = range_of(tlp);
      ASSERT_EQ(range.bytes, bytes);
      std::vector<std::byte> expected(tlp.length_dw * 4u);
      std::copy(data.begin(), data.end(), expected.begin() + (bytes == 0 ? 0 : skip));
      EXPECT_EQ(tlp.payload, expected);
    }
  }
}

TEST(TlpBuild, RangeOfOtherTypes) {
  EXPECT_EQ(range_of(sample("CfgWr0")).address, 0xffeu);
  EXPECT_EQ(range_of(sample("CfgWr0")).bytes, 2u);
  EXPECT_EQ(range_of(sample("IORd")).bytes, 2u);
  EXPECT_EQ(range_of(sample("FetchAdd of 4 bytes")).bytes, 4u);
  EXPECT_EQ(range_of(sample("CAS of 16 bytes")).bytes, 16u);
  EXPECT_EQ(range_of(sample("CAS of 16 bytes")).address, 0x10u);
  EXPECT_EQ(range_of(sample("Cpl UR")).bytes, 0u);
  EXPECT_EQ(range_of(sample("Msg Assert_INTA")).bytes, 0u);
}

}  // namespace
}  // namespace dxpu::pcie
