// Wire form against vectors written by hand; what is cut short or too long is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/pcie/tlp_samples.h"

namespace dxpu::pcie {
namespace {

TEST(TlpGolden, EveryTypeHasAVector) {
  for (unsigned type = 0; type <= static_cast<unsigned>(TlpType::kCompareSwap); ++type) {
    const auto has = [type](const Golden& g) { return g.tlp.type == static_cast<TlpType>(type); };
    EXPECT_TRUE(std::any_of(goldens().begin(), goldens().end(), has)) << name_of(static_cast<TlpType>(type));
  }
}

TEST(TlpGolden, EncodesToTheVector) {
  for (const Golden& g : goldens()) {
    SCOPED_TRACE(g.name);
    std::vector<std::byte> out = from_hex("77");  // encode appends
    const absl::Status status = encode(g.tlp, out);
    ASSERT_TRUE(status.ok()) << status;
    std::vector<std::byte> expected = from_hex("77");
    expected.insert(expected.end(), g.wire.begin(), g.wire.end());
    EXPECT_EQ(out, expected);
    std::array<std::byte, kMaxHeaderBytes> header{};
    const auto header_bytes = encode_header(g.tlp, header);
    ASSERT_TRUE(header_bytes.ok()) << header_bytes.status();
    ASSERT_EQ(*header_bytes, g.wire.size() - g.tlp.payload.size());
    EXPECT_TRUE(std::equal(header.begin(), header.begin() + *header_bytes, g.wire.begin()));
  }
}

TEST(TlpGolden, DecodesFromTheVector) {
  for (const Golden& g : goldens()) {
    SCOPED_TRACE(g.name);
    const auto tlp = decode(g.wire);
    ASSERT_TRUE(tlp.ok()) << tlp.status();
    EXPECT_EQ(*tlp, g.tlp) << to_string(*tlp) << "\n" << to_string(g.tlp);
    size_t header_bytes = 0;
    auto header = decode_header(g.wire, &header_bytes);
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header_bytes, g.wire.size() - g.tlp.payload.size());
    EXPECT_TRUE(header->payload.empty());
    header->payload = g.tlp.payload;
    EXPECT_EQ(*header, g.tlp);
  }
}

TEST(TlpGolden, TruncatedAtEveryByteIsRefused) {
  for (const Golden& g : goldens()) {
    for (size_t size = 0; size < g.wire.size(); ++size) {
      // A copy of its own, so that a read past the end is seen.
      const std::vector<std::byte> cut(g.wire.begin(), g.wire.begin() + size);
      EXPECT_FALSE(decode(cut).ok()) << g.name << " cut at " << size;
      if (size < g.wire.size() - g.tlp.payload.size()) {
        size_t header_bytes = 0;
        EXPECT_FALSE(decode_header(cut, &header_bytes).ok()) << g.name << " header cut at " << size;
      }
    }
  }
}

TEST(TlpGolden, AnythingBehindTheEndIsRefused) {
  for (const Golden& g : goldens()) {
    std::vector<std::byte> longer = g.wire;
    for (int extra = 1; extra <= 8; ++extra) {
      longer.push_back(std::byte{0});
      EXPECT_FALSE(decode(longer).ok()) << g.name << " with " << extra << " bytes more";
    }
  }
}

TEST(TlpGolden, LengthOffByOneIsRefusedOrMeansWhatItSays) {
  for (const Golden& g : goldens()) {
    for (const int step : {-1, 1}) {
      SCOPED_TRACE(g.name + (step < 0 ? " Length - 1" : " Length + 1"));
      std::vector<std::byte> wire = g.wire;
      const unsigned length = (std::to_integer<unsigned>(wire[2]) & 3) << 8 | std::to_integer<unsigned>(wire[3]);
      const unsigned changed = (length + step) & 0x3ff;
      wire[2] = (wire[2] & std::byte{0xfc}) | static_cast<std::byte>(changed >> 8);
      wire[3] = static_cast<std::byte>(changed);
      const auto tlp = decode(wire);
      if (g.tlp.type != TlpType::kMemRead) {
        EXPECT_FALSE(tlp.ok()) << to_string(*tlp);
      } else if (tlp.ok()) {
        EXPECT_EQ(tlp->length_dw, changed);  // only a read says nothing else about its length
      }
    }
  }
}

TEST(TlpGolden, Classes) {
  using enum TlpType;
  for (const TlpType type : {kMemWrite, kMessage, kMessageData})
    EXPECT_EQ(class_of(type), TlpClass::kPosted) << name_of(type);
  for (const TlpType type :
       {kMemRead, kIoRead, kIoWrite, kCfgRead0, kCfgWrite0, kCfgRead1, kCfgWrite1, kFetchAdd, kSwap, kCompareSwap}) {
    EXPECT_EQ(class_of(type), TlpClass::kNonPosted) << name_of(type);
  }
  for (const TlpType type : {kCompletion, kCompletionData})
    EXPECT_EQ(class_of(type), TlpClass::kCompletion) << name_of(type);
  for (const TlpType type :
       {kMemWrite, kIoWrite, kCfgWrite0, kCfgWrite1, kMessageData, kCompletionData, kFetchAdd, kSwap, kCompareSwap}) {
    EXPECT_TRUE(has_data(type)) << name_of(type);
  }
  for (const TlpType type : {kMemRead, kIoRead, kCfgRead0, kCfgRead1, kMessage, kCompletion})
    EXPECT_FALSE(has_data(type)) << name_of(type);
}

TEST(TlpGolden, Text) {
  const auto text = [](const std::string& name) {
    for (const Golden& g : goldens()) {
      if (g.name == name) return to_string(g.tlp);
    }
    return std::string("no golden ") + name;
  };
  EXPECT_EQ(text("MRd32"), "MRd32 req 01:00.0 tag 0x12 addr 0x1000 len 16B fbe f lbe f");
  EXPECT_EQ(text("MWr32 with every common field"),
            "MWr32 req 00:02.0 tag 0x3ab addr 0x40 len 4B fbe f lbe 0 tc 5 attr 7 poisoned");
  EXPECT_EQ(text("CfgRd0 of an extended register"),
            "CfgRd0 req 00:00.0 tag 0x9 target 03:00.1 reg 0x104 len 4B fbe f lbe 0");
  EXPECT_EQ(text("Cpl UR"), "Cpl req 01:00.0 tag 0x12 cpl 02:00.0 UR bc 4 lower 0x00");
  EXPECT_EQ(text("CplD one DW"), "CplD req 01:00.0 tag 0x12 cpl 02:00.0 SC bc 4 lower 0x04 len 4B");
  EXPECT_EQ(text("Swap of 8 bytes, 64-bit"), "Swap64 req 01:00.0 tag 0x2 addr 0xa00000008 len 8B");
  EXPECT_EQ(text("Msg Assert_INTA"), "Msg req 01:00.0 tag 0x0 code 0x20 routing 4 data 0x0000000000000000");
  Tlp bad;
  bad.type = static_cast<TlpType>(200);
  EXPECT_EQ(to_string(bad), "unknown TLP type 200");
}

}  // namespace
}  // namespace dxpu::pcie
