// Channels that are misused, and hosts that do not answer: one channel ends, nothing else does.

#include <random>

#include "tests/gpu/gpu_fixture.h"

namespace dxpu::gpu {
namespace {

constexpr uint64_t kLast = ~uint64_t{0};

class HostileTest : public GpuFixture {
 protected:
  // The command stops the channel with this fault, and the one before it has still been done.
  void expect_fault(const Command& command, uint32_t code) {
    open_ring(0, /*fault_vector=*/1);
    const unsigned raised = host.count("vector", 1);
    Command bad = command;
    bad.header.cookie = 0xc00c1e;
    run(0, {fill_command(0, 8, ++marker_), bad, fill_command(0, 8, 0)});
    ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR));
    EXPECT_EQ(fault_code(0), code);
    EXPECT_EQ(read(control(0, DXGPU_CH_FAULT_INDEX)), 1u);
    EXPECT_EQ(read(control(0, DXGPU_CH_FAULT_COOKIE)), 0xc00c1eu);
    EXPECT_EQ(read(control(0, DXGPU_CH_GET)), 1u);
    EXPECT_EQ(read<uint64_t>(0, DXGPU_BAR_MEMORY), marker_);
    EXPECT_EQ(read<uint64_t>(DXGPU_REG_CHANNEL_FAULTS), 1u);
    EXPECT_EQ(read(DXGPU_REG_LAST_FAULT_CODE), code);
    EXPECT_TRUE(eventually([&] { return host.count("vector", 1) == raised + 1; }));
    write<uint32_t>(control(0, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
    ASSERT_TRUE(in_state(0, DXGPU_STATE_DISABLED));
    EXPECT_EQ(fault_code(0), DXGPU_FAULT_NONE);
    EXPECT_EQ(read<uint64_t>(DXGPU_REG_CHANNEL_FAULTS), 0u);
  }
  dxgpu_segment* list(unsigned entry = 0) {
    return reinterpret_cast<dxgpu_segment*>(host.memory.data() + kList) + entry;
  }
  static constexpr uint64_t kList = 2 << 20;
  uint64_t marker_ = 100;
};

TEST_F(HostileTest, BadCommands) {
  expect_fault(make_command(DXGPU_OP_INVALID), DXGPU_FAULT_INVALID_OPCODE);
  expect_fault(make_command(200), DXGPU_FAULT_INVALID_OPCODE);
  expect_fault(make_command(DXGPU_OP_NOP, 1), DXGPU_FAULT_INVALID_FLAGS);
  expect_fault(copy_command(DXGPU_OP_COPY_IN, kMemory - 4, kBase, 8), DXGPU_FAULT_MEMORY_RANGE);
  expect_fault(copy_command(DXGPU_OP_COPY_IN, kLast - 3, kBase, 8), DXGPU_FAULT_MEMORY_RANGE);
  expect_fault(copy_command(DXGPU_OP_COPY_OUT, 0, kLast - 3, 8), DXGPU_FAULT_HOST_RANGE);
  expect_fault(copy_command(DXGPU_OP_COPY_IN, 0, 0x1000, 8), DXGPU_FAULT_DMA_READ);  // nothing mapped there
  expect_fault(fill_command(8, kLast, 0), DXGPU_FAULT_MEMORY_RANGE);
  Command fence = fence_command(1, kBase + 4);
  expect_fault(fence, DXGPU_FAULT_HOST_RANGE);
  fence = fence_command(1, kBase, DXGPU_VECTORS);
  expect_fault(fence, DXGPU_FAULT_VECTOR);
  EXPECT_EQ(counter(DXGPU_COUNTER_FAULTS), 10u);
}

TEST_F(HostileTest, BadLists) {
  const uint64_t at = kBase + kList;
  // A chain that leads to itself, alone and with pieces on the way.
  list()[0] = {at, 16, DXGPU_SEGMENT_CHAIN};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  list()[0] = {kBase, 1, 0};
  list()[1] = {at, 32, DXGPU_SEGMENT_CHAIN};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, kMemory - 4096, at, 2), DXGPU_FAULT_SEGMENTS);
  // A chain in the middle, pieces of nothing, pieces that wrap, unknown flags, a crooked chain.
  list()[0] = {at + 64, 16, DXGPU_SEGMENT_CHAIN};
  list()[1] = {kBase, 4096, 0};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 2), DXGPU_FAULT_SEGMENTS);
  list()[0] = {kBase, 0, 0};
  expect_fault(list_command(DXGPU_OP_COPY_OUT, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  list()[0] = {kLast - 100, 4096, 0};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_HOST_RANGE);
  list()[0] = {kBase, 4096, 4};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  list()[0] = {at + 64, 24, DXGPU_SEGMENT_CHAIN};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  list()[0] = {at + 65, 16, DXGPU_SEGMENT_CHAIN};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  // Too short, too long, unmapped, and a chain to an unmapped place.
  list()[0] = {kBase, 4095, 0};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  list()[0] = {kBase, 4097, 0};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_SEGMENTS);
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, 0x1000, 1), DXGPU_FAULT_DMA_READ);
  list()[0] = {0x1000, 16, DXGPU_SEGMENT_CHAIN};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 4096, 4096, at, 1), DXGPU_FAULT_DMA_READ);
}

