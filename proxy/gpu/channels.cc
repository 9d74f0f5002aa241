// The life of channels: doorbells, fetching, faults, stopping, reset.

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "proxy/gpu/core.h"

namespace dxpu::gpu {
namespace {

constexpr uint32_t kFetchCommands = 64;   // one ring read: 4 KiB
constexpr uint32_t kAheadCommands = 512;  // given to the engine and not finished, per channel

}  // namespace

void Core::enable(unsigned c, Work& work) {
  Channel& channel = channels_[c];
  channel.put = channel.get = channel.fetched = 0;
  channel.fault = {};
  channel.fault_index = channel.fault_cookie = 0;
  channel.last_fence = 0;
  channel.push.fill(std::byte{0});
  channel.abort_sent = channel.abort_done = channel.clear_after_stop = false;
  channel.state = DXGPU_STATE_RUNNING;
  bool possible = channel.fault_vector == DXGPU_NO_VECTOR || channel.fault_vector < DXGPU_VECTORS;
  if (channel.mode == DXGPU_MODE_RING) {
    possible = possible && channel.ring_log2 >= DXGPU_RING_LOG2_MIN && channel.ring_log2 <= DXGPU_RING_LOG2_MAX &&
               channel.ring_base % DXGPU_COMMAND_BYTES == 0 &&
               channel.ring_base <= std::numeric_limits<uint64_t>::max() - (DXGPU_COMMAND_BYTES << channel.ring_log2);
  } else {
    possible = possible && channel.mode == DXGPU_MODE_PUSH;
  }
  if (!possible) return fault(c, {DXGPU_FAULT_SETUP, channel.ring_base}, 0, 0, work);
  // Lock order: this mutex, then the engine's. The engine calls back only from its own threads, holding nothing.
  if (!engine_->open(c, &ports_[c]).ok()) fault(c, {DXGPU_FAULT_ENGINE, 0}, 0, 0, work);
}

void Core::fault(unsigned c, const Fault& what, uint32_t index, uint32_t cookie, Work& work) {
  Channel& channel = channels_[c];
  if (channel.state != DXGPU_STATE_RUNNING) return;  // the first fault is the one that counts
  channel.state = DXGPU_STATE_ERROR;
  channel.fault = what;
  channel.fault_index = index;
  channel.fault_cookie = cookie;
  last_fault_channel_ = c;
  last_fault_code_ = what.code;
  ++counters_[DXGPU_COUNTER_FAULTS];
  if (channel.fault_vector < DXGPU_VECTORS) work.raise.push_back(channel.fault_vector);
  set_interrupt(interrupt_status_ | DXGPU_INTERRUPT_CHANNEL_FAULT, interrupt_enable_, work);
}

void Core::doorbell(unsigned c, uint32_t put, Work& work) {
  Channel& channel = channels_[c];
  if (channel.state != DXGPU_STATE_RUNNING) {
    ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
    set_interrupt(interrupt_status_ | DXGPU_INTERRUPT_DROPPED_DOORBELL, interrupt_enable_, work);
    return;
  }
  ++counters_[DXGPU_COUNTER_DOORBELLS];
  // Going backwards is a distance of almost 2^32, so this catches it as well.
  if (put - channel.get > channel.entries() || put - channel.fetched > channel.entries()) {
    return fault(c, {DXGPU_FAULT_DOORBELL, put}, channel.get, 0, work);
  }
  channel.put = put;
  work.pump.push_back(c);
}

void Core::run(Work& work) {
  if (work.reset) begin_reset([](function::Outcome) {});
  for (const unsigned c : work.stop) stop(c);
  for (const unsigned c : work.pump) pump(c);
  for (const unsigned vector : work.raise) raise(vector);
}

// Moves commands from the ring or the push slots to the engine. One thread at a time per channel; continuations that
// come meanwhile (also from inside dma_read) leave a note instead of recursing.
void Core::pump(unsigned c) {
  Channel& channel = channels_[c];
  Work work;
  std::unique_lock lock(mutex_);
  if (channel.pumping) {
    channel.pump_again = true;
    return;
  }
  channel.pumping = true;
  do {
    channel.pump_again = false;
    const uint32_t waiting = channel.put - channel.fetched;
    if (channel.state != DXGPU_STATE_RUNNING || channel.fetching || waiting == 0 ||
        channel.fetched - channel.get >= kAheadCommands) {
      continue;
    }
    const uint32_t slot = channel.fetched % channel.entries();
    const uint32_t count = std::min({waiting, kFetchCommands, channel.entries() - slot});
    if (channel.mode == DXGPU_MODE_PUSH) {
      std::vector<Command> commands(count);
      std::memcpy(commands.data(), channel.push.data() + slot * DXGPU_COMMAND_BYTES, count * sizeof(Command));
      const uint32_t first = std::exchange(channel.fetched, channel.fetched + count);
      channel.pump_again = true;
      lock.unlock();
      submit(c, first, std::move(commands));
      lock.lock();
    } else if (!config_.bus_master_enabled()) {
      fault(c, {DXGPU_FAULT_BUS_MASTER_OFF, channel.ring_base + uint64_t{slot} * DXGPU_COMMAND_BYTES}, channel.fetched,
            0, work);
    } else {
      channel.fetching = true;
      const uint64_t address = channel.ring_base + uint64_t{slot} * DXGPU_COMMAND_BYTES;
      lock.unlock();
      fetch(c, address, count);
      lock.lock();
    }
  } while (channel.pump_again);
  channel.pumping = false;
  lock.unlock();
  run(work);
  advance_stop(c);
}

void Core::fetch(unsigned c, uint64_t address, uint32_t count) {
  auto buffer = std::make_shared<std::vector<std::byte>>(count * sizeof(Command));
  ports_[c].read(address, *buffer, [self = shared_from_this(), c, count, buffer](function::Outcome outcome) {
    self->fetched(c, count, outcome, *buffer);
  });
}

void Core::fetched(unsigned c, uint32_t count, function::Outcome outcome, std::span<const std::byte> data) {
  Channel& channel = channels_[c];
  Work work;
  std::vector<Command> commands;
  uint32_t first = 0;
  {
    std::lock_guard lock(mutex_);
    first = channel.fetched;
    if (channel.state == DXGPU_STATE_RUNNING) {
      if (outcome == function::Outcome::kSuccess) {
        commands.resize(count);
        std::memcpy(commands.data(), data.data(), count * sizeof(Command));
        channel.fetched += count;
      } else {
        uint32_t code = DXGPU_FAULT_DMA_READ;
        if (!config_.bus_master_enabled()) code = DXGPU_FAULT_BUS_MASTER_OFF;
        if (outcome == function::Outcome::kTimeout || outcome == function::Outcome::kLinkDown)
          code = DXGPU_FAULT_DMA_TIMEOUT;
        const uint32_t slot = first % channel.entries();
        fault(c, {code, channel.ring_base + uint64_t{slot} * DXGPU_COMMAND_BYTES}, first, 0, work);
      }
    }
  }
  // `fetching` stays set until the engine has the batch: so batches reach it in ring order, and never after its
  // abort().
  if (!commands.empty()) submit(c, first, std::move(commands));
  {
    std::lock_guard lock(mutex_);
    channel.fetching = false;
  }
  run(work);
  pump(c);
}

void Core::submit(unsigned c, uint32_t first, std::vector<Command> commands) {
  std::vector<uint32_t> cookies;
  cookies.reserve(commands.size());
  for (const Command& command : commands) cookies.push_back(command.header.cookie);
  // The engine ends before this object: no reference needed.
  engine_->submit(c, commands, [this, c, first, cookies = std::move(cookies)](const BatchResult& result) {
    batch_done(c, first, cookies, result);
  });
}

void Core::batch_done(unsigned c, uint32_t first, const std::vector<uint32_t>& cookies, const BatchResult& result) {
  if (result.fault.code != DXGPU_FAULT_NONE) {
    Work work;
    {
      std::lock_guard lock(mutex_);
      const uint32_t cookie = result.retired < cookies.size() ? cookies[result.retired] : 0;
      fault(c, result.fault, first + result.retired, cookie, work);
    }
    run(work);
  }
  pump(c);
}

void Core::retired(unsigned c, const Command& command) {
  std::lock_guard lock(mutex_);
  Channel& channel = channels_[c];
  ++channel.get;
  ++channel.commands;
  ++counters_[DXGPU_COUNTER_COMMANDS];
  if (command.header.opcode == DXGPU_OP_FENCE) channel.last_fence = command.fence.value;
}

void Core::stop(unsigned c) {
  // Ends what runs at once; the abort that counts comes when nobody can submit any more (advance_stop).
  engine_->abort(c, [] {});
  advance_stop(c);
}

void Core::advance_stop(unsigned c) {
  Channel& channel = channels_[c];
  bool stopped = false;
  {
    std::lock_guard lock(mutex_);
    if (channel.state != DXGPU_STATE_STOPPING || channel.pumping || channel.fetching) return;
    stopped = channel.abort_done;
    if (stopped) {
      channel.state = DXGPU_STATE_DISABLED;
      channel.put = channel.get = channel.fetched = 0;
      channel.abort_sent = channel.abort_done = false;
      if (channel.clear_after_stop) channel = Channel{};
    } else if (std::exchange(channel.abort_sent, true)) {
      return;
    }
  }
  if (stopped) return finish_reset_if_stopped();
  engine_->abort(c, [this, c] {
    {
      std::lock_guard lock(mutex_);
      channels_[c].abort_done = true;
    }
    advance_stop(c);
  });
}

void Core::begin_reset(function::Done done) {
  std::vector<unsigned> stopping;
  {
    std::lock_guard lock(mutex_);
    reset_waiters_.push_back(std::move(done));
    resetting_ = true;
    for (unsigned c = 0; c < DXGPU_CHANNELS_MAX; ++c) {
      Channel& channel = channels_[c];
      channel.clear_after_stop = true;
      if (channel.state == DXGPU_STATE_DISABLED || channel.state == DXGPU_STATE_STOPPING) continue;
      channel.state = DXGPU_STATE_STOPPING;
      stopping.push_back(c);
    }
  }
  for (const unsigned c : stopping) stop(c);
  finish_reset_if_stopped();
}

void Core::finish_reset_if_stopped() {
  std::vector<function::Done> waiters;
  {
    std::lock_guard lock(mutex_);
    if (!resetting_) return;
    for (const Channel& channel : channels_) {
      if (channel.state != DXGPU_STATE_DISABLED) return;
    }
    reset_registers();
    resetting_ = false;
    waiters.swap(reset_waiters_);
  }
  for (function::Done& done : waiters) done(function::Outcome::kSuccess);
}

void Core::reset_registers() {
  channels_.fill(Channel{});
  msix_table_.fill(std::byte{0});
  for (unsigned v = 0; v < DXGPU_VECTORS; ++v)
    msix_table_[v * 16 + 12] = std::byte{1};  // masked, as the specification says
  pending_.reset();
  interrupt_status_ = interrupt_enable_ = 0;
  scratch_ = 0;
  last_fault_channel_ = DXGPU_NO_CHANNEL;
  last_fault_code_ = DXGPU_FAULT_NONE;
  counters_.fill(0);
}

}  // namespace dxpu::gpu
