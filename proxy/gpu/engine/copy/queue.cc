#include "proxy/gpu/engine/copy/queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "proxy/gpu/crc32c.h"

namespace dxpu::gpu {
namespace {

// Internal to the queue, never shown: abort() or the destructor came.
constexpr uint32_t kCancelled = 0xffff;
// A segment list is fetched in pieces of this: enough entries to fill a window of 4 KiB pieces many times over.
constexpr uint64_t kListBytes = 64 * 1024;
constexpr uint64_t kChecksumBytes = 1 << 20;  // between looks at cancelled()

bool ok(const Fault& fault) { return fault.code == DXGPU_FAULT_NONE; }

}  // namespace

CopyQueue::CopyQueue(std::shared_ptr<DeviceMemory> memory, const CopyEngineOptions& options,
                     const CommandLimits& limits, QueueHost& host)
    : memory_(std::move(memory)), options_(options), limits_(limits), host_(host), shared_(std::make_shared<Shared>()) {
  thread_ = std::thread([this] { run(); });
}

CopyQueue::~CopyQueue() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
    shared_->changed.notify_all();
  }
  thread_.join();
}

void CopyQueue::submit(std::span<const Command> commands, Completion done) {
  auto batch = std::make_shared<Batch>();
  batch->commands.assign(commands.begin(), commands.end());
  batch->done = std::move(done);
  std::lock_guard lock(shared_->mutex);
  shared_->batches.push_back(std::move(batch));
  shared_->changed.notify_all();
}

void CopyQueue::abort(absl::AnyInvocable<void()> stopped) {
  std::lock_guard lock(shared_->mutex);
  shared_->aborts.push_back(std::move(stopped));
  shared_->changed.notify_all();
}

bool CopyQueue::cancelled() {
  std::lock_guard lock(shared_->mutex);
  return shared_->cancelled();
}

void CopyQueue::run() {
  for (;;) {
    std::shared_ptr<Batch> batch;
    bool stop = false, cancelled = false;
    {
      std::unique_lock lock(shared_->mutex);
      auto work = [&] { return shared_->cancelled() || !shared_->batches.empty(); };
      if (pending_.empty()) {
        shared_->changed.wait(lock, work);  // idle: for work, however long
      } else {
        wait_for_front(lock, work);
      }
      stop = shared_->stop;
      cancelled = shared_->cancelled();
      if (!cancelled && !shared_->batches.empty()) {
        batch = std::move(shared_->batches.front());
        shared_->batches.pop_front();
      }
    }
    if (cancelled) {
      stop_everything();
      if (stop) return;
    } else if (batch != nullptr) {
      run_batch(batch);
    } else {
      reap(false);
    }
  }
}

template <typename Also>
void CopyQueue::wait_for_front(std::unique_lock<std::mutex>& lock, Also also) {
  Copy& front = *pending_.front().copy;
  while (!front.finished() && !also()) {
    const uint64_t progress = shared_->progress;
    auto moved = [&] { return front.finished() || also() || shared_->progress != progress; };
    if (!shared_->changed.wait_for(lock, absl::ToChronoNanoseconds(options_.dma_deadline), moved)) {
      front.timed_out = true;
      if (front.error == function::Outcome::kSuccess) front.error = function::Outcome::kTimeout;
    }
  }
}

void CopyQueue::run_batch(const std::shared_ptr<Batch>& batch) {
  if (faulted_) return end_aborted(*batch);
  if (batch->commands.empty()) {
    if (!reap(true)) return end_aborted(*batch);
    return batch->done(BatchResult{});
  }
  for (uint32_t i = 0; i < batch->commands.size(); ++i) {
    const Command& command = batch->commands[i];
    // Only a copy from the host may start while earlier ones are in flight, and only elsewhere in memory.
    const bool together = command.header.opcode == DXGPU_OP_COPY_IN && !overlaps_pending(command);
    if (!reap(!together)) return end_aborted(*batch);
    Fault fault = check_command(command, limits_);
    std::shared_ptr<Copy> copy;
    if (ok(fault)) fault = execute(command, copy);
    if (fault.code == kCancelled) return end_aborted(*batch);
    if (!ok(fault)) {
      if (reap(true)) {  // earlier copies are in front of the fault
        fail(batch, i, fault);
      } else {
        end_aborted(*batch);
      }
      return;
    }
    if (copy != nullptr) {
      pending_.push_back({batch, i, std::move(copy)});
    } else {
      retire(*batch, i);
    }
  }
}

