// Both ends together: reads, writes, configuration, DMA, interrupts, over TCP loopback and over a fake.
#include <random>

#include "tests/fabric/harness.h"

namespace dxpu::fabric::testing {
namespace {

using function::MemoryFunction;
using function::Outcome;

std::span<const std::byte> bytes_of(const auto& value) { return std::as_bytes(std::span(&value, 1)); }

uint32_t read32(RemoteFunction& remote, unsigned bar, uint64_t offset) {
  uint32_t value = 0;
  EXPECT_EQ(remote.bar_read_wait(bar, offset, std::as_writable_bytes(std::span(&value, 1))), Outcome::kSuccess);
  return value;
}

class SessionTest : public ::testing::TestWithParam<int> {
 protected:
  std::pair<std::unique_ptr<Transport>, std::unique_ptr<Transport>> transports() {
    switch (GetParam()) {
      case 0:
        return tcp_pair();
      case 1:
        return FakeTransport::pair({});
      default: {
        FakeOptions narrow;
        narrow.chunk = 1;
        narrow.capacity = 700;
        return FakeTransport::pair(narrow);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, SessionTest, ::testing::Values(0, 1, 2), [](const auto& info) {
  return std::string(info.param == 0 ? "Tcp" : info.param == 1 ? "Fake" : "SingleBytes");
});

TEST_P(SessionTest, HelloBringsIdentityAndConfiguration) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  EXPECT_EQ(s.hello.ticket.host_id, "vm1");
  EXPECT_EQ(s.hello.ticket.token, ticket().token);
  EXPECT_EQ(s.remote->epoch(), 9u);
  EXPECT_EQ(s.remote->identity(), s.function.identity());
  EXPECT_EQ(s.remote->config().bar(2).size, TestFunction::kRam);
  EXPECT_TRUE(s.remote->alive());
}

TEST_P(SessionTest, RegistersByBothWaysOfReading) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  EXPECT_EQ(read32(*s.remote, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  const uint32_t value = 0xcafe1234;
  s.remote->bar_write(0, MemoryFunction::kScratch, bytes_of(value));
  Ended read;
  s.remote->bar_read(0, MemoryFunction::kScratch, 4, read.read_done());
  EXPECT_EQ(read.wait(), Outcome::kSuccess);
  EXPECT_EQ(read.u32(), value);
}

TEST_P(SessionTest, RangesOfAnyLengthAndAlignment) {
  SessionOptions options = patient_options();
  options.max_payload = 256;
  options.max_read_request = 512;
  options.read_completion_boundary = 64;
  Joined s(transports(), options, patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  std::mt19937 random(1);
  std::vector<std::byte> shadow(16384);
  for (int i = 0; i < 150; ++i) {
    const size_t offset = random() % 12000;
    const size_t length = 1 + random() % (i % 3 == 0 ? 4096 : 40);
    std::vector<std::byte> data(length);
    for (std::byte& b : data) b = static_cast<std::byte>(random());
    std::copy(data.begin(), data.end(), shadow.begin() + static_cast<std::ptrdiff_t>(offset));
    s.remote->bar_write(2, offset, data);
    const size_t at = random() % 12000, want = 1 + random() % 4096;
    std::vector<std::byte> got(want);
    ASSERT_EQ(s.remote->bar_read_wait(2, at, got), Outcome::kSuccess);
    ASSERT_TRUE(std::equal(got.begin(), got.end(), shadow.begin() + static_cast<std::ptrdiff_t>(at)))
        << at << "+" << want;
  }
}

TEST_P(SessionTest, OutsideTheBarIsRefusedHereAndThere) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  uint32_t value = 0;
  EXPECT_EQ(s.remote->bar_read_wait(0, 4096, std::as_writable_bytes(std::span(&value, 1))),
            Outcome::kUnsupportedRequest);
  EXPECT_EQ(value, 0xffffffffu);
  EXPECT_EQ(s.remote->bar_read_wait(5, 0, std::as_writable_bytes(std::span(&value, 1))), Outcome::kUnsupportedRequest);
  Ended read;
  s.remote->bar_read(2, TestFunction::kRam - 2, 4, read.read_done());
  EXPECT_EQ(read.wait(), Outcome::kUnsupportedRequest);
}

TEST_P(SessionTest, DmaBothWays) {
  SessionOptions options = patient_options();
  options.max_payload = 512;
  Joined s(transports(), patient_options(), options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  s.memory.fill(5);
  const std::vector<std::byte> before = s.memory.copy();
  for (const auto& [offset, length] :
       std::vector<std::pair<size_t, size_t>>{{0, 4096}, {3, 5}, {4093, 7}, {1, 100003}, {8192, 1}}) {
    std::vector<std::byte> got(length);
    Ended ended;
    s.upstream().dma_read(HostMemory::kBase + offset, got, ended.done());
    ASSERT_EQ(ended.wait(), Outcome::kSuccess);
    ASSERT_TRUE(std::equal(got.begin(), got.end(), before.begin() + static_cast<std::ptrdiff_t>(offset)))
        << offset << "+" << length;
    for (std::byte& b : got) b ^= std::byte{0xff};
    s.upstream().dma_write(HostMemory::kBase + offset, got);
    Ended fence;
    std::byte one;
    s.upstream().dma_read(HostMemory::kBase, {&one, 1}, fence.done());
    ASSERT_EQ(fence.wait(), Outcome::kSuccess);
    const std::vector<std::byte> after = s.memory.copy();
    ASSERT_TRUE(std::equal(got.begin(), got.end(), after.begin() + static_cast<std::ptrdiff_t>(offset)))
        << offset << "+" << length;
    s.upstream().dma_write(HostMemory::kBase + offset, std::span(before).subspan(offset, length));
  }
  Ended fence;
  std::byte one;
  s.upstream().dma_read(HostMemory::kBase, {&one, 1}, fence.done());
  fence.wait();
  EXPECT_EQ(s.memory.copy(), before) << "a write touched bytes that were not meant";
}

TEST_P(SessionTest, UnmappedDmaIsUnsupportedAndTouchesNothing) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  std::vector<std::byte> buffer(64);
  Ended read;
  s.upstream().dma_read(0x1000, buffer, read.done());
  EXPECT_EQ(read.wait(), Outcome::kUnsupportedRequest);
  s.upstream().dma_write(0x1000, buffer);
  EXPECT_TRUE(eventually([&] { return s.memory.dropped() == 1; }));
  s.remote->connect(nullptr);
  Ended nowhere;
  s.upstream().dma_read(HostMemory::kBase, buffer, nowhere.done());
  EXPECT_EQ(nowhere.wait(), Outcome::kUnsupportedRequest);
}

TEST_P(SessionTest, AtomicsGiveTheOldValue) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  const uint64_t base = HostMemory::kBase + 64;
  Ended add, swap, cas, wide;
  s.upstream().dma_atomic(function::AtomicOp::kFetchAdd, base, 8, 5, 0, add.read_done());
  EXPECT_EQ(add.wait(), Outcome::kSuccess);
  EXPECT_EQ(add.u32(), 0u);
  s.upstream().dma_atomic(function::AtomicOp::kSwap, base, 4, 77, 0, swap.read_done());
  EXPECT_EQ(swap.wait(), Outcome::kSuccess);
  EXPECT_EQ(swap.u32(), 5u);
  s.upstream().dma_atomic(function::AtomicOp::kCompareSwap, base, 8, 0x1122334455, 77, cas.read_done());
  EXPECT_EQ(cas.wait(), Outcome::kSuccess);
  EXPECT_EQ(cas.u32(), 77u);
  EXPECT_EQ(s.memory.get<uint64_t>(64), 0x1122334455u);
  s.upstream().dma_atomic(function::AtomicOp::kCompareSwap, base, 16, 1, 2, wide.read_done());
  EXPECT_EQ(wide.wait(), Outcome::kUnsupportedRequest);
}

TEST_P(SessionTest, DataIsVisibleBeforeTheInterrupt) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  s.memory.watch(8 * 4095);
  std::vector<uint64_t> data(4096);
  const unsigned rounds = 20;
  for (uint64_t i = 1; i <= rounds; ++i) {
    std::fill(data.begin(), data.end(), i);
    s.upstream().dma_write(HostMemory::kBase, std::as_bytes(std::span(data)));
    s.upstream().raise_msix(static_cast<unsigned>(i % 8));
  }
  ASSERT_TRUE(eventually([&] { return s.memory.interrupts().size() == rounds; }));
  for (uint64_t i = 1; i <= rounds; ++i) {
    const HostMemory::Interrupt got = s.memory.interrupts()[i - 1];
    EXPECT_EQ(got.vector, i % 8);
    EXPECT_GE(got.seen, i) << "the interrupt overtook its data";
  }
}

TEST_P(SessionTest, PostedBeforeReadCompletion) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  for (uint32_t i = 1; i <= 50; ++i) {
    s.upstream().dma_write(HostMemory::kBase + 128, bytes_of(i));
    read32(*s.remote, 0, 0);  // any read completion pushes earlier writes of the function
    ASSERT_EQ(s.memory.get<uint32_t>(128), i);
    s.remote->bar_write(0, MemoryFunction::kScratch + 4, bytes_of(i));
    ASSERT_EQ(read32(*s.remote, 0, MemoryFunction::kScratch + 4), i) << "a read overtook a write";
  }
}

TEST_P(SessionTest, ConfigurationHasALocalHeaderAndARemoteRest) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  Ended w1, w2, r1, r2, r3;
  s.remote->config_write(0x10, 4, 0xffffffff, w1.done());
  EXPECT_EQ(w1.wait(), Outcome::kSuccess);
  s.remote->config_read(0x10, 4, r1.read_done());
  EXPECT_EQ(r1.wait(), Outcome::kSuccess);
  EXPECT_EQ(r1.u32() & ~0xfu, ~uint32_t{MemoryFunction::kRegisterBytes - 1});
  EXPECT_EQ(read32(*s.remote, 0, 0), MemoryFunction::kMagic) << "sizing the local BAR moved the remote one";
  s.remote->config_write(0x04, 2, 0x0000, w2.done());
  EXPECT_EQ(w2.wait(), Outcome::kSuccess);
  EXPECT_EQ(read32(*s.remote, 0, 0), MemoryFunction::kMagic) << "memory decoding at the far end stays on";
  EXPECT_FALSE(s.function.config().bus_master_enabled());
  const uint16_t express = *s.function.config().find_capability(0x10);
  s.remote->config_read(express, 1, r2.read_done());
  EXPECT_EQ(r2.wait(), Outcome::kSuccess);
  EXPECT_EQ(r2.u32(), 0x10u);
  s.remote->config_read(0x1001, 4, r3.read_done());
  EXPECT_EQ(r3.wait(), Outcome::kUnsupportedRequest);
}

TEST_P(SessionTest, ResetPutsTheFabricAddressesBack) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  const uint32_t value = 99;
  s.remote->bar_write(0, MemoryFunction::kScratch, bytes_of(value));
  ASSERT_EQ(read32(*s.remote, 0, MemoryFunction::kScratch), value);
  Ended reset;
  s.remote->reset(reset.done());
  EXPECT_EQ(reset.wait(), Outcome::kSuccess);
  EXPECT_EQ(read32(*s.remote, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  EXPECT_EQ(read32(*s.remote, 0, MemoryFunction::kScratch), 0u);
  // The same through the device control register.
  s.remote->bar_write(0, MemoryFunction::kScratch, bytes_of(value));
  const uint16_t express = *s.remote->config().find_capability(0x10);
  Ended flr;
  s.remote->config_write(express + 8u, 2, 1u << 15, flr.done());
  EXPECT_EQ(flr.wait(), Outcome::kSuccess);
  EXPECT_EQ(read32(*s.remote, 0, MemoryFunction::kScratch), 0u);
}

TEST_P(SessionTest, CloseIsOrderlyAtBothEnds) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  s.remote->close();
  EXPECT_FALSE(s.remote->alive());
  EXPECT_EQ(s.losses, 0) << "close() is not a loss";
  ASSERT_TRUE(eventually([&] { return s.box_ended == 1; }));
  EXPECT_TRUE(absl::IsCancelled(s.end())) << s.end();
  EXPECT_EQ(s.function.upstream.load(), nullptr);
  Ended after;
  s.remote->bar_read(0, 0, 4, after.read_done());
  EXPECT_EQ(after.wait(), Outcome::kLinkDown);
  uint32_t value = 0;
  EXPECT_EQ(s.remote->bar_read_wait(0, 0, std::as_writable_bytes(std::span(&value, 1))), Outcome::kLinkDown);
  EXPECT_EQ(value, 0xffffffffu);
}

TEST_P(SessionTest, CountersAddUp) {
  Joined s(transports(), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  for (int i = 0; i < 100; ++i) read32(*s.remote, 0, 0);
  const SessionStats stats = s.remote->stats();
  EXPECT_GE(stats.non_posted_issued, 100u);
  EXPECT_EQ(stats.non_posted_issued, stats.completed_success + stats.completed_ur + stats.completed_crs +
                                         stats.completed_ca + stats.completed_cto + stats.completed_poisoned +
                                         stats.completed_link_down);
  EXPECT_EQ(stats.malformed, 0u);
  EXPECT_GE(s.heard, 1);
}

}  // namespace
}  // namespace dxpu::fabric::testing
