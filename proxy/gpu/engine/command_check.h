// What can be said about a command before running it. Pure; every engine and every test uses this one.
#pragma once

#include <cstdint>

#include "proxy/gpu/engine/engine.h"

namespace dxpu::gpu {

struct CommandLimits {
  uint64_t memory_bytes = 0;
  uint32_t vectors = DXGPU_VECTORS;
  uint32_t opcodes = 0;
};

// Opcode, flags, reserved fields, ranges (no sum wraps), alignment, inline segments. What a segment list in host memory
// says is checked as it is read (SegmentReader).
Fault check_command(const Command& command, const CommandLimits& limits);
// True when the command sends anything to the host.
bool needs_host(const Command& command);
// One entry of a segment list, inline or fetched: not empty, no unknown flag, no wrap.
Fault check_segment(const dxgpu_segment& segment);

}  // namespace dxpu::gpu
