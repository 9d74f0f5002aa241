// What the function may do to memory: what was mapped for it, in the direction it was mapped for, while it is mapped.
#include <sys/mman.h>

#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "tests/vm/module/served.h"

namespace dxpu::vm {
namespace {

using function::AtomicOp;
using function::MemoryFunction;
using function::Outcome;

constexpr uint64_t kIova = 0x100000000, kPage = 4096;
constexpr size_t kPages = 64;

struct Memory {
  explicit Memory(size_t bytes) : size(bytes) {
    data = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  ~Memory() { ::munmap(data, size); }
  std::span<std::byte> all() { return {data, size}; }
  std::byte* data;
  size_t size;
};

class Dma : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(served.plug().ok());
    device = served.open();
    ASSERT_NE(device, nullptr);
    enable_bus_master(*device);
    // Read back through the shadow, so that it has taken effect where DMA looks.
    ASSERT_TRUE(config16(*device, 0x04) & 0x4);
  }
  Outcome read(uint64_t iova, std::span<std::byte> out) {
    Outcome result = Outcome::kTimeout;
    served.port->dma_read(iova, out, [&](Outcome outcome) { result = outcome; });
    return result;
  }
  // Whether it arrived, by the counter of refusals.
  bool write(uint64_t iova, std::span<const std::byte> data) {
    const uint64_t refused = counter(0, "dma_unsupported");
    served.port->dma_write(iova, data);
    return counter(0, "dma_unsupported") == refused;
  }
  Served served{0};
  std::unique_ptr<attach::VfioDevice> device;
};

std::vector<std::byte> pattern(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& b : data) b = std::byte(random());
  return data;
}

TEST_F(Dma, EverySizeAndAlignment) {
  Memory memory(kPages * kPage);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, memory.size, true, true).ok());
  std::mt19937 random(3);
  std::vector<std::byte> model(memory.size);
  for (size_t size : {1ul, 2ul, 4ul, 8ul, 3ul, 64ul, 1000ul, 4096ul, 4097ul, 10000ul, 65536ul, memory.size}) {
    const size_t offset = random() % (memory.size - size + 1);
    const std::vector<std::byte> data = pattern(size, size);
    std::copy(data.begin(), data.end(), model.begin() + offset);
    ASSERT_TRUE(write(kIova + offset, data));
    ASSERT_TRUE(std::equal(model.begin(), model.end(), memory.data)) << size << " at " << offset;
    std::vector<std::byte> out(size);
    ASSERT_EQ(read(kIova + offset, out), Outcome::kSuccess);
    ASSERT_EQ(out, data);
  }
}

TEST_F(Dma, ByTheFunctionItself) {
  Memory memory(kPages * kPage);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, memory.size, true, true).ok());
  const std::vector<std::byte> data = pattern(32 * 1024, 5);
  std::copy(data.begin(), data.end(), memory.data);
  base::UniqueFd done = make_eventfd();
  ASSERT_TRUE(device->set_msix_eventfd(1, done.get()).ok());
  write32(*device, 0, MemoryFunction::kDmaAddress, static_cast<uint32_t>(kIova));
  write32(*device, 0, MemoryFunction::kDmaAddress + 4, kIova >> 32);
  write32(*device, 0, MemoryFunction::kDmaBytes, data.size());
  write32(*device, 0, MemoryFunction::kDmaVector, 1);
  write32(*device, 0, MemoryFunction::kDmaCommand, MemoryFunction::kToRam | MemoryFunction::kThenRaise);
  ASSERT_TRUE(signalled(done.get()));
  EXPECT_EQ(read32(*device, 0, MemoryFunction::kDmaStatus), MemoryFunction::kDone);
  std::vector<std::byte> ram(data.size());
  ASSERT_TRUE(device->bar_read(MemoryFunction::kRamBar, 0, ram).ok());
  EXPECT_EQ(ram, data);
}

