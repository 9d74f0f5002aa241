#include "proxy/gpu/engine/command_check.h"

#include <limits>

namespace dxpu::gpu {
namespace {

constexpr uint64_t kLast = std::numeric_limits<uint64_t>::max();

bool inside(uint64_t offset, uint64_t bytes, uint64_t memory_bytes) {
  return bytes != 0 && offset < memory_bytes && bytes <= memory_bytes - offset;
}

// The last byte must have an address; a range that ends at 2^64 exactly is refused too, it is never meant.
bool fits_host(uint64_t address, uint64_t bytes) { return bytes != 0 && address <= kLast - bytes; }

template <size_t n>
bool all_zero(const dxgpu_u64 (&words)[n]) {
  for (const dxgpu_u64 word : words) {
    if (word != 0) return false;
  }
  return true;
}

Fault check_copy_host(const dxgpu_copy_host& copy, uint64_t memory_bytes) {
  if ((copy.header.flags & ~DXGPU_COPY_LIST) != 0 || copy.reserved != 0) return {DXGPU_FAULT_INVALID_FLAGS, 0};
  if (!inside(copy.memory, copy.bytes, memory_bytes)) return {DXGPU_FAULT_MEMORY_RANGE, copy.memory};
  if ((copy.header.flags & DXGPU_COPY_LIST) != 0) {
    if (copy.segments == 0 || copy.segments > DXGPU_SEGMENTS_MAX)
      return {DXGPU_FAULT_SEGMENTS, copy.segment[0].address};
    const uint64_t list_bytes = uint64_t{copy.segments} * sizeof(dxgpu_segment);
    if (copy.segment[0].address % sizeof(dxgpu_segment) != 0 || !fits_host(copy.segment[0].address, list_bytes)) {
      return {DXGPU_FAULT_HOST_RANGE, copy.segment[0].address};
    }
    return {};
  }
  if (copy.segments == 0 || copy.segments > DXGPU_INLINE_SEGMENTS) return {DXGPU_FAULT_SEGMENTS, 0};
  uint64_t total = 0;
  for (uint32_t i = 0; i < copy.segments; ++i) {
    if (copy.segment[i].flags != 0) return {DXGPU_FAULT_SEGMENTS, copy.segment[i].address};
    if (const Fault fault = check_segment(copy.segment[i]); fault.code != DXGPU_FAULT_NONE) return fault;
    total += copy.segment[i].bytes;
  }
  if (total != copy.bytes) return {DXGPU_FAULT_SEGMENTS, copy.segment[0].address};
  return {};
}

// The two places a 64-bit result can go; shared by FENCE and CHECKSUM, whose flag bits 0 and 1 mean the same.
Fault check_result(uint8_t flags, uint64_t host_address, uint64_t memory_address, uint64_t memory_bytes) {
  if ((flags & DXGPU_FENCE_HOST) != 0 && (host_address % 8 != 0 || !fits_host(host_address, 8))) {
    return {DXGPU_FAULT_HOST_RANGE, host_address};
  }
  if ((flags & DXGPU_FENCE_MEMORY) != 0 && (memory_address % 8 != 0 || !inside(memory_address, 8, memory_bytes))) {
    return {DXGPU_FAULT_MEMORY_RANGE, memory_address};
  }
  return {};
}
static_assert(DXGPU_FENCE_HOST == DXGPU_CHECKSUM_HOST && DXGPU_FENCE_MEMORY == DXGPU_CHECKSUM_MEMORY);

}  // namespace

Fault check_segment(const dxgpu_segment& segment) {
  if ((segment.flags & ~DXGPU_SEGMENT_CHAIN) != 0 || segment.bytes == 0) return {DXGPU_FAULT_SEGMENTS, segment.address};
  if (!fits_host(segment.address, segment.bytes)) return {DXGPU_FAULT_HOST_RANGE, segment.address};
  if ((segment.flags & DXGPU_SEGMENT_CHAIN) != 0 &&
      (segment.bytes % sizeof(dxgpu_segment) != 0 || segment.address % sizeof(dxgpu_segment) != 0)) {
    return {DXGPU_FAULT_SEGMENTS, segment.address};
  }
  return {};
}

Fault check_command(const Command& command, const CommandLimits& limits) {
  const uint8_t opcode = command.header.opcode;
  if (opcode >= 32 || (limits.opcodes >> opcode & 1) == 0) return {DXGPU_FAULT_INVALID_OPCODE, opcode};
  if (command.header.reserved != 0) return {DXGPU_FAULT_INVALID_FLAGS, 0};
  switch (opcode) {
    case DXGPU_OP_NOP:
      if (command.header.flags != 0) return {DXGPU_FAULT_INVALID_FLAGS, 0};
      return {};
    case DXGPU_OP_COPY_IN:
    case DXGPU_OP_COPY_OUT:
      return check_copy_host(command.copy_host, limits.memory_bytes);
    case DXGPU_OP_COPY_LOCAL: {
      const dxgpu_copy_local& copy = command.copy_local;
      if (copy.header.flags != 0 || !all_zero(copy.reserved)) return {DXGPU_FAULT_INVALID_FLAGS, 0};
      if (!inside(copy.destination, copy.bytes, limits.memory_bytes))
        return {DXGPU_FAULT_MEMORY_RANGE, copy.destination};
      if (!inside(copy.source, copy.bytes, limits.memory_bytes)) return {DXGPU_FAULT_MEMORY_RANGE, copy.source};
      return {};
    }
    case DXGPU_OP_FILL: {
      const dxgpu_fill& fill = command.fill;
      const uint32_t width = fill.pattern_bytes;
      if (fill.header.flags != 0 || fill.reserved32 != 0 || !all_zero(fill.reserved) ||
          (width != 1 && width != 2 && width != 4 && width != 8)) {
        return {DXGPU_FAULT_INVALID_FLAGS, 0};
      }
      if (!inside(fill.memory, fill.bytes, limits.memory_bytes)) return {DXGPU_FAULT_MEMORY_RANGE, fill.memory};
      return {};
    }
    case DXGPU_OP_FENCE: {
      const dxgpu_fence& fence = command.fence;
      constexpr uint8_t kKnown = DXGPU_FENCE_HOST | DXGPU_FENCE_MEMORY | DXGPU_FENCE_INTERRUPT;
      if ((fence.header.flags & ~kKnown) != 0 || fence.reserved32 != 0 || !all_zero(fence.reserved)) {
        return {DXGPU_FAULT_INVALID_FLAGS, 0};
      }
      if ((fence.header.flags & DXGPU_FENCE_INTERRUPT) != 0 && fence.vector >= limits.vectors) {
        return {DXGPU_FAULT_VECTOR, fence.vector};
      }
      return check_result(fence.header.flags, fence.host_address, fence.memory_address, limits.memory_bytes);
    }
    case DXGPU_OP_CHECKSUM: {
      const dxgpu_checksum& sum = command.checksum;
      if ((sum.header.flags & ~(DXGPU_CHECKSUM_HOST | DXGPU_CHECKSUM_MEMORY)) != 0 || sum.reserved32 != 0 ||
          !all_zero(sum.reserved)) {
        return {DXGPU_FAULT_INVALID_FLAGS, 0};
      }
      if (!inside(sum.memory, sum.bytes, limits.memory_bytes)) return {DXGPU_FAULT_MEMORY_RANGE, sum.memory};
      return check_result(sum.header.flags, sum.host_address, sum.memory_address, limits.memory_bytes);
    }
    default:
      // An opcode that an engine announces and this file does not know.
      return {DXGPU_FAULT_INVALID_OPCODE, opcode};
  }
}

bool needs_host(const Command& command) {
  switch (command.header.opcode) {
    case DXGPU_OP_COPY_IN:
    case DXGPU_OP_COPY_OUT:
      return true;
    case DXGPU_OP_FENCE:
    case DXGPU_OP_CHECKSUM:
      return (command.header.flags & DXGPU_FENCE_HOST) != 0;
    default:
      return false;
  }
}

const char* name_of_fault(uint32_t code) {
  switch (code) {
    case DXGPU_FAULT_NONE:
      return "none";
    case DXGPU_FAULT_INVALID_OPCODE:
      return "invalid opcode";
    case DXGPU_FAULT_INVALID_FLAGS:
      return "invalid flags or reserved field";
    case DXGPU_FAULT_MEMORY_RANGE:
      return "range outside device memory";
    case DXGPU_FAULT_HOST_RANGE:
      return "host address out of range or misaligned";
    case DXGPU_FAULT_SEGMENTS:
      return "bad segment list";
    case DXGPU_FAULT_DMA_READ:
      return "host memory could not be read";
    case DXGPU_FAULT_DMA_TIMEOUT:
      return "host memory did not answer in time";
    case DXGPU_FAULT_BUS_MASTER_OFF:
      return "bus mastering is off";
    case DXGPU_FAULT_VECTOR:
      return "no such interrupt vector";
    case DXGPU_FAULT_DOORBELL:
      return "doorbell beyond the ring";
    case DXGPU_FAULT_SETUP:
      return "impossible channel setup";
    case DXGPU_FAULT_ENGINE:
      return "engine failure";
    default:
      return "unknown fault";
  }
}

}  // namespace dxpu::gpu
