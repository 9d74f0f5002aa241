// Channels that do what they should: both modes, order, many reads in flight, two at once.

#include <random>

#include "proxy/gpu/crc32c.h"
#include "tests/gpu/gpu_fixture.h"

namespace dxpu::gpu {
namespace {

class ChannelTest : public GpuFixture {
 protected:
  void SetUp() override {
    GpuFixture::SetUp();
    std::mt19937_64 random(3);
    for (size_t at = 0; at < kRings; at += 8) {
      const uint64_t word = random();
      std::memcpy(host.memory.data() + at, &word, 8);
    }
  }
  std::vector<std::byte> memory(uint64_t offset, uint64_t bytes) {
    std::vector<std::byte> out;
    for (uint64_t at = 0; at < bytes; at += 4096) {
      gpu->bar_read(
          DXGPU_BAR_MEMORY, offset + at, static_cast<uint32_t>(std::min<uint64_t>(4096, bytes - at)),
          [&](function::Outcome, std::span<const std::byte> data) { out.insert(out.end(), data.begin(), data.end()); });
    }
    return out;
  }
  bool same(uint64_t device, uint64_t host_offset, uint64_t bytes) {
    const auto expected = host.at(host_offset, bytes);
    const auto found = memory(device, bytes);
    return std::equal(found.begin(), found.end(), expected.begin(), expected.end());
  }
};

TEST_F(ChannelTest, RingCopiesBothWaysAndFences) {
  open_ring(0);
  run(0,
      {copy_command(DXGPU_OP_COPY_IN, 4096, kBase + 3, 300001),
       copy_command(DXGPU_OP_COPY_OUT, 4096, kBase + (1 << 20), 300001), fence_command(0xf00d, kBase + (2 << 20), 7)});
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(same(4096, 3, 300001));
  EXPECT_EQ(std::memcmp(host.memory.data() + 3, host.memory.data() + (1 << 20), 300001), 0);
  EXPECT_EQ(host.word(2 << 20), 0xf00du);
  EXPECT_EQ(read<uint64_t>(user(0, DXGPU_USER_LAST_FENCE)), 0xf00du);
  EXPECT_EQ(read<uint64_t>(control(0, DXGPU_CH_COMMANDS)), 3u);
  ASSERT_TRUE(eventually([&] { return host.count("vector", 7) == 1; }));
  // Data, then the fence, then the interrupt.
  const auto events = host.events();
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back().what, "vector");
  EXPECT_EQ(events[events.size() - 2].value, kBase + (2 << 20));
  for (size_t i = 0; i + 2 < events.size(); ++i) EXPECT_LT(events[i].value, kBase + (2 << 20));
}

TEST_F(ChannelTest, RingWrapsManyTimes) {
  open_ring(0);
  for (uint32_t round = 0; round < 40; ++round) {
    for (uint32_t i = 0; i < 11; ++i) put(0, fill_command(round * 1024 + i * 8, 8, round * 11 + i + 1));
    doorbell(0);
    ASSERT_TRUE(finished(0));
  }
  EXPECT_EQ(read<uint64_t>(39 * 1024 + 80, DXGPU_BAR_MEMORY), 440u);
  EXPECT_EQ(read(control(0, DXGPU_CH_GET)), 440u);
  EXPECT_EQ(counter(DXGPU_COUNTER_COMMANDS), 440u);
}

TEST_F(ChannelTest, PushFillsTheApertureAndWraps) {
  open_push(2);
  for (uint32_t round = 0; round < 5; ++round) {
    for (uint32_t i = 0; i < 31; ++i) push(2, fill_command(i * 8, 8, round * 100 + i));
    doorbell(2);
    ASSERT_TRUE(finished(2));
  }
  EXPECT_EQ(read<uint64_t>(30 * 8, DXGPU_BAR_MEMORY), 430u);
  EXPECT_EQ(host.reads(), 0u);  // nothing was fetched
}

TEST_F(ChannelTest, PushSlotsTakeAnyWriteSize) {
  open_push(0);
  const Command command = fill_command(64, 8, 5);
  for (size_t i = 0; i < sizeof command; ++i) write<uint8_t>(user(0, DXGPU_USER_PUSH) + i, command.bytes[i]);
  puts[0] = 1;
  doorbell(0);
  ASSERT_TRUE(finished(0));
  EXPECT_EQ(read<uint64_t>(64, DXGPU_BAR_MEMORY), 5u);
}

TEST_F(ChannelTest, LargeCopiesKeepManyReadsInFlight) {
  open_push(0);
  host.hold();
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 3 << 20));
  doorbell(0);
  ASSERT_TRUE(host.wait_held(256 * 4096));
  EXPECT_GE(host.max_outstanding_bytes(), 256u * 4096u);
  EXPECT_EQ(read(user(0, DXGPU_USER_GET)), 0u);
  host.release(function::Outcome::kSuccess, /*backwards=*/true);
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(same(0, 0, 3 << 20));
}

