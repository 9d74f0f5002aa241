// A GPU function on a TestHost, driven by hand: registers, a ring in host memory, commands.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "absl/time/clock.h"
#include "proxy/gpu/gpu_function.h"
#include "tests/gpu/test_host.h"

namespace dxpu::gpu {

inline Command make_command(uint8_t opcode, uint8_t flags = 0, uint32_t cookie = 0) {
  Command command;
  std::memset(&command, 0, sizeof command);
  command.header.opcode = opcode;
  command.header.flags = flags;
  command.header.cookie = cookie;
  return command;
}

inline Command copy_command(uint8_t opcode, uint64_t memory, uint64_t host, uint32_t bytes) {
  Command command = make_command(opcode);
  command.copy_host.memory = memory;
  command.copy_host.bytes = bytes;
  command.copy_host.segments = 1;
  command.copy_host.segment[0] = {host, bytes, 0};
  return command;
}

inline Command list_command(uint8_t opcode, uint64_t memory, uint64_t bytes, uint64_t list, uint32_t count) {
  Command command = make_command(opcode, DXGPU_COPY_LIST);
  command.copy_host.memory = memory;
  command.copy_host.bytes = bytes;
  command.copy_host.segments = count;
  command.copy_host.segment[0].address = list;
  return command;
}

inline Command fill_command(uint64_t memory, uint64_t bytes, uint64_t pattern) {
  Command command = make_command(DXGPU_OP_FILL);
  command.fill.memory = memory;
  command.fill.bytes = bytes;
  command.fill.pattern = pattern;
  command.fill.pattern_bytes = 8;
  return command;
}

inline Command fence_command(uint64_t value, uint64_t host, int vector = -1) {
  Command command = make_command(DXGPU_OP_FENCE, DXGPU_FENCE_HOST | (vector >= 0 ? DXGPU_FENCE_INTERRUPT : 0));
  command.fence.value = value;
  command.fence.host_address = host;
  command.fence.vector = vector >= 0 ? static_cast<uint32_t>(vector) : 0;
  return command;
}

class GpuFixture : public testing::Test {
 protected:
  static constexpr uint64_t kMemory = uint64_t{4} << 20;
  static constexpr uint64_t kBase = TestHost::kBase;
  // Rings of channel c at kRings + c * 64 KiB, at the end of host memory.
  static constexpr uint64_t kRings = uint64_t{4} << 20;
  static constexpr uint32_t kRingLog2 = 4;

  void SetUp() override { make({.memory_bytes = kMemory}); }
  void make(const GpuOptions& options) {
    gpu.reset();
    auto made = GpuFunction::create(options);
    ASSERT_TRUE(made.ok()) << made.status();
    gpu = *std::move(made);
    gpu->connect(&host);
    config_write(0x04, 2, 0x6);
    msix(0x8000);
    for (uint32_t& put : puts) put = 0;
  }
  void TearDown() override {
    if (gpu == nullptr) return;
    gpu->connect(nullptr);
    host.release();  // nothing may stay behind
  }

  void config_write(uint32_t offset, unsigned size, uint32_t value) {
    gpu->config_write(offset, size, value,
                      [](function::Outcome outcome) { EXPECT_EQ(outcome, function::Outcome::kSuccess); });
  }
  void msix(uint16_t control) {
    const auto capability = gpu->config().find_capability(0x11);
    ASSERT_TRUE(capability);
    config_write(*capability + 2, 2, control);
  }
  template <typename T = uint32_t>
  T read(uint64_t offset, unsigned bar = DXGPU_BAR_REGISTERS) {
    T value{};
    gpu->bar_read(bar, offset, sizeof value, [&](function::Outcome outcome, std::span<const std::byte> data) {
      EXPECT_EQ(outcome, function::Outcome::kSuccess);
      std::memcpy(&value, data.data(), sizeof value);
    });
    return value;
  }
  template <typename T = uint32_t>
  void write(uint64_t offset, T value, unsigned bar = DXGPU_BAR_REGISTERS) {
    gpu->bar_write(bar, offset, std::as_bytes(std::span(&value, 1)));
  }
  static uint64_t control(unsigned c, uint64_t reg) { return DXGPU_CHANNEL_BASE + c * DXGPU_PAGE + reg; }
  static uint64_t user(unsigned c, uint64_t reg) { return DXGPU_USER_BASE + c * DXGPU_PAGE + reg; }
  uint64_t ring(unsigned c) const { return kBase + kRings + uint64_t{c} * 65536; }

  void open_ring(unsigned c, uint32_t fault_vector = DXGPU_NO_VECTOR, uint32_t log2 = kRingLog2) {
    write<uint32_t>(control(c, DXGPU_CH_MODE), DXGPU_MODE_RING);
    write<uint64_t>(control(c, DXGPU_CH_RING_BASE), ring(c));
    write<uint32_t>(control(c, DXGPU_CH_RING_LOG2), log2);
    write<uint32_t>(control(c, DXGPU_CH_FAULT_VECTOR), fault_vector);
    write<uint32_t>(control(c, DXGPU_CH_CONTROL), DXGPU_CH_ENABLE);
    ASSERT_EQ(read(control(c, DXGPU_CH_STATE)), DXGPU_STATE_RUNNING);
    puts[c] = 0;
  }
  void open_push(unsigned c) {
    write<uint32_t>(control(c, DXGPU_CH_MODE), DXGPU_MODE_PUSH);
    write<uint32_t>(control(c, DXGPU_CH_CONTROL), DXGPU_CH_ENABLE);
    ASSERT_EQ(read(control(c, DXGPU_CH_STATE)), DXGPU_STATE_RUNNING);
    puts[c] = 0;
  }
  // Into the ring, without the doorbell.
  void put(unsigned c, const Command& command, uint32_t log2 = kRingLog2) {
    const uint64_t slot = puts[c]++ % (1u << log2);
    std::memcpy(host.memory.data() + (ring(c) - kBase) + slot * DXGPU_COMMAND_BYTES, &command, sizeof command);
  }
  void push(unsigned c, const Command& command) {
    write(user(c, DXGPU_USER_PUSH) + puts[c]++ % DXGPU_PUSH_SLOTS * DXGPU_COMMAND_BYTES, command);
  }
  void doorbell(unsigned c) { write<uint32_t>(user(c, DXGPU_USER_DOORBELL), puts[c]); }
  void run(unsigned c, std::initializer_list<Command> commands) {
    for (const Command& command : commands) put(c, command);
    doorbell(c);
  }

  template <typename Condition>
  static bool eventually(Condition condition) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!condition()) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Microseconds(200));
    }
    return true;
  }
  bool finished(unsigned c) {
    return eventually([&] { return read(user(c, DXGPU_USER_GET)) == puts[c]; });
  }
  bool in_state(unsigned c, uint32_t state) {
    return eventually([&] { return read(control(c, DXGPU_CH_STATE)) == state; });
  }
  uint32_t fault_code(unsigned c) { return read(control(c, DXGPU_CH_FAULT_CODE)); }
  uint64_t counter(dxgpu_counter which) { return read<uint64_t>(DXGPU_REG_COUNTERS + which * 8); }

  TestHost host;
  std::unique_ptr<GpuFunction> gpu;
  uint32_t puts[DXGPU_CHANNELS_MAX] = {};
};

}  // namespace dxpu::gpu
