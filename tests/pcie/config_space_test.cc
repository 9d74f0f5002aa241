// The configuration space as a driver meets it: values, masks, capabilities, VPD, resets.
#include "proxy/pcie/config_space.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tests/pcie/config_samples.h"

namespace dxpu::pcie {
namespace {

using ::testing::HasSubstr;

ConfigSpace built(const ConfigDescription& description = full_description()) {
  auto space = ConfigSpace::build(description);
  EXPECT_TRUE(space.ok()) << space.status();
  return *space;
}

uint32_t capability(const ConfigSpace& space, uint8_t id) {
  const auto at = space.find_capability(id);
  EXPECT_TRUE(at.has_value()) << "capability " << int{id};
  return at.value_or(0);
}

TEST(ConfigSpace, Identity) {
  const ConfigSpace c = built();
  EXPECT_EQ(c.read(0x00, 4), 0x47501d94u);
  EXPECT_EQ(c.read(0x04, 2), 0u);
  EXPECT_EQ(c.read(0x06, 2), 0x0010u);
  EXPECT_EQ(c.read(0x08, 4), 0x030200a1u);
  EXPECT_EQ(c.read(0x0e, 1), 0u);
  EXPECT_EQ(c.read(0x2c, 4), 0x20b010deu);
  EXPECT_EQ(c.read(0x3d, 1), 0u);  // no INTx
}

TEST(ConfigSpace, AccessesThatAreNoneAreAllOnesAndIgnored) {
  ConfigSpace c = built();
  const auto before = std::vector<std::byte>(c.bytes().begin(), c.bytes().end());
  const std::pair<uint32_t, unsigned> bad[] = {{1, 2},          {2, 4}, {3, 4}, {4096, 1}, {4096, 4}, {UINT32_MAX, 1},
                                               {0xfffffffc, 4}, {0, 0}, {0, 3}, {0, 8},    {4, 5}};
  for (const auto& [offset, size] : bad) {
    EXPECT_EQ(c.read(offset, size), size == 1 ? 0xffu : size == 2 ? 0xffffu : 0xffffffffu) << offset << " " << size;
    c.write(offset, size, 0xffffffff);
  }
  EXPECT_TRUE(std::equal(before.begin(), before.end(), c.bytes().begin()));
  EXPECT_EQ(c.read(4092, 4), 0u);
}

TEST(ConfigSpace, WriteMasksOfEveryRegister) {
  struct Register {
    const char* name;
    uint32_t offset;
    unsigned size;
    uint32_t writable;
    uint32_t clear_by_one;
  };
  const ConfigSpace c = built();
  const uint32_t pm = capability(c, 0x01), express = capability(c, 0x10), msix = capability(c, 0x11),
                 vpd = capability(c, 0x03);
  const uint32_t aer = c.find_extended_capability(1).value_or(0), dsn = c.find_extended_capability(3).value_or(0);
  ASSERT_NE(aer, 0u);
  ASSERT_NE(dsn, 0u);
  const std::vector<Register> registers = {
      {"command", 0x04, 2, 0x0146, 0},
      {"status", 0x06, 2, 0, 0xf900},
      {"cache line size", 0x0c, 1, 0xff, 0},
      {"BAR 0", 0x10, 4, 0xffff0000, 0},
      {"BAR 2", 0x18, 4, 0, 0},
      {"BAR 2 high", 0x1c, 4, 0xfffffffe, 0},
      {"BAR 4", 0x20, 4, 0xfff00000, 0},
      {"BAR 4 high", 0x24, 4, 0xffffffff, 0},
      {"interrupt line", 0x3c, 1, 0xff, 0},
      {"PM control", pm + 4, 2, 0x0003, 0},
      {"device control", express + 0x08, 2, 0x79ff, 0},
      {"device status", express + 0x0a, 2, 0, 0x000f},
      {"link control", express + 0x10, 2, 0x00cb, 0},
      {"device control 2", express + 0x28, 2, 0x005f, 0},
      {"link control 2", express + 0x30, 2, 0xffbf, 0},
      {"link status 2", express + 0x32, 2, 0, 0x0020},
      {"MSI-X control", msix + 2, 2, 0xc000, 0},
      {"VPD address", vpd + 2, 2, 0xffff, 0},
      {"VPD data", vpd + 4, 4, 0xffffffff, 0},
      {"AER uncorrectable status", aer + 0x04, 4, 0, 0x0057f010},
      {"AER uncorrectable mask", aer + 0x08, 4, 0x0057f010, 0},
      {"AER uncorrectable severity", aer + 0x0c, 4, 0x0057f010, 0},
      {"AER correctable status", aer + 0x10, 4, 0, 0x000071c1},
      {"AER correctable mask", aer + 0x14, 4, 0x000071c1, 0},
  };
  std::vector<std::byte> mask(4096), w1c(4096);
  for (const Register& r : registers) {
    for (unsigned i = 0; i < r.size; ++i) {
      mask[r.offset + i] = static_cast<std::byte>(r.writable >> 8 * i);
      w1c[r.offset + i] = static_cast<std::byte>(r.clear_by_one >> 8 * i);
    }
  }
  // Everything that is not named above is read-only.
  for (uint32_t i = 0; i < 4096; ++i) {
    EXPECT_EQ(c.write_mask()[i], mask[i]) << "byte " << i;
    EXPECT_EQ(c.w1c_mask()[i], w1c[i]) << "byte " << i;
  }
}

TEST(ConfigSpace, RandomWritesNeverTouchReadOnlyBits) {
  const uint64_t seed = std::random_device()();
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  ConfigSpace c = built();
  const ConfigSpace pristine = c;
  const uint32_t vpd = capability(c, 0x03);
  for (int i = 0; i < 100000; ++i) {
    c.write(static_cast<uint32_t>(random() % 4100), 1u << random() % 3, static_cast<uint32_t>(random()));
  }
  for (uint32_t i = 0; i < 4096; ++i) {
    if (i >= vpd + 2 && i < vpd + 8) continue;  // the mechanism itself changes these
    EXPECT_EQ((c.bytes()[i] ^ pristine.bytes()[i]) & ~c.write_mask()[i], std::byte{0}) << "byte " << i;
  }
}

TEST(ConfigSpace, EveryWidthWritesTheSameBytes) {
  ConfigSpace by_byte = built(), by_word = built(), by_dword = built();
  for (int i = 0; i < 4; ++i) by_byte.write(0x24 + i, 1, 0x11u * (i + 1));
  by_word.write(0x24, 2, 0x2211);
  by_word.write(0x26, 2, 0x4433);
  by_dword.write(0x24, 4, 0x44332211);
  for (const ConfigSpace* c : {&by_byte, &by_word, &by_dword}) {
    EXPECT_EQ(c->read(0x24, 4), 0x44332211u);
    EXPECT_EQ(c->read(0x26, 2), 0x4433u);
    EXPECT_EQ(c->read(0x27, 1), 0x44u);
  }
}

TEST(ConfigSpace, BarSizing) {
  ConfigSpace c = built();
  const auto size_by_probe = [&c](uint32_t offset, bool wide) {
    c.write(offset, 4, 0xffffffff);
    if (wide) c.write(offset + 4, 4, 0xffffffff);
    uint64_t mask = c.read(offset, 4) & ~0xfu;
    mask |= wide ? uint64_t{c.read(offset + 4, 4)} << 32 : 0xffffffff00000000;
    return ~mask + 1;
  };
  EXPECT_EQ(c.read(0x10, 4), 0x0u);
  EXPECT_EQ(c.read(0x18, 4), 0xcu);
  EXPECT_EQ(c.read(0x20, 4), 0x4u);
  EXPECT_EQ(size_by_probe(0x10, false), 64u << 10);
  EXPECT_EQ(size_by_probe(0x18, true), uint64_t{8} << 30);
  EXPECT_EQ(size_by_probe(0x20, true), 1u << 20);
  c.write(0x14, 4, 0xffffffff);
  EXPECT_EQ(c.read(0x14, 4), 0u);
  c.write(0x30, 4, 0xffffffff);  // no ROM BAR to be sized by mistake
  EXPECT_EQ(c.read(0x30, 4), 0u);

  const ConfigDescription d = full_description();
  for (unsigned i = 0; i < kBarCount; ++i) EXPECT_EQ(c.bar(i), d.bars[i]) << i;
  EXPECT_EQ(c.bar(6), BarDescription{});
  EXPECT_EQ(c.bar(UINT32_MAX), BarDescription{});
  EXPECT_EQ(c.bar_address(99), 0u);
}

TEST(ConfigSpace, EveryBarSizeThereIs) {
  for (unsigned bit = 7; bit < 64; ++bit) {
    ConfigDescription d = full_description();
    d.msix = {};
    d.bars = {};
    d.bars[4] = {.size = uint64_t{1} << bit, .is_64bit = true, .prefetchable = true};
    if (bit < 32) d.bars[0] = {.size = uint64_t{1} << bit};
    const ConfigSpace c = built(d);
    for (unsigned i = 0; i < kBarCount; ++i) EXPECT_EQ(c.bar(i), d.bars[i]) << "bit " << bit << " bar " << i;
    EXPECT_TRUE(ConfigSpace::from_image(c.bytes(), c.write_mask(), c.w1c_mask()).ok()) << "bit " << bit;
  }
}

TEST(ConfigSpace, AddressesAndCommand) {
  ConfigSpace c = built();
  EXPECT_FALSE(c.memory_enabled());
  EXPECT_FALSE(c.bus_master_enabled());
  c.write(0x10, 4, 0xe0012345);
  c.write(0x18, 4, 0xdeadbeef);
  c.write(0x1c, 4, 0x00000123);
  EXPECT_EQ(c.bar_address(0), 0xe0010000u);
  EXPECT_EQ(c.bar_address(2), 0x12200000000u);
  EXPECT_EQ(c.read(0x18, 4), 0xcu);
  EXPECT_EQ(c.bar_address(3), 0u);
  c.write(0x04, 2, 0x0002);
  EXPECT_TRUE(c.memory_enabled());
  EXPECT_FALSE(c.bus_master_enabled());
  c.write(0x04, 4, 0xffff0004);
  EXPECT_FALSE(c.memory_enabled());
  EXPECT_TRUE(c.bus_master_enabled());
  c.write(0x04, 2, 0xffff);
  EXPECT_EQ(c.read(0x04, 2), 0x0146u);
}

TEST(ConfigSpace, CapabilitiesAreFoundAndOnlyThoseAskedFor) {
  const ConfigSpace full = built();
  for (const uint8_t id : {0x01, 0x03, 0x10, 0x11}) EXPECT_TRUE(full.find_capability(id)) << int{id};
  for (const uint8_t id : {0x00, 0x02, 0x05, 0xff}) EXPECT_FALSE(full.find_capability(id)) << int{id};
  EXPECT_EQ(full.find_extended_capability(1), 0x100);
  EXPECT_TRUE(full.find_extended_capability(3));
  EXPECT_FALSE(full.find_extended_capability(0));
  EXPECT_FALSE(full.find_extended_capability(0x19));

  ConfigDescription d = full_description();
  d.power_management = false;
  d.advanced_error_reporting = false;
  d.msix = {};
  d.vpd_product = d.vpd_serial = "";
  const ConfigSpace some = built(d);
  for (const uint8_t id : {0x01, 0x03, 0x11}) EXPECT_FALSE(some.find_capability(id)) << int{id};
  EXPECT_TRUE(some.find_capability(0x10));
  EXPECT_FALSE(some.find_extended_capability(1));
  EXPECT_EQ(some.find_extended_capability(3), 0x100);  // the list starts at 0x100 whatever is in it
  EXPECT_EQ(some.msix(), MsixDescription{});
  EXPECT_FALSE(some.msix_enabled());
  d.serial_number = 0;
  EXPECT_EQ(built(d).read(0x100, 4), 0u);
}

TEST(ConfigSpace, PciExpressCapability) {
  ConfigDescription d = full_description();
  d.max_payload_supported = 512;
  d.link_speed = 4;
  d.link_width = 8;
  ConfigSpace c = built(d);
  const uint32_t at = capability(c, 0x10);
  EXPECT_EQ(c.read(at + 2, 2), 0x0002u);        // version 2, endpoint
  EXPECT_EQ(c.read(at + 4, 4) & 7, 2u);         // MPS 512
  EXPECT_NE(c.read(at + 4, 4) & 1u << 5, 0u);   // extended tags
  EXPECT_NE(c.read(at + 4, 4) & 1u << 15, 0u);  // role-based error reporting
  EXPECT_NE(c.read(at + 4, 4) & 1u << 28, 0u);  // FLR
  EXPECT_EQ(c.read(at + 8, 2), 0x2910u);        // reset values
  EXPECT_EQ(c.read(at + 0xc, 4) & 0x3ff, 0x084u);
  EXPECT_EQ(c.read(at + 0x12, 2) & 0x3ff, 0x084u);
  EXPECT_EQ(c.read(at + 0x2c, 4), 0x1eu);  // 2.5 to 16 GT/s
  EXPECT_EQ(c.read(at + 0x30, 2) & 0xf, 4u);
  c.write(at + 8, 2, 0x5020);  // MRRS 4096, MPS 256
  EXPECT_EQ(c.read(at + 8, 2), 0x5020u);
}

TEST(ConfigSpace, FunctionLevelReset) {
  ConfigSpace c = built();
  const uint32_t control = capability(c, 0x10) + 8;
  EXPECT_FALSE(c.take_function_level_reset());
  c.write(control, 2, 0x7910);
  EXPECT_FALSE(c.take_function_level_reset());
  c.write(control, 2, 0xa910);
  EXPECT_EQ(c.read(control, 2), 0x2910u);  // the bit reads 0
  EXPECT_TRUE(c.take_function_level_reset());
  EXPECT_FALSE(c.take_function_level_reset());
  c.write(control + 1, 1, 0x80);
  EXPECT_TRUE(c.take_function_level_reset());
  c.write(control, 4, 0x00008000);
  EXPECT_TRUE(c.take_function_level_reset());
  c.write(control, 1, 0x80);  // bit 7, another register's business
  EXPECT_FALSE(c.take_function_level_reset());
  c.write(control, 2, 0x8000);
  c.reset();
  EXPECT_FALSE(c.take_function_level_reset());
}

TEST(ConfigSpace, PowerStateTakesD0AndD3hotOnly) {
  ConfigSpace c = built();
  const uint32_t control = capability(c, 0x01) + 4;
  EXPECT_EQ(c.read(control, 2), 0x0008u);
  for (const auto& [written, state] :
       std::vector<std::pair<uint32_t, uint32_t>>{{3, 3}, {1, 3}, {2, 3}, {0, 0}, {1, 0}, {2, 0}}) {
    c.write(control, 2, 0x8100 | written);
    EXPECT_EQ(c.read(control, 2), 0x0008 | state) << written;
  }
}

TEST(ConfigSpace, ErrorBitsClearByAOne) {
  // Bits as a device would have set them, through an image.
  const ConfigSpace source = built();
  const uint32_t aer = source.find_extended_capability(1).value_or(0), express = capability(source, 0x10);
  std::vector<std::byte> bytes(source.bytes().begin(), source.bytes().end());
  bytes[aer + 4] = std::byte{0x10};
  bytes[aer + 6] = std::byte{0x15};
  bytes[0x07] = std::byte{0xf9};
  bytes[express + 0x0a] = std::byte{0x0f};
  auto c = ConfigSpace::from_image(bytes, source.write_mask(), source.w1c_mask());
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_EQ(c->read(aer + 4, 4), 0x00150010u);
  c->write(aer + 4, 4, 0x00100000);
  EXPECT_EQ(c->read(aer + 4, 4), 0x00050010u);
  c->write(aer + 4, 4, 0);
  EXPECT_EQ(c->read(aer + 4, 4), 0x00050010u);
  c->write(aer + 4, 4, 0xffffffff);
  EXPECT_EQ(c->read(aer + 4, 4), 0u);
  c->write(0x04, 4, 0x80000002);  // a command write must leave the other status bits
  EXPECT_EQ(c->read(0x06, 2), 0x7910u);
  c->write(express + 0x08, 4, 0x00050000);
  EXPECT_EQ(c->read(express + 0x0a, 2), 0x000au);
}

TEST(ConfigSpace, Msix) {
  ConfigSpace c = built();
  EXPECT_EQ(c.msix(), full_description().msix);
  const uint32_t at = capability(c, 0x11);
  EXPECT_EQ(c.read(at + 2, 2), 64u);
  EXPECT_FALSE(c.msix_enabled());
  EXPECT_FALSE(c.msix_function_masked());
  c.write(at + 2, 2, 0xffff);
  EXPECT_EQ(c.read(at + 2, 2), 0xc040u);
  EXPECT_TRUE(c.msix_enabled());
  EXPECT_TRUE(c.msix_function_masked());
  c.write(at + 3, 1, 0x80);
  EXPECT_TRUE(c.msix_enabled());
  EXPECT_FALSE(c.msix_function_masked());
  ConfigDescription d = full_description();
  d.msix = {.vectors = 2048, .table_bar = 2, .table_offset = 0x10000, .pba_bar = 4, .pba_offset = 8};
  EXPECT_EQ(built(d).msix(), d.msix);
}

// As Linux reads it: the address word with the flag 0, then poll for 1, then the data.
std::vector<uint8_t> read_vpd(ConfigSpace& c, uint32_t bytes) {
  const uint32_t at = capability(c, 0x03);
  std::vector<uint8_t> vpd;
  for (uint32_t address = 0; address < bytes; address += 4) {
    c.write(at + 2, 2, address);
    EXPECT_EQ(c.read(at + 2, 2), address | 0x8000);
    const uint32_t data = c.read(at + 4, 4);
    for (int i = 0; i < 4; ++i) vpd.push_back(static_cast<uint8_t>(data >> 8 * i));
  }
  return vpd;
}

TEST(ConfigSpace, VpdByHand) {
  ConfigSpace c = built();
  const std::vector<uint8_t> vpd = read_vpd(c, 64);
  const std::string text(vpd.begin(), vpd.end());
  // Identifier string of 13 bytes, read-only section of 3 + 13 + 4 bytes, end tag.
  EXPECT_EQ(text.substr(0, 16), std::string("\x82\x0d\0dxpu soft GPU", 16));
  EXPECT_EQ(text.substr(16, 6), std::string("\x90\x14\0SN\x0d", 6));
  EXPECT_EQ(text.substr(22, 13), "B1-S03-000042");
  EXPECT_EQ(text.substr(35, 3), std::string("RV\x01"));
  unsigned sum = 0;
  for (int i = 0; i <= 38; ++i) sum += vpd[i];
  EXPECT_EQ(sum & 0xff, 0u);
  EXPECT_EQ(vpd[39], 0x78);
  for (size_t i = 40; i < vpd.size(); ++i) EXPECT_EQ(vpd[i], 0xff) << i;  // behind the end
}

TEST(ConfigSpace, VpdWithoutSerialAndOfEveryLength) {
  for (size_t length = 1; length <= 255; ++length) {
    ConfigDescription d = full_description();
    d.vpd_product = std::string(length, 'p');
    d.vpd_serial = std::string(length % 3 == 0 ? 0 : length, 's');
    ConfigSpace c = built(d);
    const std::vector<uint8_t> vpd = read_vpd(c, 600);
    ASSERT_EQ(vpd[0], 0x82);
    size_t at = 3 + (vpd[1] | vpd[2] << 8);
    ASSERT_EQ(at, 3 + length);
    ASSERT_EQ(vpd[at], 0x90);
    const size_t end = at + 3 + (vpd[at + 1] | vpd[at + 2] << 8);
    at += 3;
    std::string serial;
    bool checksum = false;
    while (at < end) {
      const std::string keyword{static_cast<char>(vpd[at]), static_cast<char>(vpd[at + 1])};
      const size_t bytes = vpd[at + 2];
      if (keyword == "SN") serial.assign(vpd.begin() + at + 3, vpd.begin() + at + 3 + bytes);
      if (keyword == "RV") {
        unsigned sum = 0;
        for (size_t i = 0; i <= at + 3; ++i) sum += vpd[i];
        checksum = (sum & 0xff) == 0;
      }
      at += 3 + bytes;
    }
    EXPECT_EQ(serial, d.vpd_serial);
    EXPECT_TRUE(checksum);
    EXPECT_EQ(at, end);
    EXPECT_EQ(vpd[end], 0x78);
  }
}

TEST(ConfigSpace, VpdRegisters) {
  ConfigSpace c = built();
  const uint32_t at = capability(c, 0x03);
  const std::vector<uint8_t> before = read_vpd(c, 64);
  // A write: flag 1, becomes 0, the read-only data stays.
  c.write(at + 4, 4, 0x12345678);
  c.write(at + 2, 2, 0x8004);
  EXPECT_EQ(c.read(at + 2, 2), 0x0004u);
  EXPECT_EQ(read_vpd(c, 64), before);
  // Through the double word that holds the header as well.
  c.write(at, 4, 0x00040000);
  EXPECT_EQ(c.read(at + 2, 2), 0x8004u);
  EXPECT_EQ(c.read(at, 1), 0x03u);
  // The low byte alone starts nothing.
  c.write(at + 2, 1, 0x08);
  EXPECT_EQ(c.read(at + 2, 2), 0x8008u);
  // The last address there is.
  c.write(at + 2, 2, 0x7ffc);
  EXPECT_EQ(c.read(at + 4, 4), 0xffffffffu);
  c.write(at + 2, 2, 0x7fff);
  EXPECT_EQ(c.read(at + 4, 4), 0xffffffffu);
}

TEST(ConfigSpace, SerialNumber) {
  const ConfigSpace c = built();
  const uint32_t at = c.find_extended_capability(3).value_or(0);
  EXPECT_EQ(c.read(at, 4) & 0xfffff, 0x10003u);
  EXPECT_EQ(c.read(at + 4, 4), 0x44556677u);
  EXPECT_EQ(c.read(at + 8, 4), 0x00112233u);
}

TEST(ConfigSpace, AerResetValues) {
  const ConfigSpace c = built();
  const uint32_t at = c.find_extended_capability(1).value_or(0);
  EXPECT_EQ(c.read(at, 4) & 0xfffff, 0x20001u);
  EXPECT_EQ(c.read(at + 0x04, 4), 0u);
  EXPECT_EQ(c.read(at + 0x08, 4), 0x00400000u);
  EXPECT_EQ(c.read(at + 0x0c, 4), 0x00462010u);
  EXPECT_EQ(c.read(at + 0x14, 4), 0x00006000u);
  EXPECT_EQ(c.read(at + 0x18, 4), 0u);  // no ECRC
}

TEST(ConfigSpace, ResetBringsBackEveryByte) {
  ConfigSpace c = built();
  const ConfigSpace pristine = c;
  for (uint32_t offset = 0; offset < 4096; offset += 4) c.write(offset, 4, 0xffffffff);
  EXPECT_TRUE(c.memory_enabled());
  EXPECT_FALSE(std::equal(c.bytes().begin(), c.bytes().end(), pristine.bytes().begin()));
  c.reset();
  EXPECT_TRUE(std::equal(c.bytes().begin(), c.bytes().end(), pristine.bytes().begin()));
  EXPECT_EQ(c.bar(2), full_description().bars[2]);
}

TEST(ConfigSpace, DescriptionsThatAreRefused) {
  struct Refused {
    const char* names;
    std::function<void(ConfigDescription&)> change;
  };
  const std::vector<Refused> all = {
      {"vendor_id", [](auto& d) { d.vendor_id = 0; }},
      {"vendor_id", [](auto& d) { d.vendor_id = 0xffff; }},
      {"class_code", [](auto& d) { d.class_code = 0x1000000; }},
      {"bars[0].size", [](auto& d) { d.bars[0].size = 0x18000; }},
      {"bars[0].size", [](auto& d) { d.bars[0].size = 64; }},
      {"bars[0].size", [](auto& d) { d.bars[0].size = uint64_t{1} << 32; }},
      {"bars[5]", [](auto& d) { d.bars[5] = {.size = 4096, .is_64bit = true}, d.bars[4] = {}; }},
      {"bars[3]", [](auto& d) { d.bars[3].size = 4096; }},
      {"msix.vectors", [](auto& d) { d.msix.vectors = 2049; }},
      {"msix.table_bar", [](auto& d) { d.msix.table_bar = 1; }},
      {"msix.table_bar", [](auto& d) { d.msix.table_bar = 3; }},
      {"msix.pba_bar", [](auto& d) { d.msix.pba_bar = 6; }},
      {"msix.pba_bar", [](auto& d) { d.msix.pba_bar = 255; }},
      {"msix.table_offset", [](auto& d) { d.msix.table_offset = 4; }},
      {"msix.table", [](auto& d) { d.msix.table_offset = (64 << 10) - 64 * 16; }},
      {"msix.table", [](auto& d) { d.msix.table_offset = 0xfffffff8; }},
      {"msix.pba", [](auto& d) { d.msix.pba_offset = (64 << 10) - 8; }},
      {"overlap", [](auto& d) { d.msix.pba_offset = 0x2000 + 64 * 16; }},
      {"overlap", [](auto& d) { d.msix.pba_offset = 0x1ff8; }},
      {"vpd_product", [](auto& d) { d.vpd_product = std::string(256, 'x'); }},
      {"vpd_product", [](auto& d) { d.vpd_product = "a\nb"; }},
      {"vpd_product", [](auto& d) { d.vpd_product = ""; }},
      {"vpd_serial", [](auto& d) { d.vpd_serial = std::string(256, 'x'); }},
      {"vpd_serial", [](auto& d) { d.vpd_serial = std::string("\0", 1); }},
      {"max_payload_supported", [](auto& d) { d.max_payload_supported = 0; }},
      {"max_payload_supported", [](auto& d) { d.max_payload_supported = 64; }},
      {"max_payload_supported", [](auto& d) { d.max_payload_supported = 300; }},
      {"max_payload_supported", [](auto& d) { d.max_payload_supported = 8192; }},
      {"link_speed", [](auto& d) { d.link_speed = 0; }},
      {"link_speed", [](auto& d) { d.link_speed = 7; }},
      {"link_width", [](auto& d) { d.link_width = 3; }},
  };
  for (size_t i = 0; i < all.size(); ++i) {
    ConfigDescription d = full_description();
    all[i].change(d);
    const auto c = ConfigSpace::build(d);
    ASSERT_FALSE(c.ok()) << "case " << i << " " << all[i].names;
    EXPECT_EQ(c.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(c.status().message()), HasSubstr(all[i].names));
  }
}

}  // namespace
}  // namespace dxpu::pcie
