// What executes the commands of a GPU function: `copy` here, `ptx` and `cuda` later.
//
// The command set (proxy/gpu/command_set.h) is the only vocabulary. An engine owns the device memory and one queue per
// channel; the function above it owns registers, rings, doorbells and interrupts. Host memory is reached through
// QueueHost only.
//
// Threads. Every method may be called from any thread. Calls for one queue come one at a time. An engine runs QueueHost
// methods and completions on threads of its own, never inside submit(), and holds no lock meanwhile.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "proxy/function/function.h"
#include "proxy/gpu/command_set.h"

namespace dxpu::gpu {

using Command = dxgpu_command;

struct Fault {
  uint32_t code = DXGPU_FAULT_NONE;
  uint64_t address = 0;  // the device or host address that was wrong, where there is one
  bool operator==(const Fault&) const = default;
};
const char* name_of_fault(uint32_t code);

// The host, and the channel, as one queue sees them. Lives as long as the engine.
class QueueHost {
 public:
  virtual ~QueueHost() = default;
  // False: bus mastering is off, nothing may be sent to the host. The rest of the calls check again themselves.
  virtual bool may_dma() = 0;
  // As function::Upstream; kUnsupportedRequest when there is no host or mastering is off.
  virtual void read(uint64_t address, std::span<std::byte> out, function::Done done) = 0;
  virtual void write(uint64_t address, std::span<const std::byte> data) = 0;
  virtual void interrupt(unsigned vector) = 0;
  // `command` is finished and its effects are visible; called once for each, in order, before its fence interrupt.
  virtual void retired(const Command& command) = 0;
};

struct EngineDescription {
  std::string name;
  uint32_t id = 0;       // DXGPU_ENGINE_*
  uint32_t opcodes = 0;  // bit n: opcode n
  uint64_t memory_bytes = 0;
};

// How a batch ended: all its commands retired (code NONE), or stopped at one of them.
struct BatchResult {
  uint32_t retired = 0;
  Fault fault;
  bool aborted = false;  // abort() came, or an earlier batch of this queue had a fault; not itself a fault
};
using Completion = absl::AnyInvocable<void(const BatchResult&)>;

class Engine {
 public:
  virtual ~Engine() = default;

  virtual EngineDescription describe() const = 0;

  // Readies a queue (0 … DXGPU_CHANNELS_MAX - 1). Idempotent; `host` outlives the engine.
  virtual absl::Status open(unsigned queue, QueueHost* host) = 0;
  // Appends a batch. Batches of a queue run in order, and so do their commands. After a fault, batches end as aborted
  // until abort(). `done` runs exactly once.
  virtual void submit(unsigned queue, std::span<const Command> commands, Completion done) = 0;
  // Ends what the queue does and holds, without waiting: `stopped` runs when nothing of it touches the host or the
  // memory any more and every completion has run. The queue is usable again afterwards.
  virtual void abort(unsigned queue, absl::AnyInvocable<void()> stopped) = 0;

  // The memory aperture. The range is inside memory_bytes; naturally aligned accesses of 1, 2, 4 and 8 bytes are
  // single.
  virtual void read_memory(uint64_t offset, std::span<std::byte> out) = 0;
  virtual void write_memory(uint64_t offset, std::span<const std::byte> data) = 0;

  // Zeroes all of the memory. Only with every queue stopped.
  virtual absl::Status wipe() = 0;
  // DATA_LOSS naming the first byte that is not zero.
  virtual absl::Status check_wiped() = 0;
};

}  // namespace dxpu::gpu
