// dxpu-boxd: the control side of a box.
//
// What this is: one loop that owns the slots, starts their processes, judges tickets, and reports to the pool manager.
// What it is not: a data path. A fabric socket is passed to the worker right after its hello; boxd's death stops
// nothing that is attached, and its restart adopts the live workers.
//
// Everything it must remember is in runtime_dir: slot-N.json (the record), slot-N.sock (the worker's control socket),
// slot-N.vram (the device memory), boxd.lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proxy/box/slot.h"
#include "proxy/fabric/session.h"

namespace dxpu::box {

struct BoxdOptions {
  std::string id;
  std::string pool_address;
  std::string listen;                  // where the fabric listens
  std::vector<std::string> advertise;  // paths told to hosts; empty: where it listens
  uint32_t slots = 1;
  std::string model = "dxpu-soft";
  uint64_t memory_bytes = uint64_t{256} << 20;
  std::string engine = "copy";
  std::string runtime_dir;
  std::string worker_program;
  fabric::Deadlines deadlines;
  SlotDeadlines slot_deadlines;
  absl::Duration hello_deadline = absl::Seconds(5);
};

class Boxd {
 public:
  // Takes the runtime directory and adopts what lives in it. FAILED_PRECONDITION: another boxd has it;
  // RESOURCE_EXHAUSTED: too little room; DATA_LOSS: a record is damaged. run() must be called on the same thread:
  // children die with it.
  static absl::StatusOr<std::unique_ptr<Boxd>> create(BoxdOptions options);
  virtual ~Boxd() = default;
  // Until `stop_fd` is readable. Workers are left running.
  virtual void run(int stop_fd) = 0;
  virtual std::string endpoint() const = 0;
};

// Stable for (box, slot), never 0.
uint64_t serial_number(const std::string& box_id, uint32_t slot);

// How dxpu-worker ends when it is not killed.
inline constexpr int kExitStopped = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitLeaseExpired = 3;
// The descriptor a worker inherits: its control listener when it serves, else a pipe for one line that says what went
// wrong.
inline constexpr int kInheritedFd = 3;

}  // namespace dxpu::box
