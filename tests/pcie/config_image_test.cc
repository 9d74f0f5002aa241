// from_image() with what an honest peer sends, and with what a hostile one may.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "proxy/pcie/bar_map.h"
#include "tests/pcie/config_samples.h"

namespace dxpu::pcie {
namespace {

using ::testing::HasSubstr;

struct Image {
  std::vector<std::byte> bytes, mask, w1c;

  explicit Image(const ConfigSpace& c)
      : bytes(c.bytes().begin(), c.bytes().end()),
        mask(c.write_mask().begin(), c.write_mask().end()),
        w1c(c.w1c_mask().begin(), c.w1c_mask().end()) {}
  absl::StatusOr<ConfigSpace> load() const { return ConfigSpace::from_image(bytes, mask, w1c); }
};

void put(std::vector<std::byte>& to, uint32_t offset, unsigned size, uint64_t value) {
  for (unsigned i = 0; i < size; ++i) to[offset + i] = static_cast<std::byte>(value >> 8 * i);
}

TEST(ConfigImage, AnHonestImageBehavesLikeTheOriginal) {
  ConfigSpace original = *ConfigSpace::build(full_description());
  auto copy = ConfigSpace::from_image(original.bytes(), original.write_mask(), original.w1c_mask(), original.vpd());
  ASSERT_TRUE(copy.ok()) << copy.status();
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const uint32_t offset = static_cast<uint32_t>(random() % 0x200);
    const unsigned size = 1u << random() % 3;
    const uint32_t value = static_cast<uint32_t>(random());
    original.write(offset, size, value);
    copy->write(offset, size, value);
    ASSERT_EQ(original.take_function_level_reset(), copy->take_function_level_reset());
    if (i % 5000 == 4999) {
      original.reset();
      copy->reset();
    }
    ASSERT_TRUE(std::equal(original.bytes().begin(), original.bytes().end(), copy->bytes().begin())) << "write " << i;
  }
  for (unsigned i = 0; i < kBarCount; ++i) EXPECT_EQ(copy->bar(i), original.bar(i));
  EXPECT_EQ(copy->msix(), original.msix());
}

TEST(ConfigImage, ResetClearsWhatTheImageHadProgrammed) {
  ConfigSpace original = *ConfigSpace::build(full_description());
  const ConfigSpace pristine = original;
  original.write(0x04, 2, 6);
  original.write(0x10, 4, 0xe0000000);
  original.write(0x1c, 4, 0x40);
  original.write(*original.find_capability(0x11) + 2, 2, 0xc000);
  auto copy = Image(original).load();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_TRUE(copy->memory_enabled());
  EXPECT_EQ(copy->bar_address(0), 0xe0000000u);
  copy->reset();
  EXPECT_TRUE(std::equal(copy->bytes().begin(), copy->bytes().end(), pristine.bytes().begin()));
}

// Found by fuzzing: a command register that claims to be read-only and on.
TEST(ConfigImage, ResetClearsACommandThatItsMaskProtects) {
  Image image(*ConfigSpace::build(full_description()));
  image.bytes[0x04] = std::byte{0x06};
  image.mask[0x04] = std::byte{0};
  auto space = image.load();
  ASSERT_TRUE(space.ok()) << space.status();
  EXPECT_TRUE(space->memory_enabled());
  space->reset();
  EXPECT_FALSE(space->memory_enabled());
}

TEST(ConfigImage, WithoutVpdDataReadsEndAndAreAllOnes) {
  auto copy = Image(*ConfigSpace::build(full_description())).load();
  ASSERT_TRUE(copy.ok()) << copy.status();
  const uint32_t at = *copy->find_capability(0x03);
  copy->write(at + 2, 2, 0);
  EXPECT_EQ(copy->read(at + 2, 2), 0x8000u);
  EXPECT_EQ(copy->read(at + 4, 4), 0xffffffffu);
}

TEST(ConfigImage, WrongSizes) {
  const ConfigSpace c = *ConfigSpace::build(full_description());
  for (int which = 0; which < 3; ++which) {
    for (const size_t size : {0u, 256u, 4095u, 4097u}) {
      Image image(c);
      (which == 0 ? image.bytes : which == 1 ? image.mask : image.w1c).resize(size);
      EXPECT_FALSE(image.load().ok()) << which << " " << size;
    }
  }
  EXPECT_FALSE(ConfigSpace::from_image(c.bytes(), c.write_mask(), c.w1c_mask(), std::vector<std::byte>(32769)).ok());
}

TEST(ConfigImage, HostileImagesAreRefused) {
  const ConfigSpace c = *ConfigSpace::build(full_description());
  const uint32_t pm = *c.find_capability(0x01), express = *c.find_capability(0x10), msix = *c.find_capability(0x11);
  struct Hostile {
    const char* what;
    const char* names;
    std::function<void(Image&)> change;
  };
  const std::vector<Hostile> all = {
      {"nothing there", "vendor id", [](Image& i) { put(i.bytes, 0, 2, 0xffff); }},
      {"bridge", "header type", [](Image& i) { put(i.bytes, 0x0e, 1, 1); }},
      {"multi-function", "header type", [](Image& i) { put(i.bytes, 0x0e, 1, 0x80); }},
      {"writable vendor id", "vendor", [](Image& i) { put(i.mask, 0, 1, 1); }},
      {"writable class", "class", [](Image& i) { put(i.mask, 0x0b, 1, 0x80); }},
      {"header type clears by a 1", "header type", [](Image& i) { put(i.w1c, 0x0e, 1, 1); }},
      {"ROM BAR", "ROM", [](Image& i) { put(i.mask, 0x30, 4, 0xffff0801); }},
      {"enabled ROM", "ROM", [](Image& i) { put(i.bytes, 0x30, 4, 1); }},
      {"writable capabilities pointer", "capabilities pointer", [](Image& i) { put(i.mask, 0x34, 1, 0xfc); }},
      {"writable capabilities bit", "capabilities bit", [](Image& i) { put(i.mask, 0x06, 1, 0x10); }},
      {"a bit in both masks", "both masks", [](Image& i) { put(i.mask, 0x07, 1, 0x80); }},
      {"IO BAR", "IO BAR", [](Image& i) { put(i.bytes, 0x10, 4, 1); }},
      {"BAR type below 1 MiB", "type", [](Image& i) { put(i.bytes, 0x10, 4, 2); }},
      {"BAR type 11", "type", [](Image& i) { put(i.bytes, 0x10, 4, 6); }},
      {"writable BAR type", "type", [](Image& i) { put(i.mask, 0x10, 4, 0xffff0004); }},
      {"hole in the mask", "mask", [](Image& i) { put(i.mask, 0x10, 4, 0xff7f0000); }},
      {"mask without the top", "mask", [](Image& i) { put(i.mask, 0x10, 4, 0x7fff0000); }},
      {"hole across the halves", "mask", [](Image& i) { put(i.mask, 0x1c, 4, 0xfffffffd); }},
      {"flags without a size", "mask", [](Image& i) { put(i.bytes, 0x14, 4, 8); }},
      {"BAR of 16 bytes", "size", [](Image& i) { put(i.mask, 0x10, 4, 0xfffffff0); }},
      {"address below the size", "outside its mask", [](Image& i) { put(i.bytes, 0x10, 4, 0x8000); }},
      {"BAR clears by a 1", "clear", [](Image& i) { put(i.w1c, 0x14, 4, 0x80); }},
      {"64-bit in the last register", "last register",
       [](Image& i) {
         put(i.bytes, 0x20, 4, 0), put(i.mask, 0x20, 4, 0);
         put(i.bytes, 0x24, 4, 4), put(i.mask, 0x24, 4, 0xfff00000);
       }},
      {"pointer into the header", "pointer", [](Image& i) { put(i.bytes, 0x34, 1, 0x10); }},
      {"pointer not aligned", "pointer", [](Image& i) { put(i.bytes, 0x34, 1, 0x41); }},
      {"loop to itself", "reached twice", [pm](Image& i) { put(i.bytes, pm + 1, 1, pm); }},
      {"loop to an earlier one", "reached twice", [msix, pm](Image& i) { put(i.bytes, msix + 1, 1, pm); }},
      {"overlap", "overlaps", [pm](Image& i) { put(i.bytes, pm + 1, 1, pm + 4), put(i.bytes, pm + 4, 2, 0x0001); }},
      {"MSI-X over the end", "leaves",
       [pm](Image& i) { put(i.bytes, pm + 1, 1, 0xf8), put(i.bytes, 0xf8, 2, 0x0011); }},
      {"PCI Express over the end", "leaves",
       [pm](Image& i) { put(i.bytes, pm + 1, 1, 0xf0), put(i.bytes, 0xf0, 2, 0x0010); }},
      {"writable next pointer", "read-only", [express](Image& i) { put(i.mask, express + 1, 1, 0xff); }},
      {"extended pointer into the first 256", "pointer", [](Image& i) { put(i.bytes, 0x100, 4, 0x04020001); }},
      {"extended pointer not aligned", "pointer", [](Image& i) { put(i.bytes, 0x100, 4, 0x15220001); }},
      {"extended loop to itself", "reached twice", [](Image& i) { put(i.bytes, 0x100, 4, 0x10020001); }},
      {"extended loop to an earlier one", "reached twice",
       [](Image& i) { put(i.bytes, 0x100, 4, 0x20020001), put(i.bytes, 0x200, 4, 0x10010003); }},
      {"extended loop without the first", "reached twice",
       [](Image& i) { put(i.bytes, 0x100, 4, 0x20020001), put(i.bytes, 0x200, 4, 0x20010003); }},
      {"writable extended header", "read-only", [](Image& i) { put(i.mask, 0x103, 1, 0xf0); }},
      {"MSI-X table in no BAR", "table", [msix](Image& i) { put(i.bytes, msix + 4, 4, 0x2001); }},
      {"MSI-X table in an upper half", "table", [msix](Image& i) { put(i.bytes, msix + 4, 4, 0x2003); }},
      {"MSI-X table in BAR 7", "table", [msix](Image& i) { put(i.bytes, msix + 4, 4, 0x2007); }},
      {"MSI-X table outside", "table", [msix](Image& i) { put(i.bytes, msix + 4, 4, 0xfffffff8); }},
      {"MSI-X table too long", "table", [msix](Image& i) { put(i.bytes, msix + 4, 4, 0xfc00); }},
      {"MSI-X PBA outside", "PBA", [msix](Image& i) { put(i.bytes, msix + 8, 4, 0xfff8); }},
      {"MSI-X PBA in no BAR", "PBA", [msix](Image& i) { put(i.bytes, msix + 8, 4, 0x3005); }},
      {"MSI-X overlap", "overlap", [msix](Image& i) { put(i.bytes, msix + 8, 4, 0x2000); }},
      {"writable MSI-X size", "read-only", [msix](Image& i) { put(i.mask, msix + 2, 2, 0xc001); }},
      {"writable MSI-X table", "read-only", [msix](Image& i) { put(i.mask, msix + 4, 4, 8); }},
      {"MSI-X PBA clears by a 1", "read-only", [msix](Image& i) { put(i.w1c, msix + 8, 4, 8); }},
  };
  for (const Hostile& h : all) {
    SCOPED_TRACE(h.what);
    Image image(c);
    h.change(image);
    const auto loaded = image.load();
    ASSERT_FALSE(loaded.ok());
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(loaded.status().message()), HasSubstr(h.names));
  }
}

