// Optional second face of a Function: reads whose caller waits anyway.
//
// A function whose answers come over a socket (fabric::RemoteFunction) implements this so that the waiting thread
// serves the socket itself: no thread switch on the way of a register read. Attach points look for it with dynamic_cast
// and use Function::bar_read otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "proxy/function/function.h"

namespace dxpu::function {

class BlockingReads {
 public:
  virtual ~BlockingReads() = default;
  // Blocks until an answer or the implementation's own read deadline. All ones in `out` unless kSuccess. out.size() 1 …
  // 4096. Not from a continuation.
  virtual Outcome bar_read_wait(unsigned bar, uint64_t offset, std::span<std::byte> out) = 0;
};

}  // namespace dxpu::function