TEST_F(HostileTest, MoreSegmentsThanACommandMayHave) {
  // 65535 pieces and a chain to two more: each block is fine, the sum is not.
  for (uint32_t i = 0; i < DXGPU_SEGMENTS_MAX - 1; ++i) list()[i] = {kBase, 1, 0};
  const uint64_t more = kBase + (1 << 20);
  list()[DXGPU_SEGMENTS_MAX - 1] = {more, 32, DXGPU_SEGMENT_CHAIN};
  auto* rest = reinterpret_cast<dxgpu_segment*>(host.memory.data() + (1 << 20));
  rest[0] = rest[1] = {kBase, 1, 0};
  expect_fault(list_command(DXGPU_OP_COPY_IN, 8, DXGPU_SEGMENTS_MAX + 1, kBase + kList, DXGPU_SEGMENTS_MAX),
               DXGPU_FAULT_SEGMENTS);
}

TEST_F(HostileTest, ImpossibleSetups) {
  struct Case {
    uint32_t mode;
    uint64_t base;
    uint32_t log2, vector;
  };
  for (const Case c :
       {Case{2, kBase, 4, DXGPU_NO_VECTOR}, Case{0, kBase + 8, 4, DXGPU_NO_VECTOR}, Case{0, kBase, 0, DXGPU_NO_VECTOR},
        Case{0, kBase, 17, DXGPU_NO_VECTOR}, Case{0, kBase, 64, DXGPU_NO_VECTOR}, Case{0, kBase, ~0u, DXGPU_NO_VECTOR},
        Case{0, kLast & ~63ull, 4, DXGPU_NO_VECTOR}, Case{0, kBase, 4, DXGPU_VECTORS}}) {
    write<uint32_t>(control(3, DXGPU_CH_MODE), c.mode);
    write<uint64_t>(control(3, DXGPU_CH_RING_BASE), c.base);
    write<uint32_t>(control(3, DXGPU_CH_RING_LOG2), c.log2);
    write<uint32_t>(control(3, DXGPU_CH_FAULT_VECTOR), c.vector);
    write<uint32_t>(control(3, DXGPU_CH_CONTROL), DXGPU_CH_ENABLE);
    EXPECT_EQ(read(control(3, DXGPU_CH_STATE)), DXGPU_STATE_ERROR);
    EXPECT_EQ(fault_code(3), DXGPU_FAULT_SETUP);
    write<uint32_t>(user(3, DXGPU_USER_DOORBELL), 1);
    write<uint32_t>(control(3, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
    ASSERT_TRUE(in_state(3, DXGPU_STATE_DISABLED));
  }
}

TEST_F(HostileTest, DoorbellsBeyondTheRingOrBackwards) {
  for (const uint32_t put : {17u, 1000u, ~0u, 0x80000000u}) {
    open_ring(0);
    write<uint32_t>(user(0, DXGPU_USER_DOORBELL), put);
    ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR)) << put;
    EXPECT_EQ(fault_code(0), DXGPU_FAULT_DOORBELL);
    write<uint32_t>(control(0, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
    ASSERT_TRUE(in_state(0, DXGPU_STATE_DISABLED));
  }
  open_push(1);
  write<uint32_t>(user(1, DXGPU_USER_DOORBELL), DXGPU_PUSH_SLOTS + 1);
  EXPECT_TRUE(in_state(1, DXGPU_STATE_ERROR));
}

TEST_F(HostileTest, BusMasterOff) {
  open_ring(0);
  put(0, make_command(DXGPU_OP_NOP));
  config_write(0x04, 2, 0x2);
  const uint64_t reads = host.reads();
  doorbell(0);
  ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR));
  EXPECT_EQ(fault_code(0), DXGPU_FAULT_BUS_MASTER_OFF);
  EXPECT_EQ(host.reads(), reads);
  for (const Command& command : {copy_command(DXGPU_OP_COPY_IN, 0, kBase, 8),
                                 copy_command(DXGPU_OP_COPY_OUT, 0, kBase, 8), fence_command(1, kBase)}) {
    open_push(1);
    push(1, command);
    doorbell(1);
    ASSERT_TRUE(in_state(1, DXGPU_STATE_ERROR));
    EXPECT_EQ(fault_code(1), DXGPU_FAULT_BUS_MASTER_OFF);
    write<uint32_t>(control(1, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
    ASSERT_TRUE(in_state(1, DXGPU_STATE_DISABLED));
  }
  EXPECT_EQ(host.reads(), reads);
  EXPECT_TRUE(host.events().empty());
}

TEST_F(HostileTest, HowReadsFailIsTold) {
  const std::pair<function::Outcome, uint32_t> cases[] = {
      {function::Outcome::kUnsupportedRequest, DXGPU_FAULT_DMA_READ},
      {function::Outcome::kCompleterAbort, DXGPU_FAULT_DMA_READ},
      {function::Outcome::kPoisoned, DXGPU_FAULT_DMA_READ},
      {function::Outcome::kTimeout, DXGPU_FAULT_DMA_TIMEOUT},
      {function::Outcome::kLinkDown, DXGPU_FAULT_DMA_TIMEOUT},
  };
  for (const auto& [outcome, code] : cases) {
    // In the data, and in the fetch of the ring.
    open_push(0);
    host.hold();
    push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 4 << 20 >> 2));
    doorbell(0);
    ASSERT_TRUE(host.wait_held(1 << 20));
    host.release(outcome);
    ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR));
    EXPECT_EQ(fault_code(0), code);
    EXPECT_GE(read<uint64_t>(control(0, DXGPU_CH_FAULT_ADDRESS)), kBase);
    open_ring(1);
    host.hold();
    run(1, {make_command(DXGPU_OP_NOP)});
    ASSERT_TRUE(host.wait_held(64));
    host.release(outcome);
    ASSERT_TRUE(in_state(1, DXGPU_STATE_ERROR));
    EXPECT_EQ(fault_code(1), code);
    EXPECT_EQ(read<uint64_t>(control(1, DXGPU_CH_FAULT_ADDRESS)), ring(1));
    for (unsigned c : {0u, 1u}) {
      write<uint32_t>(control(c, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
      ASSERT_TRUE(in_state(c, DXGPU_STATE_DISABLED));
    }
  }
}

