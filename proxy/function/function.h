// A PCI function, and what it sees above itself.
//
// This is the one seam of dxpu: anything that implements Function plugs into any attach point, with or without a
// network between. A RemoteFunction (proxy/fabric) is a Function whose other end is a session.
//
// Threads. Every method of Function and Upstream may be called from any thread, several at once; implementations lock
// for themselves. No lock of the implementation is held while a continuation runs. A continuation runs exactly once, on
// any thread, possibly before the call returns; it must not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "proxy/pcie/config_space.h"

namespace dxpu::function {

// How a non-posted request ended. The first four are the completion statuses of the specification.
enum class Outcome : uint8_t {
  kSuccess = 0,
  kUnsupportedRequest = 1,  // UR: nothing mapped there
  kConfigRetry = 2,         // CRS / RRS
  kCompleterAbort = 4,      // CA: the far end failed internally
  kTimeout = 0x80,          // CTO: made locally, no answer in time
  kPoisoned = 0x81,         // data arrived marked bad
  kLinkDown = 0x82,         // the session ended
};
const char* name_of(Outcome outcome);

// Ends a read. `data` is valid during the call only, and empty unless kSuccess.
using ReadDone = absl::AnyInvocable<void(Outcome outcome, std::span<const std::byte> data)>;
using Done = absl::AnyInvocable<void(Outcome outcome)>;

struct Identity {
  uint16_t vendor_id = 0;
  uint16_t device_id = 0;
  uint32_t class_code = 0;
  uint64_t serial_number = 0;
  std::string model;
  bool operator==(const Identity&) const = default;
};

enum class AtomicOp : uint8_t { kFetchAdd, kSwap, kCompareSwap };

// What a function does to its host: DMA and interrupts. Addresses are those the host handed out (IOVA).
class Upstream {
 public:
  virtual ~Upstream() = default;

  // Reads [address, address + out.size()) of host memory into `out`, which stays valid until `done` has run. Many may
  // be outstanding. Anything not mapped for this function, in part or whole: kUnsupportedRequest, `out` undefined.
  virtual void dma_read(uint64_t address, std::span<std::byte> out, Done done) = 0;
  // Posted: `data` is consumed before the call returns (which may wait for room, up to fast_io_fail), visible to the
  // host before any later dma_write, raise_msix or bar_read answer of this function. Unmapped: dropped and counted.
  virtual void dma_write(uint64_t address, std::span<const std::byte> data) = 0;
  // Old value into `done`'s data. `width` 4 or 8 (16 for kCompareSwap is answered kUnsupportedRequest), little-endian.
  virtual void dma_atomic(AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                          ReadDone done) = 0;
  // A posted write like any other: never overtakes data.
  virtual void raise_msix(unsigned vector) = 0;
};

class Function {
 public:
  virtual ~Function() = default;

  virtual Identity identity() const = 0;
  // A copy of the configuration space as it is now (for a remote function: as the hello brought it and config_write
  // changed it since).
  virtual pcie::ConfigSpace config() const = 0;
  // Non-posted; size 1, 2 or 4, naturally aligned. Side effects (bus master, MSI-X enable, FLR) happen in the function.
  virtual void config_write(uint32_t offset, unsigned size, uint32_t value, Done done) = 0;
  virtual void config_read(uint32_t offset, unsigned size, ReadDone done) = 0;

  // length 1 … 4096, any alignment, within the BAR: else kUnsupportedRequest. May answer later; a read answers after
  // every bar_write that was made before it.
  virtual void bar_read(unsigned bar, uint64_t offset, uint32_t length, ReadDone done) = 0;
  // Posted, consumed before return, any length. Outside the BAR: dropped and counted.
  virtual void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) = 0;

  // Where DMA and interrupts go; nullptr: nowhere (DMA ends as kUnsupportedRequest). The caller keeps `upstream` alive
  // until it has connected another one and that call has returned; after it returns the old one is not used again.
  virtual void connect(Upstream* upstream) = 0;

  // Function level reset: registers to reset values, DMA stopped, outstanding work dropped. Memory is kept.
  virtual void reset(Done done) = 0;
  // Wipes all that a tenant may have left: memory and registers. Blocks until done (seconds for large memories).
  virtual absl::Status scrub() = 0;
};

}  // namespace dxpu::function
