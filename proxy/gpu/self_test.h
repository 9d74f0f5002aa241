// Proof that a wiped GPU function works, through nothing but its own registers. Private to proxy/gpu.
#pragma once

#include "absl/status/status.h"
#include "proxy/function/function.h"

namespace dxpu::gpu {

// Runs fill, copy, checksum and fence on channel 0 in push mode, looks at the results through the memory aperture, and
// writes zeros where it wrote. The caller resets the registers afterwards. INTERNAL names what did not work.
absl::Status run_self_test(function::Function& gpu);

}  // namespace dxpu::gpu
