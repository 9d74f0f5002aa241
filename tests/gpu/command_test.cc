// Commands, checksums and memory: what needs no function.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "proxy/gpu/crc32c.h"
#include "proxy/gpu/engine/command_check.h"
#include "proxy/gpu/engine/device_memory.h"

extern "C" unsigned dxgpu_c_command_bytes(void);

namespace dxpu::gpu {
namespace {

TEST(CommandSet, IsTheSameInC) { EXPECT_EQ(dxgpu_c_command_bytes(), DXGPU_COMMAND_BYTES); }

TEST(Crc32c, KnownValue) {
  const std::string text = "123456789";
  const auto bytes = std::as_bytes(std::span(text));
  EXPECT_EQ(crc32c(bytes), 0xe3069283u);
  EXPECT_EQ(crc32c_table(bytes), 0xe3069283u);
  EXPECT_EQ(crc32c({}), 0u);
}

TEST(Crc32c, BothWaysAgreeAndPiecesChain) {
  std::mt19937 random(1);
  std::vector<std::byte> data(1000);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  const std::span<const std::byte> all(data);
  for (size_t length = 0; length < data.size(); length += 13) {
    EXPECT_EQ(crc32c(all.first(length)), crc32c_table(all.first(length)));
    EXPECT_EQ(crc32c(all.subspan(length), crc32c(all.first(length))), crc32c(all));
  }
}

constexpr uint64_t kMemory = 1 << 20;
constexpr uint32_t kOpcodes = 0xfe;

Command make(uint8_t opcode, uint8_t flags = 0) {
  Command command;
  std::memset(&command, 0, sizeof command);
  command.header.opcode = opcode;
  command.header.flags = flags;
  return command;
}

uint32_t verdict(const Command& command) {
  return check_command(command, {.memory_bytes = kMemory, .vectors = DXGPU_VECTORS, .opcodes = kOpcodes}).code;
}

TEST(CommandCheck, Opcodes) {
  EXPECT_EQ(verdict(make(DXGPU_OP_INVALID)), DXGPU_FAULT_INVALID_OPCODE);
  EXPECT_EQ(verdict(make(DXGPU_OP_NOP)), DXGPU_FAULT_NONE);
  EXPECT_EQ(verdict(make(DXGPU_OPCODES)), DXGPU_FAULT_INVALID_OPCODE);
  EXPECT_EQ(verdict(make(255)), DXGPU_FAULT_INVALID_OPCODE);
  Command command = make(DXGPU_OP_NOP);
  command.header.reserved = 1;
  EXPECT_EQ(verdict(command), DXGPU_FAULT_INVALID_FLAGS);
  // Announced by an engine, but unknown to the checks: not let through.
  EXPECT_EQ(check_command(make(20), {.memory_bytes = kMemory, .opcodes = ~0u}).code, DXGPU_FAULT_INVALID_OPCODE);
}

struct CopyCase {
  uint64_t memory, bytes;
  uint32_t segments;
  uint64_t address;
  uint32_t segment_bytes, segment_flags;
  uint8_t flags;
  uint32_t expected;
};

TEST(CommandCheck, HostCopies) {
  const uint64_t last = ~uint64_t{0};
  const CopyCase cases[] = {
      {0, 4096, 1, 0x1000, 4096, 0, 0, DXGPU_FAULT_NONE},
      {0, 0, 1, 0x1000, 4096, 0, 0, DXGPU_FAULT_MEMORY_RANGE},
      {kMemory, 1, 1, 0x1000, 1, 0, 0, DXGPU_FAULT_MEMORY_RANGE},
      {kMemory - 1, 2, 1, 0x1000, 2, 0, 0, DXGPU_FAULT_MEMORY_RANGE},
      {last, 1, 1, 0x1000, 1, 0, 0, DXGPU_FAULT_MEMORY_RANGE},
      {16, last - 8, 1, 0x1000, 1, 0, 0, DXGPU_FAULT_MEMORY_RANGE},  // offset + bytes wraps
      {0, 4096, 1, last - 4095, 4096, 0, 0, DXGPU_FAULT_HOST_RANGE},
      {0, 4096, 1, last, 4096, 0, 0, DXGPU_FAULT_HOST_RANGE},
      {0, 4096, 0, 0x1000, 4096, 0, 0, DXGPU_FAULT_SEGMENTS},
      {0, 4096, 3, 0x1000, 4096, 0, 0, DXGPU_FAULT_SEGMENTS},
      {0, 4096, 1, 0x1000, 4095, 0, 0, DXGPU_FAULT_SEGMENTS},  // wrong total
      {0, 4096, 1, 0x1000, 0, 0, 0, DXGPU_FAULT_SEGMENTS},
      {0, 4096, 1, 0x1000, 4096, DXGPU_SEGMENT_CHAIN, 0, DXGPU_FAULT_SEGMENTS},  // no chain inline
      {0, 4096, 1, 0x1000, 4096, 2, 0, DXGPU_FAULT_SEGMENTS},
      {0, 4096, 1, 0x1000, 4096, 0, 2, DXGPU_FAULT_INVALID_FLAGS},
      {0, 4096, 10, 0x1000, 0, 0, DXGPU_COPY_LIST, DXGPU_FAULT_NONE},
      {0, 4096, 10, 0x1008, 0, 0, DXGPU_COPY_LIST, DXGPU_FAULT_HOST_RANGE},
      {0, 4096, 10, last - 15, 0, 0, DXGPU_COPY_LIST, DXGPU_FAULT_HOST_RANGE},
      {0, 4096, 0, 0x1000, 0, 0, DXGPU_COPY_LIST, DXGPU_FAULT_SEGMENTS},
      {0, 4096, DXGPU_SEGMENTS_MAX + 1, 0x1000, 0, 0, DXGPU_COPY_LIST, DXGPU_FAULT_SEGMENTS},
      {0, 4096, ~0u, 0x1000, 0, 0, DXGPU_COPY_LIST, DXGPU_FAULT_SEGMENTS},
  };
  for (const uint8_t opcode : {DXGPU_OP_COPY_IN, DXGPU_OP_COPY_OUT}) {
    for (const CopyCase& c : cases) {
      Command command = make(opcode, c.flags);
      command.copy_host.memory = c.memory;
      command.copy_host.bytes = c.bytes;
      command.copy_host.segments = c.segments;
      command.copy_host.segment[0] = {c.address, c.segment_bytes, c.segment_flags};
      EXPECT_EQ(verdict(command), c.expected) << "case " << &c - cases;
    }
  }
}

TEST(CommandCheck, LocalCopyFillFenceChecksum) {
  Command copy = make(DXGPU_OP_COPY_LOCAL);
  copy.copy_local = {.header = copy.header, .destination = 0, .source = kMemory - 8, .bytes = 8, .reserved = {}};
  EXPECT_EQ(verdict(copy), DXGPU_FAULT_NONE);
  copy.copy_local.bytes = 9;
  EXPECT_EQ(verdict(copy), DXGPU_FAULT_MEMORY_RANGE);
  copy.copy_local.bytes = 8;
  copy.copy_local.destination = kMemory - 7;
  EXPECT_EQ(verdict(copy), DXGPU_FAULT_MEMORY_RANGE);
  copy.copy_local.destination = 0;
  copy.copy_local.reserved[3] = 1;
  EXPECT_EQ(verdict(copy), DXGPU_FAULT_INVALID_FLAGS);

  Command fill = make(DXGPU_OP_FILL);
  fill.fill.bytes = kMemory;
  for (uint32_t width = 0; width < 10; ++width) {
    fill.fill.pattern_bytes = width;
    const bool good = width == 1 || width == 2 || width == 4 || width == 8;
    EXPECT_EQ(verdict(fill), good ? DXGPU_FAULT_NONE : DXGPU_FAULT_INVALID_FLAGS) << width;
  }
  fill.fill.pattern_bytes = 8;
  fill.fill.memory = 1;
  EXPECT_EQ(verdict(fill), DXGPU_FAULT_MEMORY_RANGE);

  Command fence = make(DXGPU_OP_FENCE, DXGPU_FENCE_HOST | DXGPU_FENCE_MEMORY | DXGPU_FENCE_INTERRUPT);
  fence.fence.host_address = 0x1000;
  fence.fence.memory_address = kMemory - 8;
  fence.fence.vector = DXGPU_VECTORS - 1;
  EXPECT_EQ(verdict(fence), DXGPU_FAULT_NONE);
  fence.fence.vector = DXGPU_VECTORS;
  EXPECT_EQ(verdict(fence), DXGPU_FAULT_VECTOR);
  fence.fence.vector = 0;
  fence.fence.host_address = 0x1004;
  EXPECT_EQ(verdict(fence), DXGPU_FAULT_HOST_RANGE);
  fence.fence.host_address = ~uint64_t{0} - 7;
  EXPECT_EQ(verdict(fence), DXGPU_FAULT_HOST_RANGE);
  fence.fence.host_address = 0x1000;
  fence.fence.memory_address = kMemory;
  EXPECT_EQ(verdict(fence), DXGPU_FAULT_MEMORY_RANGE);
  fence.header.flags = 0x8;
  EXPECT_EQ(verdict(fence), DXGPU_FAULT_INVALID_FLAGS);

  Command sum = make(DXGPU_OP_CHECKSUM, DXGPU_CHECKSUM_MEMORY);
  sum.checksum.bytes = kMemory;
  EXPECT_EQ(verdict(sum), DXGPU_FAULT_NONE);
  sum.checksum.memory_address = 4;
  EXPECT_EQ(verdict(sum), DXGPU_FAULT_MEMORY_RANGE);
  sum.checksum.memory_address = 0;
  sum.checksum.bytes = kMemory + 1;
  EXPECT_EQ(verdict(sum), DXGPU_FAULT_MEMORY_RANGE);
}

TEST(CommandCheck, RandomCommandsHaveAVerdict) {
  std::mt19937_64 random(7);
  unsigned refused = 0;
  for (int i = 0; i < 100000; ++i) {
    Command command;
    for (size_t at = 0; at < sizeof command; at += 8) {
      const uint64_t word = random();
      std::memcpy(command.bytes + at, &word, 8);
    }
    command.header.opcode = static_cast<uint8_t>(random() % 10);
    refused += verdict(command) != DXGPU_FAULT_NONE ? 1 : 0;
  }
  EXPECT_GT(refused, 99000u);
}

TEST(Faults, HaveNames) {
  for (uint32_t code = 0; code < DXGPU_FAULTS; ++code) EXPECT_STRNE(name_of_fault(code), "unknown fault") << code;
  EXPECT_STREQ(name_of_fault(DXGPU_FAULTS), "unknown fault");
}

class DeviceMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/dxpu-gpu-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory_ = name;
    path_ = directory_ + "/vram";
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string directory_, path_;
};

TEST_F(DeviceMemoryTest, AFileOutlivesTheProcessAndAWipeIsReal) {
  constexpr uint64_t kBytes = 1 << 20;
  {
    auto memory = DeviceMemory::open(path_, kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_TRUE((*memory)->check_zero().ok());
    (*memory)->fill(kBytes - 4096, 4096, 0xa5, 1);
  }
  {
    auto memory = DeviceMemory::open(path_, kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    const absl::Status dirty = (*memory)->check_zero();
    EXPECT_EQ(dirty.code(), absl::StatusCode::kDataLoss);
    EXPECT_NE(dirty.message().find(std::to_string(kBytes - 4096)), std::string::npos) << dirty;
    ASSERT_TRUE((*memory)->wipe().ok());
    EXPECT_TRUE((*memory)->check_zero().ok());
  }
  // As another reader sees the file.
  std::ifstream file(path_, std::ios::binary);
  std::string content((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(content.size(), kBytes);
  EXPECT_EQ(content.find_first_not_of('\0'), std::string::npos);
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(DeviceMemoryTest, RefusesWrongSizesSecondUsersAndOtherFiles) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{3} << 20, uint64_t{4096}, uint64_t{1} << 41}) {
    EXPECT_EQ(DeviceMemory::open("", bytes).status().code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
  auto first = DeviceMemory::open(path_, 1 << 20);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(DeviceMemory::open(path_, 1 << 20).status().code(), absl::StatusCode::kFailedPrecondition);
  first->reset();
  EXPECT_EQ(DeviceMemory::open(path_, 1 << 21).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(DeviceMemory::open(directory_, 1 << 20).ok());
  EXPECT_FALSE(DeviceMemory::open(directory_ + "/no/such", 1 << 20).ok());
  ASSERT_EQ(::symlink(path_.c_str(), (directory_ + "/link").c_str()), 0);
  EXPECT_FALSE(DeviceMemory::open(directory_ + "/link", 1 << 20).ok());
  if (std::filesystem::space(directory_).available < uint64_t{1} << 40) {
    EXPECT_EQ(DeviceMemory::open(directory_ + "/huge", uint64_t{1} << 40).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(DeviceMemoryTest, FillsRepeatThePatternAndCutIt) {
  auto memory = DeviceMemory::open("", 1 << 16);
  ASSERT_TRUE(memory.ok());
  const uint64_t pattern = 0x0807060504030201;
  for (const uint32_t width : {1u, 2u, 4u, 8u}) {
    for (const uint64_t bytes : {1u, 3u, 8u, 100u, 1027u}) {
      (*memory)->fill(0, 2048, 0, 1);
      (*memory)->fill(5, bytes, pattern, width);
      const auto range = (*memory)->range(0, 2048);
      for (uint64_t i = 0; i < range.size(); ++i) {
        const uint64_t expected = i < 5 || i >= 5 + bytes ? 0 : 1 + (i - 5) % width;
        ASSERT_EQ(static_cast<uint64_t>(range[i]), expected) << "width " << width << " bytes " << bytes << " at " << i;
      }
    }
  }
}

}  // namespace
}  // namespace dxpu::gpu
