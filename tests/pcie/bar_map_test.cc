#include "proxy/pcie/bar_map.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/pcie/config_samples.h"

namespace dxpu::pcie {
namespace {

void program(ConfigSpace& c, const std::array<uint64_t, kBarCount>& addresses) {
  for (unsigned i = 0; i < kBarCount; ++i) {
    const BarDescription bar = c.bar(i);
    if (bar.size == 0) continue;
    c.write(0x10 + 4 * i, 4, static_cast<uint32_t>(addresses[i]));
    if (bar.is_64bit) c.write(0x14 + 4 * i, 4, static_cast<uint32_t>(addresses[i] >> 32));
  }
}

TEST(BarMap, NothingMatchesBeforeBarsAreProgrammed) {
  for (const BarMap& map : {BarMap(), BarMap(*ConfigSpace::build(full_description()))}) {
    for (const uint64_t address : {uint64_t{0}, uint64_t{4}, uint64_t{0xe0000000}, UINT64_MAX}) {
      for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, UINT64_MAX})
        EXPECT_FALSE(map.find(address, bytes)) << address;
    }
  }
}

TEST(BarMap, HitsAndEdges) {
  ConfigSpace c = *ConfigSpace::build(full_description());
  program(c, {0xe0000000, 0, 0x4000000000, 0, 0x8000000000, 0});
  const BarMap map(c);
  struct Case {
    uint64_t address, bytes;
    int bar;  // -1: none
    uint64_t offset;
  };
  const Case cases[] = {
      {0xe0000000, 1, 0, 0},
      {0xe0000000, 0, 0, 0},
      {0xe000ffff, 1, 0, 0xffff},
      {0xe000ffff, 0, 0, 0xffff},
      {0xe000ffff, 2, -1, 0},
      {0xe0000000, 0x10000, 0, 0},
      {0xe0000000, 0x10001, -1, 0},
      {0xe0010000, 1, -1, 0},
      {0xdfffffff, 2, -1, 0},
      {0xe0000004, UINT64_MAX, -1, 0},
      {UINT64_MAX, 2, -1, 0},
      {0x4000000000, 4096, 2, 0},
      {0x41fffffffc, 4, 2, 0x1fffffffc},
      {0x4200000000, 4, -1, 0},
      {0x8000000010, 4, 4, 0x10},
  };
  for (const Case& k : cases) {
    const auto hit = map.find(k.address, k.bytes);
    ASSERT_EQ(hit.has_value(), k.bar >= 0) << std::hex << k.address << " " << k.bytes;
    if (hit) {
      EXPECT_EQ(hit->bar, static_cast<unsigned>(k.bar));
      EXPECT_EQ(hit->offset, k.offset);
    }
  }
}

TEST(BarMap, ABarAtTheEndOfTheAddressSpace) {
  ConfigDescription d = full_description();
  d.msix = {};
  d.bars = {};
  d.bars[0] = {.size = 1 << 20, .is_64bit = true};
  ConfigSpace c = *ConfigSpace::build(d);
  program(c, {~uint64_t{0xfffff}});
  const BarMap map(c);
  EXPECT_TRUE(map.find(UINT64_MAX, 1));
  EXPECT_FALSE(map.find(UINT64_MAX, 2));
  EXPECT_TRUE(map.find(~uint64_t{0xfffff}, 1 << 20));
}

// What assign() promises, for any function and base.
void expect_sound(const ConfigSpace& c, uint64_t base, const std::array<uint64_t, kBarCount>& addresses) {
  constexpr unsigned __int128 kTop = static_cast<unsigned __int128>(1) << 64;
  for (unsigned i = 0; i < kBarCount; ++i) {
    const BarDescription bar = c.bar(i);
    if (bar.size == 0) {
      EXPECT_EQ(addresses[i], 0u);
    }
    if (addresses[i] == 0) continue;
    const unsigned __int128 end = static_cast<unsigned __int128>(addresses[i]) + bar.size;
    EXPECT_GE(addresses[i], base);
    EXPECT_EQ(addresses[i] % bar.size, 0u);
    EXPECT_TRUE(end <= kTop);
    if (!bar.is_64bit) {
      EXPECT_TRUE(end <= uint64_t{1} << 32);
    }
    EXPECT_TRUE(end <= 0xfee00000 || addresses[i] >= 0xfef00000) << "in the MSI window";
    for (unsigned k = 0; k < i; ++k) {
      if (addresses[k] == 0) continue;
      EXPECT_TRUE(addresses[k] >= end || addresses[i] >= static_cast<unsigned __int128>(addresses[k]) + c.bar(k).size)
          << i << " overlaps " << k;
    }
  }
}

TEST(BarMap, AssignKnownAnswers) {
  const ConfigSpace c = *ConfigSpace::build(full_description());
  using Addresses = std::array<uint64_t, kBarCount>;
  EXPECT_EQ(BarMap::assign(c, 0xe0000000), (Addresses{0xe0000000, 0, 0x200000000, 0, 0x400000000, 0}));
  EXPECT_EQ(BarMap::assign(c, 0), (Addresses{0x10000, 0, 0x200000000, 0, 0x400000000, 0}));
  // A 32-bit BAR has no room up there, the others have.
  EXPECT_EQ(BarMap::assign(c, 0x4000000000), (Addresses{0, 0, 0x4000000000, 0, 0x4200000000, 0}));
  // Over the MSI window.
  EXPECT_EQ(BarMap::assign(c, 0xfee00000)[0], 0xfef00000u);
  EXPECT_EQ(BarMap::assign(c, 0xfedf0001)[0], 0xfef00000u);
  EXPECT_EQ(BarMap::assign(c, 0xfedf0000)[0], 0xfedf0000u);
  EXPECT_EQ(BarMap::assign(c, 0xffffffff)[0], 0u);
  EXPECT_EQ(BarMap::assign(c, UINT64_MAX), Addresses{});
}

TEST(BarMap, AssignIsSoundForRandomFunctions) {
  const uint64_t seed = std::random_device()();
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 5000; ++round) {
    ConfigDescription d = full_description();
    d.msix = {};
    d.bars = {};
    for (unsigned i = 0; i < kBarCount; ++i) {
      const unsigned kind = random() % 3;
      if (kind == 0) continue;
      const bool wide = kind == 2 && i + 1 < kBarCount;
      d.bars[i] = {.size = uint64_t{1} << (7 + random() % (wide ? 57 : 25)), .is_64bit = wide};
      if (wide) ++i;
    }
    ConfigSpace c = *ConfigSpace::build(d);
    const uint64_t base = random() >> random() % 64;
    const auto addresses = BarMap::assign(c, base);
    expect_sound(c, base, addresses);
    program(c, addresses);
    const BarMap map(c);
    for (unsigned i = 0; i < kBarCount; ++i) {
      if (addresses[i] == 0) continue;
      ASSERT_EQ(c.bar_address(i), addresses[i]);
      const auto hit = map.find(addresses[i] + c.bar(i).size - 1, 1);
      ASSERT_TRUE(hit.has_value());
      EXPECT_EQ(hit->bar, i);
      EXPECT_EQ(hit->offset, c.bar(i).size - 1);
    }
    ASSERT_FALSE(HasFailure());
  }
}

}  // namespace
}  // namespace dxpu::pcie