TEST_F(ChannelTest, SmallCopiesElsewhereAreInFlightTogetherAndRetireInOrder) {
  open_push(0);
  host.hold();
  for (uint64_t i = 0; i < 20; ++i) push(0, copy_command(DXGPU_OP_COPY_IN, i * 4096, kBase + i * 8192, 4096));
  push(0, fence_command(1, kBase + (3 << 20)));
  doorbell(0);
  ASSERT_TRUE(host.wait_held(20 * 4096));
  EXPECT_TRUE(host.events().empty());
  host.release(function::Outcome::kSuccess, /*backwards=*/true);
  ASSERT_TRUE(finished(0));
  for (uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(same(i * 4096, i * 8192, 4096));
  EXPECT_EQ(host.word(3 << 20), 1u);
}

TEST_F(ChannelTest, CopiesToTheSamePlaceKeepTheirOrder) {
  open_push(0);
  host.hold();
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 8192));
  push(0, copy_command(DXGPU_OP_COPY_IN, 8191, kBase + 65536, 100));  // touches the last byte
  doorbell(0);
  ASSERT_TRUE(host.wait_held(8192));
  host.release(function::Outcome::kSuccess, true, /*stay=*/true);
  ASSERT_TRUE(host.wait_held(100));
  host.release();
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(same(0, 0, 8191));
  EXPECT_TRUE(same(8191, 65536, 100));
}

TEST_F(ChannelTest, ALaterCommandWaitsForTheCopyBeforeIt) {
  open_push(0);
  host.hold();
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 4096));
  Command local = make_command(DXGPU_OP_COPY_LOCAL);
  local.copy_local.destination = 8192;
  local.copy_local.bytes = 4096;
  push(0, local);
  push(0, fill_command(0, 4096, 0));
  doorbell(0);
  ASSERT_TRUE(host.wait_held(4096));
  host.release();
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(same(8192, 0, 4096));
  EXPECT_EQ(read<uint64_t>(0, DXGPU_BAR_MEMORY), 0u);
}

TEST_F(ChannelTest, OverlappingLocalCopyReadsFirst) {
  open_push(0);
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 8192));
  Command local = make_command(DXGPU_OP_COPY_LOCAL);
  local.copy_local = {.header = local.header, .destination = 100, .source = 0, .bytes = 8192, .reserved = {}};
  push(0, local);
  doorbell(0);
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(same(100, 0, 8192));
}

TEST_F(ChannelTest, InlineSegmentsScatterAndGather) {
  open_ring(0);
  for (const uint8_t opcode : {DXGPU_OP_COPY_IN, DXGPU_OP_COPY_OUT}) {
    Command command = make_command(opcode);
    command.copy_host.memory = 0;
    command.copy_host.bytes = 5000;
    command.copy_host.segments = 2;
    const uint64_t base = kBase + (opcode == DXGPU_OP_COPY_IN ? 0 : 1 << 20);
    command.copy_host.segment[0] = {base + 1, 4999, 0};
    command.copy_host.segment[1] = {base + 50000, 1, 0};
    put(0, command);
  }
  doorbell(0);
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(same(0, 1, 4999));
  EXPECT_TRUE(same(4999, 50000, 1));
  EXPECT_EQ(std::memcmp(host.memory.data() + 1, host.memory.data() + (1 << 20) + 1, 4999), 0);
  EXPECT_EQ(host.memory[50000], host.memory[(1 << 20) + 50000]);
}

TEST_F(ChannelTest, ChainedListsInHostMemory) {
  // Three blocks: 2 pieces + chain, 1 piece + chain, 3 pieces. Pieces of 1000 bytes, last ones first in host memory.
  auto* list = reinterpret_cast<dxgpu_segment*>(host.memory.data() + kRings - 65536);
  const uint64_t list_at = kBase + kRings - 65536;
  auto piece = [&](unsigned i) { return dxgpu_segment{kBase + (9 - i) * 2000, 1000, 0}; };
  list[0] = piece(0);
  list[1] = piece(1);
  list[2] = {list_at + 10 * 16, 2 * 16, DXGPU_SEGMENT_CHAIN};
  list[10] = piece(2);
  list[11] = {list_at + 20 * 16, 3 * 16, DXGPU_SEGMENT_CHAIN};
  for (unsigned i = 0; i < 3; ++i) list[20 + i] = piece(3 + i);
  open_ring(0);
  run(0, {list_command(DXGPU_OP_COPY_IN, 500, 6000, list_at, 3)});
  ASSERT_TRUE(finished(0));
  for (unsigned i = 0; i < 6; ++i) EXPECT_TRUE(same(500 + i * 1000, (9 - i) * 2000, 1000)) << i;
}

TEST_F(ChannelTest, ALongListIsReadInPieces) {
  constexpr uint32_t kPieces = 5000;  // more than one fetch of the list
  auto* list = reinterpret_cast<dxgpu_segment*>(host.memory.data() + kRings - (1 << 20));
  for (uint32_t i = 0; i < kPieces; ++i) list[i] = {kBase + (kPieces - 1 - i) * 64, 64, 0};
  open_ring(0);
  run(0, {list_command(DXGPU_OP_COPY_IN, 0, kPieces * 64, kBase + kRings - (1 << 20), kPieces)});
  ASSERT_TRUE(finished(0));
  for (uint32_t i = 0; i < kPieces; i += 500) EXPECT_TRUE(same(i * 64, (kPieces - 1 - i) * 64, 64)) << i;
}