bool CopyQueue::overlaps_pending(const Command& command) const {
  const uint64_t begin = command.copy_host.memory;
  const uint64_t end = begin + command.copy_host.bytes;  // a wrap is caught by check_command; here it only costs a wait
  for (const Pending& pending : pending_) {
    const dxgpu_copy_host& other = pending.batch->commands[pending.index].copy_host;
    if (begin < other.memory + other.bytes && other.memory < end) return true;
  }
  return end < begin;
}

bool CopyQueue::reap(bool all) {
  while (!pending_.empty()) {
    function::Outcome error;
    uint64_t address;
    {
      std::unique_lock lock(shared_->mutex);
      const Copy& front = *pending_.front().copy;
      if (all) wait_for_front(lock, [&] { return shared_->cancelled(); });
      if (shared_->cancelled()) return false;
      if (!front.finished()) return true;
      error = front.error;
      address = front.error_address;
    }
    const Pending front = std::move(pending_.front());
    pending_.pop_front();
    if (error != function::Outcome::kSuccess) {
      fail(front.batch, front.index, classify(error, address));
      return false;
    }
    retire(*front.batch, front.index);
  }
  return true;
}

void CopyQueue::retire(Batch& batch, uint32_t index) {
  const Command& command = batch.commands[index];
  ++batch.retired;
  host_.retired(command);
  if (command.header.opcode == DXGPU_OP_FENCE && (command.header.flags & DXGPU_FENCE_INTERRUPT) != 0) {
    host_.interrupt(command.fence.vector);
  }
  if (batch.retired == batch.commands.size()) {
    batch.ended = true;
    batch.done(BatchResult{.retired = batch.retired, .fault = {}});
  }
}

void CopyQueue::fail(const std::shared_ptr<Batch>& batch, uint32_t index, const Fault& fault) {
  faulted_ = true;
  batch->ended = true;
  batch->done(BatchResult{.retired = index, .fault = fault});
  while (!pending_.empty()) {
    const Pending later = std::move(pending_.front());
    pending_.pop_front();
    end_aborted(*later.batch);
  }
}

void CopyQueue::end_aborted(Batch& batch) {
  if (batch.ended) return;
  batch.ended = true;
  batch.done(BatchResult{.retired = batch.retired, .fault = {}, .aborted = true});
}

void CopyQueue::stop_everything() {
  std::vector<absl::AnyInvocable<void()>> stopped;
  std::deque<std::shared_ptr<Batch>> batches;
  {
    std::unique_lock lock(shared_->mutex);
    // Reads in flight write into the memory: "stopped" must mean that they do not any more. The destructor does not
    // wait: they keep their memory, and nobody looks at it.
    shared_->changed.wait(lock, [&] { return shared_->stop || shared_->outstanding_bytes == 0; });
    stopped.swap(shared_->aborts);
    batches.swap(shared_->batches);
  }
  for (const Pending& pending : pending_) end_aborted(*pending.batch);
  pending_.clear();
  for (const std::shared_ptr<Batch>& batch : batches) end_aborted(*batch);
  faulted_ = false;
  for (auto& call : stopped) call();
}

Fault CopyQueue::classify(function::Outcome outcome, uint64_t address) {
  // A read refused because mastering went off meanwhile is not the host's doing.
  if (!host_.may_dma()) return {DXGPU_FAULT_BUS_MASTER_OFF, address};
  switch (outcome) {
    case function::Outcome::kTimeout:
    case function::Outcome::kLinkDown:
      return {DXGPU_FAULT_DMA_TIMEOUT, address};
    default:
      return {DXGPU_FAULT_DMA_READ, address};
  }
}

