#include "proxy/function/memory_function.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace dxpu::function {
namespace {

// 64 KiB of host memory at 1 MiB; answers at once, or when told.
class Host : public Upstream {
 public:
  static constexpr uint64_t kBase = 0x100000, kBytes = 0x10000;

  void dma_read(uint64_t address, std::span<std::byte> out, Done done) override {
    if (!inside(address, out.size())) return done(Outcome::kUnsupportedRequest);
    if (hold) {
      held = [this, address, out, done = std::move(done)]() mutable {
        std::memcpy(out.data(), memory.data() + (address - kBase), out.size());
        done(Outcome::kSuccess);
      };
      return;
    }
    std::memcpy(out.data(), memory.data() + (address - kBase), out.size());
    done(Outcome::kSuccess);
  }
  void dma_write(uint64_t address, std::span<const std::byte> data) override {
    if (inside(address, data.size())) std::memcpy(memory.data() + (address - kBase), data.data(), data.size());
    events.push_back("write");
  }
  void dma_atomic(AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t, ReadDone done) override {
    if (op != AtomicOp::kFetchAdd || width != 8 || !inside(address, width))
      return done(Outcome::kUnsupportedRequest, {});
    uint64_t old;
    std::memcpy(&old, memory.data() + (address - kBase), 8);
    const uint64_t sum = old + operand;
    std::memcpy(memory.data() + (address - kBase), &sum, 8);
    done(Outcome::kSuccess, std::as_bytes(std::span(&old, 1)));
  }
  void raise_msix(unsigned vector) override { events.push_back("vector " + std::to_string(vector)); }

  static bool inside(uint64_t address, uint64_t bytes) {
    return address >= kBase && address - kBase <= kBytes && bytes <= kBytes - (address - kBase);
  }
  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
  std::vector<std::string> events;
  bool hold = false;
  absl::AnyInvocable<void()> held;
};

class MemoryFunctionTest : public testing::Test {
 protected:
  void SetUp() override {
    auto made = MemoryFunction::create({});
    ASSERT_TRUE(made.ok()) << made.status();
    function = *std::move(made);
    function->connect(&host);
    config(0x04, 2, 0x6);  // memory, bus master
    msix(true);
  }
  void TearDown() override { function->connect(nullptr); }

  void config(uint32_t offset, unsigned size, uint32_t value) {
    function->config_write(offset, size, value, [](Outcome outcome) { EXPECT_EQ(outcome, Outcome::kSuccess); });
  }
  void msix(bool on) {
    const auto capability = function->config().find_capability(0x11);
    ASSERT_TRUE(capability);
    config(*capability + 2, 2, on ? 0x8000 : 0);
  }
  template <typename T>
  T read(unsigned bar, uint64_t offset) {
    T value{};
    function->bar_read(bar, offset, sizeof value, [&](Outcome outcome, std::span<const std::byte> data) {
      EXPECT_EQ(outcome, Outcome::kSuccess);
      std::memcpy(&value, data.data(), sizeof value);
    });
    return value;
  }
  template <typename T>
  void write(unsigned bar, uint64_t offset, T value) {
    function->bar_write(bar, offset, std::as_bytes(std::span(&value, 1)));
  }
  void dma(uint32_t command, uint64_t address, uint32_t offset, uint32_t bytes) {
    write<uint64_t>(0, MemoryFunction::kDmaAddress, address);
    write<uint32_t>(0, MemoryFunction::kDmaOffset, offset);
    write<uint32_t>(0, MemoryFunction::kDmaBytes, bytes);
    write<uint32_t>(0, MemoryFunction::kDmaCommand, command);
  }
  uint32_t status() { return read<uint32_t>(0, MemoryFunction::kDmaStatus); }

