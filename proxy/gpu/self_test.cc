#include "proxy/gpu/self_test.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proxy/gpu/command_set.h"
#include "proxy/gpu/crc32c.h"
#include "proxy/gpu/engine/engine.h"

namespace dxpu::gpu {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(10);
constexpr uint64_t kSource = 0, kTarget = 8192, kResults = 16384, kBytes = 4096, kTouched = 20480;
constexpr uint64_t kPattern = 0x0123456789abcdef, kFenceValue = 0x5e1f7e57;

template <typename T>
void write(function::Function& gpu, uint64_t offset, const T& value) {
  gpu.bar_write(DXGPU_BAR_REGISTERS, offset, std::as_bytes(std::span(&value, 1)));
}

template <typename T>
T read(function::Function& gpu, unsigned bar, uint64_t offset) {
  T value{};
  // The GPU function answers before the call returns.
  gpu.bar_read(bar, offset, sizeof value, [&](function::Outcome outcome, std::span<const std::byte> data) {
    if (outcome == function::Outcome::kSuccess) std::memcpy(&value, data.data(), sizeof value);
  });
  return value;
}

}  // namespace

absl::Status run_self_test(function::Function& gpu) {
  std::vector<dxgpu_command> commands(5);
  commands[0].fill = {.header = {.opcode = DXGPU_OP_FILL, .flags = 0, .reserved = 0, .cookie = 1},
                      .memory = kSource,
                      .bytes = kBytes,
                      .pattern = kPattern,
                      .pattern_bytes = 8,
                      .reserved32 = 0,
                      .reserved = {}};
  commands[1].copy_local = {.header = {.opcode = DXGPU_OP_COPY_LOCAL, .flags = 0, .reserved = 0, .cookie = 2},
                            .destination = kTarget,
                            .source = kSource,
                            .bytes = kBytes,
                            .reserved = {}};
  commands[2].checksum = {
      .header = {.opcode = DXGPU_OP_CHECKSUM, .flags = DXGPU_CHECKSUM_MEMORY, .reserved = 0, .cookie = 3},
      .memory = kTarget,
      .bytes = kBytes,
      .host_address = 0,
      .memory_address = kResults,
      .seed = 0,
      .reserved32 = 0,
      .reserved = {}};
  commands[3].fence = {.header = {.opcode = DXGPU_OP_FENCE, .flags = DXGPU_FENCE_MEMORY, .reserved = 0, .cookie = 4},
                       .value = kFenceValue,
                       .host_address = 0,
                       .memory_address = kResults + 8,
                       .vector = 0,
                       .reserved32 = 0,
                       .reserved = {}};
  commands[4].fill = commands[0].fill;
  commands[4].fill.bytes = kTouched;
  commands[4].fill.pattern = 0;

  const uint64_t control = DXGPU_CHANNEL_BASE, user = DXGPU_USER_BASE;
  auto run_up_to = [&](uint32_t put) -> absl::Status {
    write(gpu, user + DXGPU_USER_DOORBELL, put);
    const absl::Time end = absl::Now() + kDeadline;
    while (read<uint32_t>(gpu, DXGPU_BAR_REGISTERS, user + DXGPU_USER_GET) != put) {
      const uint32_t state = read<uint32_t>(gpu, DXGPU_BAR_REGISTERS, control + DXGPU_CH_STATE);
      if (state != DXGPU_STATE_RUNNING || absl::Now() > end) {
        const uint32_t code = read<uint32_t>(gpu, DXGPU_BAR_REGISTERS, control + DXGPU_CH_FAULT_CODE);
        return absl::InternalError(absl::StrCat("self test: commands did not finish, channel state ", state, ", fault ",
                                                code, " (", name_of_fault(code), ")"));
      }
      absl::SleepFor(absl::Microseconds(200));
    }
    return absl::OkStatus();
  };

  write(gpu, control + DXGPU_CH_MODE, uint32_t{DXGPU_MODE_PUSH});
  write(gpu, control + DXGPU_CH_CONTROL, uint32_t{DXGPU_CH_ENABLE});
  gpu.bar_write(DXGPU_BAR_REGISTERS, user + DXGPU_USER_PUSH, std::as_bytes(std::span(commands)));
  if (absl::Status status = run_up_to(4); !status.ok()) return status;

  std::vector<uint64_t> expected(kBytes / 8, kPattern);
  const auto result = read<dxgpu_checksum_result>(gpu, DXGPU_BAR_MEMORY, kResults);
  if (result.crc32c != crc32c(std::as_bytes(std::span(expected))) || result.cookie != 3) {
    return absl::InternalError("self test: the checksum of a copied fill is wrong");
  }
  if (read<uint64_t>(gpu, DXGPU_BAR_MEMORY, kTarget + kBytes - 8) != kPattern) {
    return absl::InternalError("self test: the copy is not seen through the memory aperture");
  }
  if (read<uint64_t>(gpu, DXGPU_BAR_MEMORY, kResults + 8) != kFenceValue) {
    return absl::InternalError("self test: the fence value is wrong");
  }
  return run_up_to(5);
}

}  // namespace dxpu::gpu