Fault CopyQueue::execute(const Command& command, std::shared_ptr<Copy>& copy) {
  if (needs_host(command) && !host_.may_dma()) return {DXGPU_FAULT_BUS_MASTER_OFF, 0};
  switch (command.header.opcode) {
    case DXGPU_OP_COPY_IN:
      copy = std::make_shared<Copy>();
      return copy_in(command.copy_host, copy);
    case DXGPU_OP_COPY_OUT:
      return copy_out(command.copy_host);
    case DXGPU_OP_COPY_LOCAL:
      memory_->move(command.copy_local.destination, command.copy_local.source, command.copy_local.bytes);
      return {};
    case DXGPU_OP_FILL:
      memory_->fill(command.fill.memory, command.fill.bytes, command.fill.pattern, command.fill.pattern_bytes);
      return {};
    case DXGPU_OP_FENCE: {
      const dxgpu_fence& fence = command.fence;
      const auto value = std::as_bytes(std::span(&fence.value, 1));
      if ((fence.header.flags & DXGPU_FENCE_MEMORY) != 0) memory_->write(fence.memory_address, value);
      if ((fence.header.flags & DXGPU_FENCE_HOST) != 0) return write_host(fence.host_address, value);
      return {};
    }
    case DXGPU_OP_CHECKSUM:
      return checksum(command.checksum);
    default:
      return {};  // NOP: check_command let nothing else through
  }
}

Fault CopyQueue::checksum(const dxgpu_checksum& command) {
  dxgpu_checksum_result result{.crc32c = command.seed, .cookie = command.header.cookie};
  for (uint64_t done = 0; done < command.bytes;) {
    if (cancelled()) return {kCancelled, 0};
    const uint64_t step = std::min(command.bytes - done, kChecksumBytes);
    result.crc32c = crc32c(memory_->range(command.memory + done, step), result.crc32c);
    done += step;
  }
  const auto bytes = std::as_bytes(std::span(&result, 1));
  if ((command.header.flags & DXGPU_CHECKSUM_MEMORY) != 0) memory_->write(command.memory_address, bytes);
  if ((command.header.flags & DXGPU_CHECKSUM_HOST) != 0) return write_host(command.host_address, bytes);
  return {};
}

Fault CopyQueue::write_host(uint64_t address, std::span<const std::byte> data) {
  if (!host_.may_dma()) return {DXGPU_FAULT_BUS_MASTER_OFF, address};
  host_.write(address, data);
  return {};
}

template <typename Each>
Fault CopyQueue::for_each_segment(const dxgpu_copy_host& command, Each each) {
  uint64_t left = command.bytes;
  auto take = [&](const dxgpu_segment& segment) -> Fault {
    if (segment.bytes > left) return {DXGPU_FAULT_SEGMENTS, segment.address};
    left -= segment.bytes;
    return each(segment.address, segment.bytes);
  };
  if ((command.header.flags & DXGPU_COPY_LIST) == 0) {
    for (uint32_t i = 0; i < command.segments; ++i) {
      if (const Fault fault = take(command.segment[i]); !ok(fault)) return fault;
    }
    return {};
  }
  // Both counts are bounded, so that a list that leads back into itself ends.
  uint64_t block = command.segment[0].address;
  uint64_t entries = command.segments;
  uint32_t segments = 0, blocks = 1;
  while (entries > 0) {
    const uint64_t count = std::min(entries, kListBytes / sizeof(dxgpu_segment));
    auto list = std::make_shared<std::vector<std::byte>>(count * sizeof(dxgpu_segment));
    if (const Fault fault = read_blocking(block, list); !ok(fault)) return fault;
    entries -= count;
    block += list->size();
    for (uint64_t i = 0; i < count; ++i) {
      dxgpu_segment segment;
      std::memcpy(&segment, list->data() + i * sizeof segment, sizeof segment);
      if (const Fault fault = check_segment(segment); !ok(fault)) return fault;
      if ((segment.flags & DXGPU_SEGMENT_CHAIN) == 0) {
        if (++segments > DXGPU_SEGMENTS_MAX) return {DXGPU_FAULT_SEGMENTS, segment.address};
        if (const Fault fault = take(segment); !ok(fault)) return fault;
        continue;
      }
      const bool last_of_block = entries == 0 && i + 1 == count;
      if (!last_of_block || ++blocks > DXGPU_SEGMENT_BLOCKS_MAX) return {DXGPU_FAULT_SEGMENTS, segment.address};
      block = segment.address;
      entries = segment.bytes / sizeof(dxgpu_segment);
    }
  }
  if (left != 0) return {DXGPU_FAULT_SEGMENTS, command.segment[0].address};
  return {};
}

