// The state behind a GpuFunction. Private to proxy/gpu.
//
// One mutex guards everything; it is never held while an upstream, the engine or a continuation is called (Engine::open
// is the exception: it calls nothing back). Life of a channel: DISABLED → RUNNING → (ERROR) → STOPPING → DISABLED.
// STOPPING ends when no fetch is in flight, nobody pumps, and the engine has said that the queue stopped, in that
// order, so nothing of an old life can reach a new one.
#pragma once

#include <array>
#include <bitset>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "proxy/function/upstream_slot.h"
#include "proxy/gpu/engine/engine.h"
#include "proxy/gpu/gpu_function.h"

namespace dxpu::gpu {

class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const GpuOptions& options, pcie::ConfigSpace config, std::unique_ptr<Engine> engine);

  // --- BAR0, registers.cc
  void read_registers(uint64_t offset, std::span<std::byte> out);
  void write_registers(uint64_t offset, std::span<const std::byte> data);

  // --- channels.cc
  void begin_reset(function::Done done);
  void pump(unsigned c);

  // --- config space and interrupts, core.cc
  pcie::ConfigSpace config();
  void config_write(uint32_t offset, unsigned size, uint32_t value);
  uint32_t config_read(uint32_t offset, unsigned size);
  void reset_config();
  void raise(unsigned vector);
  void count_dropped_write();
  // False: not all channels stopped in time.
  bool reset_and_wait(absl::Duration deadline);
  // Every register as a byte image of BAR0, and the config space; for the wiped check.
  std::vector<std::byte> image();

  const GpuOptions options;
  function::UpstreamSlot upstream;

  Engine& engine() { return *engine_; }

 private:
  struct Channel {
    // As the registers show it.
    uint32_t mode = DXGPU_MODE_RING;
    uint64_t ring_base = 0;
    uint32_t ring_log2 = 0;
    uint32_t fault_vector = DXGPU_NO_VECTOR;
    uint32_t state = DXGPU_STATE_DISABLED;
    uint32_t put = 0, get = 0;  // free running
    Fault fault;
    uint32_t fault_index = 0, fault_cookie = 0;
    uint64_t last_fence = 0, commands = 0;
    std::array<std::byte, DXGPU_PUSH_SLOTS * DXGPU_COMMAND_BYTES> push{};
    // Behind them.
    uint32_t fetched = 0;   // commands given to the engine, free running
    bool fetching = false;  // one ring read in flight, or its batch on the way to the engine
    bool pumping = false, pump_again = false;
    bool abort_sent = false, abort_done = false;
    bool clear_after_stop = false;

    uint32_t entries() const { return mode == DXGPU_MODE_PUSH ? DXGPU_PUSH_SLOTS : 1u << ring_log2; }
  };

  // The engine's view of one channel.
  class Port : public QueueHost {
   public:
    bool may_dma() override { return core->may_dma(); }
    void read(uint64_t address, std::span<std::byte> out, function::Done done) override;
    void write(uint64_t address, std::span<const std::byte> data) override;
    void interrupt(unsigned vector) override { core->raise(vector); }
    void retired(const Command& command) override { core->retired(channel, command); }
    Core* core = nullptr;
    unsigned channel = 0;
  };

  // What a register write leaves to do once the lock is gone.
  struct Work {
    std::vector<unsigned> pump, stop, raise;
    bool reset = false;
  };
  void run(Work& work);

  uint32_t read32(uint32_t offset) const;
  uint32_t read_global(uint32_t offset) const;
  uint32_t read_channel(const Channel& channel, uint32_t offset) const;
  uint32_t read_user(const Channel& channel, uint32_t offset) const;
  uint32_t read_msix(uint32_t offset) const;
  void write32(uint32_t offset, uint32_t value, Work& work);
  void write_global(uint32_t offset, uint32_t value, Work& work);
  void write_channel(unsigned c, uint32_t offset, uint32_t value, Work& work);
  void write_control(unsigned c, uint32_t value, Work& work);
  void doorbell(unsigned c, uint32_t put, Work& work);
  bool write_bytes(uint64_t offset, std::span<const std::byte> data);
  void set_interrupt(uint32_t status, uint32_t enable, Work& work);
  uint64_t faulted_channels() const;

  void enable(unsigned c, Work& work);
  void fault(unsigned c, const Fault& what, uint32_t index, uint32_t cookie, Work& work);
  void stop(unsigned c);
  void advance_stop(unsigned c);
  void finish_reset_if_stopped();
  void fetch(unsigned c, uint64_t address, uint32_t count);
  void fetched(unsigned c, uint32_t count, function::Outcome outcome, std::span<const std::byte> data);
  void submit(unsigned c, uint32_t first, std::vector<Command> commands);
  void batch_done(unsigned c, uint32_t first, const std::vector<uint32_t>& cookies, const BatchResult& result);
  void retired(unsigned c, const Command& command);
  bool may_dma();
  void reset_registers();

  std::mutex mutex_;
  pcie::ConfigSpace config_;
  std::array<Channel, DXGPU_CHANNELS_MAX> channels_;
  std::array<std::byte, DXGPU_VECTORS * 16> msix_table_{};
  std::bitset<DXGPU_VECTORS> pending_;
  uint32_t interrupt_status_ = 0, interrupt_enable_ = 0;
  uint64_t scratch_ = 0;
  uint32_t last_fault_channel_ = DXGPU_NO_CHANNEL, last_fault_code_ = DXGPU_FAULT_NONE;
  std::array<uint64_t, DXGPU_COUNTERS> counters_{};
  bool resetting_ = false;
  std::vector<function::Done> reset_waiters_;

  std::array<Port, DXGPU_CHANNELS_MAX> ports_;
  EngineDescription description_;
  std::unique_ptr<Engine> engine_;  // last: its threads end before what they use
};

}  // namespace dxpu::gpu