TEST_F(HostileTest, AHostThatNeverAnswers) {
  GpuOptions options{.memory_bytes = kMemory};
  options.copy.dma_deadline = absl::Milliseconds(50);
  options.stop_deadline = absl::Milliseconds(100);
  make(options);
  open_push(0);
  host.hold();
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 3 << 20));
  doorbell(0);
  ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR));
  EXPECT_EQ(fault_code(0), DXGPU_FAULT_DMA_TIMEOUT);
  // Reads that may still write into the memory: it can not be called wiped.
  EXPECT_EQ(gpu->scrub().code(), absl::StatusCode::kDeadlineExceeded);
  gpu->connect(nullptr);
  gpu.reset();     // ends by its own deadline
  host.release();  // and late answers find their memory
}

TEST_F(HostileTest, AFaultIsOneChannelsOnly) {
  open_ring(0);
  open_ring(1);
  run(0, {make_command(DXGPU_OP_INVALID)});
  ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR));
  run(1, {fill_command(0, 8, 6), fence_command(1, kBase, 2)});
  ASSERT_TRUE(finished(1));
  EXPECT_EQ(host.word(0), 1u);
  EXPECT_EQ(read(control(1, DXGPU_CH_STATE)), DXGPU_STATE_RUNNING);
  const uint64_t before = read<uint64_t>(control(0, DXGPU_CH_COMMANDS));
  run(0, {make_command(DXGPU_OP_NOP)});  // dropped
  EXPECT_EQ(read<uint64_t>(control(0, DXGPU_CH_COMMANDS)), before);
}