TEST_F(ChannelTest, ChecksumsGoToTheHostAndToMemory) {
  open_ring(0);
  Command sum = make_command(DXGPU_OP_CHECKSUM, DXGPU_CHECKSUM_HOST | DXGPU_CHECKSUM_MEMORY, 77);
  sum.checksum.memory = 10;
  sum.checksum.bytes = 1000;
  sum.checksum.host_address = kBase + (2 << 20);
  sum.checksum.memory_address = 1 << 20;
  run(0, {copy_command(DXGPU_OP_COPY_IN, 10, kBase, 1000), sum});
  ASSERT_TRUE(finished(0));
  const uint64_t expected = crc32c(host.at(0, 1000)) | uint64_t{77} << 32;
  EXPECT_EQ(host.word(2 << 20), expected);
  EXPECT_EQ(read<uint64_t>(1 << 20, DXGPU_BAR_MEMORY), expected);
}

TEST_F(ChannelTest, ChannelsDoNotWaitForEachOther) {
  open_push(0);
  open_push(63);
  host.hold();
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 4096));
  doorbell(0);
  ASSERT_TRUE(host.wait_held(4096));
  push(63, fill_command(8192, 8, 4));
  push(63, fence_command(5, kBase + (2 << 20), 9));
  doorbell(63);
  ASSERT_TRUE(finished(63));
  EXPECT_EQ(host.word(2 << 20), 5u);
  EXPECT_EQ(read(user(0, DXGPU_USER_GET)), 0u);
  host.release();
  ASSERT_TRUE(finished(0));
}

TEST_F(ChannelTest, AllChannelsWorkAtOnce) {
  for (unsigned c = 0; c < 32; ++c) open_ring(c);
  for (unsigned c = 0; c < 32; ++c) {
    run(c, {copy_command(DXGPU_OP_COPY_IN, c * 65536, kBase + c * 1000, 60000),
            copy_command(DXGPU_OP_COPY_OUT, c * 65536, kBase + (2 << 20) + c * 60000, 60000),
            fence_command(c + 1, kBase + kRings - 4096 + c * 8, static_cast<int>(c))});
  }
  for (unsigned c = 0; c < 32; ++c) {
    ASSERT_TRUE(finished(c)) << c;
    EXPECT_EQ(host.word(kRings - 4096 + c * 8), c + 1);
    EXPECT_TRUE(same(c * 65536, c * 1000, 60000)) << c;
  }
}

TEST_F(ChannelTest, DisableStopsAndEnableStartsAnew) {
  open_ring(0);
  run(0, {fence_command(9, kBase)});
  ASSERT_TRUE(finished(0));
  write<uint32_t>(control(0, DXGPU_CH_CONTROL), 0);
  ASSERT_TRUE(in_state(0, DXGPU_STATE_DISABLED));
  EXPECT_EQ(read(control(0, DXGPU_CH_GET)), 0u);
  EXPECT_EQ(read<uint64_t>(control(0, DXGPU_CH_RING_BASE)), ring(0));  // kept: only RESET clears
  const uint64_t dropped = counter(DXGPU_COUNTER_DROPPED_WRITES);
  doorbell(0);
  EXPECT_EQ(counter(DXGPU_COUNTER_DROPPED_WRITES), dropped + 1);
  EXPECT_EQ(read(DXGPU_REG_INTERRUPT_STATUS), DXGPU_INTERRUPT_DROPPED_DOORBELL);
  write<uint32_t>(control(0, DXGPU_CH_CONTROL), DXGPU_CH_ENABLE);
  puts[0] = 0;
  run(0, {fence_command(10, kBase)});
  ASSERT_TRUE(finished(0));
  write<uint32_t>(control(0, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
  ASSERT_TRUE(in_state(0, DXGPU_STATE_DISABLED));
  EXPECT_EQ(read<uint64_t>(control(0, DXGPU_CH_RING_BASE)), 0u);
}

TEST_F(ChannelTest, SetupIsFixedWhileRunning) {
  open_ring(0);
  write<uint64_t>(control(0, DXGPU_CH_RING_BASE), 0);
  write<uint32_t>(control(0, DXGPU_CH_MODE), DXGPU_MODE_PUSH);
  EXPECT_EQ(read<uint64_t>(control(0, DXGPU_CH_RING_BASE)), ring(0));
  EXPECT_EQ(read(control(0, DXGPU_CH_MODE)), DXGPU_MODE_RING);
  write<uint64_t>(user(0, DXGPU_USER_PUSH), 1);  // no push slots in ring mode
  EXPECT_EQ(read<uint64_t>(user(0, DXGPU_USER_PUSH)), 0u);
}

}  // namespace
}  // namespace dxpu::gpu
