// One queue of the copy engine: its thread, its batches, its reads in flight. Private to the engine.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "proxy/gpu/engine/command_check.h"
#include "proxy/gpu/engine/copy/copy_engine.h"

namespace dxpu::gpu {

class CopyQueue {
 public:
  CopyQueue(std::shared_ptr<DeviceMemory> memory, const CopyEngineOptions& options, const CommandLimits& limits,
            QueueHost& host);
  // Cancels what runs and joins. Reads that the host has not ended keep their memory.
  ~CopyQueue();

  void submit(std::span<const Command> commands, Completion done);
  void abort(absl::AnyInvocable<void()> stopped);

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  // A copy whose host reads are in flight. Guarded by Shared::mutex.
  struct Copy {
    unsigned outstanding = 0;
    bool issued = false;                                    // all of its reads have been sent
    bool timed_out = false;                                 // given up; some may still be on their way
    function::Outcome error = function::Outcome::kSuccess;  // the first one
    uint64_t error_address = 0;
    bool finished() const { return timed_out || (outstanding == 0 && issued); }
  };
  struct Batch {
    std::vector<Command> commands;
    Completion done;
    uint32_t retired = 0;
    bool ended = false;
  };
  // What continuations of reads touch; outlives the queue if it must.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Batch>> batches;
    std::vector<absl::AnyInvocable<void()>> aborts;
    bool stop = false;
    uint64_t outstanding_bytes = 0;
    uint64_t progress = 0;  // reads ended so far: a deadline starts anew when it moves
    bool cancelled() const { return stop || !aborts.empty(); }
  };
  // A command that is executed but not retired, in order.
  struct Pending {
    std::shared_ptr<Batch> batch;
    uint32_t index = 0;
    std::shared_ptr<Copy> copy;
  };

  void run();
  void run_batch(const std::shared_ptr<Batch>& batch);
  // Executes one command, except for what its Copy still waits for.
  Fault execute(const Command& command, std::shared_ptr<Copy>& copy);
  Fault copy_in(const dxgpu_copy_host& command, const std::shared_ptr<Copy>& copy);
  Fault copy_out(const dxgpu_copy_host& command);
  Fault issue_reads(const std::shared_ptr<Copy>& copy, uint64_t address, uint64_t memory, uint64_t bytes);
  Fault write_host(uint64_t address, std::span<const std::byte> data);
  Fault read_blocking(uint64_t address, const std::shared_ptr<std::vector<std::byte>>& out);
  Fault checksum(const dxgpu_checksum& command);
  // Calls `each(address, bytes)` for every piece of host memory of the command, in order.
  template <typename Each>
  Fault for_each_segment(const dxgpu_copy_host& command, Each each);

  // Waits until the first pending copy is finished or `also` is true; gives the copy up when no read ends for a whole
  // deadline.
  template <typename Also>
  void wait_for_front(std::unique_lock<std::mutex>& lock, Also also);
  // Retires finished copies at the front; with `all`, waits for every one. False: a fault or a cancel ended the queue's
  // work.
  bool reap(bool all);
  void retire(Batch& batch, uint32_t index);
  void fail(const std::shared_ptr<Batch>& batch, uint32_t index, const Fault& fault);
  void end_aborted(Batch& batch);
  void stop_everything();
  bool overlaps_pending(const Command& command) const;
  Fault classify(function::Outcome outcome, uint64_t address);
  bool cancelled();

  const std::shared_ptr<DeviceMemory> memory_;
  const CopyEngineOptions options_;
  const CommandLimits limits_;
  QueueHost& host_;
  const std::shared_ptr<Shared> shared_;
  // The queue's thread only.
  std::deque<Pending> pending_;
  bool faulted_ = false;
  std::thread thread_;
};

}  // namespace dxpu::gpu
