#include "proxy/gpu/core.h"

#include <utility>

namespace dxpu::gpu {

Core::Core(const GpuOptions& gpu_options, pcie::ConfigSpace config, std::unique_ptr<Engine> engine)
    : options(gpu_options), config_(std::move(config)), description_(engine->describe()), engine_(std::move(engine)) {
  for (unsigned c = 0; c < DXGPU_CHANNELS_MAX; ++c) {
    ports_[c].core = this;
    ports_[c].channel = c;
  }
  reset_registers();
}

pcie::ConfigSpace Core::config() {
  std::lock_guard lock(mutex_);
  return config_;
}

uint32_t Core::config_read(uint32_t offset, unsigned size) {
  std::lock_guard lock(mutex_);
  return config_.read(offset, size);
}

void Core::config_write(uint32_t offset, unsigned size, uint32_t value) {
  bool reset;
  std::vector<unsigned> unmasked;
  {
    std::lock_guard lock(mutex_);
    config_.write(offset, size, value);
    reset = config_.take_function_level_reset();
    // At once, so that bus mastering is off before anybody can see that the reset runs.
    if (reset) config_.reset();
    if (pending_.any() && config_.msix_enabled() && !config_.msix_function_masked()) {
      for (unsigned v = 0; v < DXGPU_VECTORS; ++v) {
        if (pending_[v]) unmasked.push_back(v);
      }
      pending_.reset();
    }
  }
  for (const unsigned vector : unmasked) raise(vector);
  if (reset) begin_reset([](function::Outcome) {});
}

void Core::reset_config() {
  std::lock_guard lock(mutex_);
  config_.reset();
}

bool Core::may_dma() {
  std::lock_guard lock(mutex_);
  return config_.bus_master_enabled();
}

void Core::raise(unsigned vector) {
  {
    std::lock_guard lock(mutex_);
    if (!config_.msix_enabled() || !config_.bus_master_enabled()) {
      ++counters_[DXGPU_COUNTER_INTERRUPTS_SUPPRESSED];
      return;
    }
    if (config_.msix_function_masked()) {
      pending_.set(vector);
      return;
    }
    ++counters_[DXGPU_COUNTER_INTERRUPTS];
  }
  if (auto use = upstream.use()) use->raise_msix(vector);
}

void Core::Port::read(uint64_t address, std::span<std::byte> out, function::Done done) {
  bool allowed;
  {
    std::lock_guard lock(core->mutex_);
    allowed = core->config_.bus_master_enabled();
    if (allowed) {
      ++core->counters_[DXGPU_COUNTER_DMA_READS];
      core->counters_[DXGPU_COUNTER_DMA_READ_BYTES] += out.size();
    }
  }
  if (allowed) {
    if (auto use = core->upstream.use()) return use->dma_read(address, out, std::move(done));
  }
  done(function::Outcome::kUnsupportedRequest);
}

void Core::Port::write(uint64_t address, std::span<const std::byte> data) {
  {
    std::lock_guard lock(core->mutex_);
    if (!core->config_.bus_master_enabled()) return;
    core->counters_[DXGPU_COUNTER_DMA_WRITE_BYTES] += data.size();
  }
  if (auto use = core->upstream.use()) use->dma_write(address, data);
}

void Core::count_dropped_write() {
  std::lock_guard lock(mutex_);
  ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
}

bool Core::reset_and_wait(absl::Duration deadline) {
  struct Wait {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  auto wait = std::make_shared<Wait>();
  begin_reset([wait](function::Outcome) {
    std::lock_guard lock(wait->mutex);
    wait->over = true;
    wait->changed.notify_all();
  });
  std::unique_lock lock(wait->mutex);
  return wait->changed.wait_for(lock, absl::ToChronoNanoseconds(deadline), [&] { return wait->over; });
}

std::vector<std::byte> Core::image() {
  std::vector<std::byte> bytes(DXGPU_REGISTER_BYTES);
  read_registers(0, bytes);
  const pcie::ConfigSpace space = config();
  bytes.insert(bytes.end(), space.bytes().begin(), space.bytes().end());
  return bytes;
}

}  // namespace dxpu::gpu