TEST(ConfigImage, UnknownCapabilitiesAreCarried) {
  Image image(*ConfigSpace::build(full_description()));
  const uint32_t vpd = *ConfigSpace::build(full_description())->find_capability(0x03);
  put(image.bytes, vpd + 1, 1, 0xfc);
  put(image.bytes, 0xfc, 4, 0x12340009);
  const auto c = image.load();
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_EQ(c->find_capability(0x09), 0xfc);
  Image last(*c);
  put(last.bytes, 0x100, 4, 0xffc20001);  // the last double word of all
  put(last.bytes, 0xffc, 4, 0x0001000b);
  const auto at_the_end = last.load();
  ASSERT_TRUE(at_the_end.ok()) << at_the_end.status();
  EXPECT_EQ(at_the_end->find_extended_capability(0x0b), 0xffc);
  put(last.bytes, 0x100, 4, 0xffffffff);
  const auto none = last.load();
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->find_extended_capability(0xffff));
}

TEST(ConfigImage, MutatedImagesNeverCrashAndAcceptedOnesHoldTogether) {
  const uint64_t seed = std::random_device()();
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  const Image good(*ConfigSpace::build(full_description()));
  int accepted = 0;
  for (int i = 0; i < 10000; ++i) {
    Image image = good;
    for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      auto& part = random() % 4 == 0 ? (random() % 2 == 0 ? image.mask : image.w1c) : image.bytes;
      const size_t at = random() % (random() % 4 == 0 ? 4096 : 0x160);
      part[at] =
          random() % 2 == 0 ? static_cast<std::byte>(random()) : part[at] ^ static_cast<std::byte>(1u << random() % 8);
    }
    auto c = image.load();
    if (!c.ok()) continue;
    ++accepted;
    const MsixDescription msix = c->msix();
    if (msix.vectors != 0) {
      EXPECT_LE(msix.table_offset + msix.vectors * 16u, c->bar(msix.table_bar).size);
      EXPECT_LE(msix.pba_offset + 8u, c->bar(msix.pba_bar).size);
    }
    for (int writes = 0; writes < 50; ++writes) {
      c->write(static_cast<uint32_t>(random() % 4096), 1u << random() % 3, static_cast<uint32_t>(random()));
    }
    const BarMap map(*c);
    for (unsigned bar = 0; bar < kBarCount; ++bar) {
      const uint64_t size = c->bar(bar).size;
      EXPECT_TRUE((size & (size - 1)) == 0);
      if (size != 0) {
        EXPECT_EQ(c->bar_address(bar) % size, 0u);
      }
      (void)map.find(c->bar_address(bar), size);
    }
    (void)BarMap::assign(*c, random());
    c->reset();
    EXPECT_FALSE(c->memory_enabled());
  }
  EXPECT_GT(accepted, 100);
  EXPECT_LT(accepted, 9900);
}

}  // namespace
}  // namespace dxpu::pcie