Fault CopyQueue::copy_in(const dxgpu_copy_host& command, const std::shared_ptr<Copy>& copy) {
  uint64_t memory = command.memory;
  const Fault fault = for_each_segment(command, [&](uint64_t address, uint64_t bytes) {
    const uint64_t at = memory;
    memory += bytes;
    return issue_reads(copy, address, at, bytes);
  });
  std::unique_lock lock(shared_->mutex);
  copy->issued = true;
  if (ok(fault)) return {};
  // A fault is only told when its command touches nothing any more.
  const auto limit = absl::ToChronoNanoseconds(options_.dma_deadline);
  shared_->changed.wait_for(lock, limit, [&] { return copy->outstanding == 0 || shared_->cancelled(); });
  return fault;
}

Fault CopyQueue::issue_reads(const std::shared_ptr<Copy>& copy, uint64_t address, uint64_t memory, uint64_t bytes) {
  while (bytes > 0) {
    // Cut at multiples of the read size, so that no piece crosses more pages than it must.
    const uint64_t chunk = std::min<uint64_t>(bytes, options_.read_bytes - address % options_.read_bytes);
    {
      std::unique_lock lock(shared_->mutex);
      auto ready = [&] {
        return shared_->cancelled() || copy->error != function::Outcome::kSuccess ||
               shared_->outstanding_bytes + chunk <= options_.window_bytes;
      };
      uint64_t progress = shared_->progress;
      while (!ready()) {
        auto moved = [&] { return ready() || shared_->progress != progress; };
        if (!shared_->changed.wait_for(lock, absl::ToChronoNanoseconds(options_.dma_deadline), moved)) {
          return {DXGPU_FAULT_DMA_TIMEOUT, address};
        }
        progress = shared_->progress;
      }
      if (shared_->cancelled()) return {kCancelled, 0};
      if (copy->error != function::Outcome::kSuccess) {
        const function::Outcome error = copy->error;
        const uint64_t where = copy->error_address;
        lock.unlock();
        return classify(error, where);
      }
      ++copy->outstanding;
      shared_->outstanding_bytes += chunk;
    }
    host_.read(address, memory_->range(memory, chunk),
               [shared = shared_, keep = memory_, copy, address, chunk](function::Outcome outcome) {
                 std::lock_guard lock(shared->mutex);
                 if (outcome != function::Outcome::kSuccess && copy->error == function::Outcome::kSuccess) {
                   copy->error = outcome;
                   copy->error_address = address;
                 }
                 --copy->outstanding;
                 shared->outstanding_bytes -= chunk;
                 ++shared->progress;
                 shared->changed.notify_all();
               });
    address += chunk;
    memory += chunk;
    bytes -= chunk;
  }
  return {};
}

Fault CopyQueue::read_blocking(uint64_t address, const std::shared_ptr<std::vector<std::byte>>& out) {
  struct Answer {
    bool here = false;
    function::Outcome outcome = function::Outcome::kSuccess;
  };
  auto answer = std::make_shared<Answer>();  // guarded by Shared::mutex
  {
    std::lock_guard lock(shared_->mutex);
    shared_->outstanding_bytes += out->size();
  }
  host_.read(address, *out, [shared = shared_, answer, out](function::Outcome outcome) {
    std::lock_guard lock(shared->mutex);
    answer->here = true;
    answer->outcome = outcome;
    shared->outstanding_bytes -= out->size();
    ++shared->progress;
    shared->changed.notify_all();
  });
  {
    std::unique_lock lock(shared_->mutex);
    auto over = [&] { return answer->here || shared_->cancelled(); };
    if (!shared_->changed.wait_for(lock, absl::ToChronoNanoseconds(options_.dma_deadline), over)) {
      return {DXGPU_FAULT_DMA_TIMEOUT, address};
    }
    if (shared_->cancelled()) return {kCancelled, 0};
  }
  return answer->outcome == function::Outcome::kSuccess ? Fault{} : classify(answer->outcome, address);
}

Fault CopyQueue::copy_out(const dxgpu_copy_host& command) {
  uint64_t memory = command.memory;
  return for_each_segment(command, [&](uint64_t address, uint64_t bytes) -> Fault {
    while (bytes > 0) {
      if (cancelled()) return {kCancelled, 0};
      const uint64_t chunk = std::min<uint64_t>(bytes, options_.write_bytes - address % options_.write_bytes);
      if (const Fault fault = write_host(address, memory_->range(memory, chunk)); !ok(fault)) return fault;
      address += chunk;
      memory += chunk;
      bytes -= chunk;
    }
    return {};
  });
}

}  // namespace dxpu::gpu