TEST_F(HostileTest, TheFaultInterruptIsRaisedOnceUntilCleared) {
  write<uint32_t>(DXGPU_REG_INTERRUPT_ENABLE, DXGPU_INTERRUPT_CHANNEL_FAULT);
  for (unsigned c : {0u, 1u}) {
    open_push(c);
    push(c, make_command(DXGPU_OP_INVALID));
    doorbell(c);
    ASSERT_TRUE(in_state(c, DXGPU_STATE_ERROR));
  }
  EXPECT_TRUE(eventually([&] { return host.count("vector", 0) == 1; }));
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_CHANNEL_FAULTS), 3u);
  write<uint32_t>(DXGPU_REG_INTERRUPT_STATUS, DXGPU_INTERRUPT_CHANNEL_FAULT);
  EXPECT_EQ(read(DXGPU_REG_INTERRUPT_STATUS), 0u);
  open_push(2);
  push(2, make_command(DXGPU_OP_INVALID));
  doorbell(2);
  EXPECT_TRUE(eventually([&] { return host.count("vector", 0) == 2; }));
}

TEST_F(HostileTest, ChannelResetInMidCopyLeavesTheOtherAlone) {
  open_push(0);
  open_push(1);
  host.hold();
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 3 << 20));
  push(0, fence_command(1, kBase + (3 << 20), 4));
  doorbell(0);
  ASSERT_TRUE(host.wait_held(1 << 20));
  write<uint32_t>(control(0, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
  EXPECT_EQ(read(control(0, DXGPU_CH_STATE)), DXGPU_STATE_STOPPING);
  write<uint32_t>(control(0, DXGPU_CH_CONTROL), DXGPU_CH_ENABLE);  // too early: dropped
  push(1, fill_command(0x3ffff8, 8, 8));
  doorbell(1);
  ASSERT_TRUE(finished(1));
  host.release();
  ASSERT_TRUE(in_state(0, DXGPU_STATE_DISABLED));
  EXPECT_EQ(host.count("vector", 4), 0u);
  open_push(0);
  push(0, make_command(DXGPU_OP_NOP));
  doorbell(0);
  EXPECT_TRUE(finished(0));
}

// Whatever is written where, the function lives and another channel works.
TEST_F(HostileTest, RandomRegisterWritesAndCommands) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 3000; ++round) {
    const unsigned c = random() % 4;
    switch (random() % 8) {
      case 0:
        write<uint32_t>(control(c, (random() % 20) * 4), static_cast<uint32_t>(random()));
        break;
      case 1:
        write<uint32_t>(control(c, DXGPU_CH_CONTROL), random() % 4);
        break;
      case 2:
        write<uint32_t>(user(c, DXGPU_USER_DOORBELL),
                        read(user(c, DXGPU_USER_GET)) + static_cast<uint32_t>(random() % 20));
        break;
      case 3:
        write<uint64_t>(control(c, DXGPU_CH_RING_BASE), kBase + random() % 4096 * 64);
        write<uint32_t>(control(c, DXGPU_CH_RING_LOG2), random() % 8);
        write<uint32_t>(control(c, DXGPU_CH_MODE), random() % 2);
        write<uint32_t>(control(c, DXGPU_CH_CONTROL), DXGPU_CH_ENABLE);
        break;
      case 4: {
        Command command = make_command(static_cast<uint8_t>(random() % 9), random() % 8 == 0 ? 1 : 0);
        for (size_t at = 8; at < sizeof command; at += 8) {
          const uint64_t word = random() % 3 == 0 ? kBase + random() % (8 << 20) : random() % 65536;
          std::memcpy(command.bytes + at, &word, 8);
        }
        push(c, command);
        break;
      }
      case 5:
        write<uint64_t>(DXGPU_MSIX_TABLE + random() % 2048, random());
        break;
      case 6:
        write<uint32_t>(random() % DXGPU_REGISTER_BYTES, static_cast<uint32_t>(random()));
        break;
      default:
        write<uint64_t>(user(c, 0x800 + random() % 2040), random());
    }
  }
  ASSERT_TRUE(eventually([&] { return read(DXGPU_REG_STATUS) == DXGPU_STATUS_READY; }));
  write<uint32_t>(control(40, DXGPU_CH_CONTROL), DXGPU_CH_RESET);
  ASSERT_TRUE(in_state(40, DXGPU_STATE_DISABLED));
  open_push(40);
  push(40, fence_command(0xa11fe, kBase + (7 << 20)));
  doorbell(40);
  EXPECT_TRUE(finished(40));
}

}  // namespace
}  // namespace dxpu::gpu