  Host host;
  std::unique_ptr<MemoryFunction> function;
};

TEST_F(MemoryFunctionTest, ReadsHaveSideEffects) {
  EXPECT_EQ(read<uint32_t>(0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(read<uint32_t>(0, MemoryFunction::kCounter), i);
  write<uint32_t>(0, MemoryFunction::kScratch + 4, 0xabcd);
  EXPECT_EQ(read<uint32_t>(0, MemoryFunction::kScratch + 4), 0xabcdu);
  write<uint64_t>(2, 16, 7);
  EXPECT_EQ(read<uint64_t>(2, 16), 7u);
}

TEST_F(MemoryFunctionTest, RefusesWhatIsOutside) {
  for (auto [bar, offset, length] : {std::tuple<unsigned, uint64_t, uint32_t>{0, 4096, 1},
                                     {0, 4094, 4},
                                     {2, 65535, 2},
                                     {1, 0, 4},
                                     {2, ~uint64_t{0}, 4},
                                     {2, 0, 0},
                                     {2, 0, 4097}}) {
    function->bar_read(bar, offset, length, [](Outcome outcome, std::span<const std::byte> data) {
      EXPECT_EQ(outcome, Outcome::kUnsupportedRequest);
      EXPECT_TRUE(data.empty());
    });
  }
  write<uint32_t>(2, 65534, 1);
  write<uint32_t>(5, 0, 1);
  write<uint8_t>(0, MemoryFunction::kScratch, 1);  // a part of a register
  EXPECT_EQ(function->dropped_writes(), 3u);
}

TEST_F(MemoryFunctionTest, MovesBothWaysAndRaisesAfterwards) {
  for (size_t i = 0; i < 256; ++i) host.memory[i] = static_cast<std::byte>(i);
  write<uint32_t>(0, MemoryFunction::kDmaVector, 2);
  dma(MemoryFunction::kToRam | MemoryFunction::kThenRaise, Host::kBase, 512, 256);
  EXPECT_EQ(status(), MemoryFunction::kDone);
  EXPECT_EQ(read<uint8_t>(2, 512 + 255), 255);
  dma(MemoryFunction::kToHost | MemoryFunction::kThenRaise, Host::kBase + 4096, 512, 256);
  EXPECT_EQ(host.memory[4096 + 255], std::byte{255});
  EXPECT_EQ(host.events, (std::vector<std::string>{"vector 2", "write", "vector 2"}));
}

TEST_F(MemoryFunctionTest, AtomicAddReturnsTheOldValue) {
  host.memory[0] = std::byte{40};
  write<uint64_t>(0, MemoryFunction::kDmaAddress, Host::kBase);
  write<uint64_t>(0, MemoryFunction::kFetchAdd, 2);
  EXPECT_EQ(read<uint64_t>(0, MemoryFunction::kFetchAddOld), 40u);
  EXPECT_EQ(host.memory[0], std::byte{42});
  EXPECT_EQ(status(), MemoryFunction::kDone);
}

TEST_F(MemoryFunctionTest, FailsWhereNothingIsMappedAndWithoutBusMaster) {
  dma(MemoryFunction::kToRam, 0x10, 0, 16);
  EXPECT_EQ(status(), MemoryFunction::kFailed | 1);
  dma(MemoryFunction::kToRam, Host::kBase, 65530, 16);
  EXPECT_EQ(status(), MemoryFunction::kFailed | 1);
  config(0x04, 2, 0x2);
  dma(MemoryFunction::kToHost, Host::kBase, 0, 16);
  EXPECT_EQ(status(), MemoryFunction::kFailed | 1);
  EXPECT_TRUE(host.events.empty());
}

TEST_F(MemoryFunctionTest, RaisesNothingWhileMsixIsOff) {
  msix(false);
  write<uint32_t>(0, MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_TRUE(host.events.empty());
  msix(true);
  write<uint32_t>(0, MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_EQ(host.events, (std::vector<std::string>{"vector 0"}));
}

TEST_F(MemoryFunctionTest, ALateAnswerIsNothingToTheLifeAfterAReset) {
  host.hold = true;
  host.memory[0] = std::byte{9};
  write<uint8_t>(2, 0, 1);
  dma(MemoryFunction::kToRam, Host::kBase, 0, 4);
  EXPECT_EQ(status(), MemoryFunction::kBusy);
  bool over = false;
  function->reset([&](Outcome outcome) { over = outcome == Outcome::kSuccess; });
  EXPECT_TRUE(over);
  ASSERT_TRUE(host.held);
  host.held();
  EXPECT_EQ(status(), MemoryFunction::kIdle);
  EXPECT_EQ(read<uint8_t>(2, 0), 1);  // reset keeps the RAM
  ASSERT_TRUE(function->scrub().ok());
  EXPECT_EQ(read<uint8_t>(2, 0), 0);
}

TEST_F(MemoryFunctionTest, ALateAnswerMayComeAfterTheEnd) {
  host.hold = true;
  dma(MemoryFunction::kToRam, Host::kBase, 0, 4);
  function->connect(nullptr);
  function.reset();
  host.held();
  function = *MemoryFunction::create({});
}

TEST(Outcome, HasNames) {
  EXPECT_STREQ(name_of(Outcome::kTimeout), "completion timeout (CTO)");
  EXPECT_STREQ(name_of(static_cast<Outcome>(0x55)), "unknown outcome");
}

TEST(MemoryFunctionOptions, AreChecked) {
  EXPECT_EQ(MemoryFunction::create({.ram_bytes = 1000}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MemoryFunction::create({.vectors = 0}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dxpu::function