TEST_F(Dma, UnmappedTouchesNothing) {
  Memory memory(4 * kPage);
  // The last two pages are not mapped.
  ASSERT_TRUE(device->map_dma(kIova, memory.data, 2 * kPage, true, true).ok());
  std::vector<std::byte> data = pattern(3 * kPage, 7);
  EXPECT_FALSE(write(kIova + 0x10000000, std::span(data).first(4))) << "nowhere near";
  EXPECT_FALSE(write(kIova + 2 * kPage, std::span(data).first(4))) << "just behind";
  EXPECT_FALSE(write(kIova - 2, std::span(data).first(4))) << "across the start";
  EXPECT_FALSE(write(kIova + kPage, data)) << "across the end: not clamped";
  EXPECT_FALSE(write(~uint64_t{0} - 2, std::span(data).first(8))) << "around the end of everything";
  EXPECT_EQ(read(kIova + kPage + 1, std::span(data).first(kPage)), Outcome::kUnsupportedRequest);
  EXPECT_TRUE(std::all_of(memory.data, memory.data + memory.size, [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(Dma, DirectionIsKept) {
  Memory memory(2 * kPage);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, kPage, true, false).ok());
  std::vector<std::byte> data = pattern(64, 9), out(64);
  EXPECT_EQ(read(kIova, out), Outcome::kSuccess);
  EXPECT_FALSE(write(kIova, data)) << "mapped for reading";
  EXPECT_EQ(memory.data[0], std::byte{0});
  EXPECT_EQ(read(kIova, out), Outcome::kSuccess) << "still";
}

TEST_F(Dma, UnmapIsHonoured) {
  Memory memory(kPages * kPage), other(kPages * kPage);
  const std::vector<std::byte> data = pattern(memory.size, 11);
  for (int i = 0; i < 8; ++i) {
    Memory& mapped = i % 2 ? memory : other;
    ASSERT_TRUE(device->map_dma(kIova, mapped.data, mapped.size, true, true).ok());
    // At once, right after the unmap of the same addresses.
    ASSERT_TRUE(write(kIova, data)) << i;
    ASSERT_TRUE(std::equal(data.begin(), data.end(), mapped.data)) << i;
    std::vector<std::byte> out(1000);
    ASSERT_EQ(read(kIova + 123, out), Outcome::kSuccess);
    ASSERT_TRUE(device->unmap_dma(kIova, mapped.size).ok());
    ASSERT_FALSE(write(kIova, std::span(data).first(8))) << "after unmap";
    std::fill(mapped.data, mapped.data + mapped.size, std::byte{0});
  }
  EXPECT_GT(counter(0, "dma_unmaps"), 0u);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, memory.size, false, true).ok());
  EXPECT_TRUE(write(kIova, data)) << "right after an unmap, into memory that it may only write";
  EXPECT_TRUE(std::equal(data.begin(), data.end(), memory.data));
  std::vector<std::byte> out(8);
  EXPECT_EQ(read(kIova, out), Outcome::kUnsupportedRequest) << "pinned for writing is not mapped for reading";
}

TEST_F(Dma, BusMasterOff) {
  Memory memory(kPage);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, memory.size, true, true).ok());
  std::vector<std::byte> data = pattern(64, 13);
  enable_bus_master(*device, false);
  EXPECT_FALSE(write(kIova, data));
  enable_bus_master(*device, true);
  EXPECT_TRUE(write(kIova, data));
}

TEST_F(Dma, Atomics) {
  Memory memory(2 * kPage);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, kPage, true, true).ok());
  auto* word = reinterpret_cast<uint64_t*>(memory.data + 8);
  *word = 40;
  auto atomic = [&](AtomicOp op, uint64_t iova, unsigned width, uint64_t operand, uint64_t compare) {
    int64_t result = -1;
    served.port->dma_atomic(op, iova, width, operand, compare, [&](Outcome outcome, std::span<const std::byte> old) {
      if (outcome != Outcome::kSuccess) return;
      uint64_t value = 0;
      std::memcpy(&value, old.data(), old.size());
      result = static_cast<int64_t>(value);
    });
    return result;
  };
  EXPECT_EQ(atomic(AtomicOp::kFetchAdd, kIova + 8, 8, 2, 0), 40);
  EXPECT_EQ(*word, 42u);
  EXPECT_EQ(atomic(AtomicOp::kSwap, kIova + 8, 4, 7, 0), 42);
  EXPECT_EQ(atomic(AtomicOp::kCompareSwap, kIova + 8, 8, 9, 8), 7);
  EXPECT_EQ(*word, 7u) << "not equal";
  EXPECT_EQ(atomic(AtomicOp::kCompareSwap, kIova + 8, 8, 9, 7), 7);
  EXPECT_EQ(*word, 9u);
  EXPECT_EQ(atomic(AtomicOp::kFetchAdd, kIova + kPage, 8, 1, 0), -1) << "not mapped";
  EXPECT_EQ(atomic(AtomicOp::kFetchAdd, kIova + 4, 8, 1, 0), -1) << "not aligned";
}

TEST_F(Dma, StopsWithTheFunction) {
  Memory memory(kPage);
  ASSERT_TRUE(device->map_dma(kIova, memory.data, memory.size, true, true).ok());
  std::vector<std::byte> data = pattern(64, 17);
  ASSERT_TRUE(write(kIova, data));
  ASSERT_TRUE(served.port->unplug("test").ok());
  EXPECT_FALSE(write(kIova, data));
  ASSERT_TRUE(device->unmap_dma(kIova, memory.size).ok()) << "the user can clean up";
}

}  // namespace
}  // namespace dxpu::vm
