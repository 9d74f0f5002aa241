#include "proxy/function/memory_function.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace dxpu::function {

// DMA continuations hold this, not the function: they may come after its end.
struct MemoryFunction::State {
  explicit State(pcie::ConfigSpace space) : config(std::move(space)) {}

  std::mutex mutex;
  pcie::ConfigSpace config;
  Registers registers;
  std::vector<std::byte> ram;
  uint64_t dropped_writes = 0;
  uint64_t life = 0;  // counts resets: an answer to an older life is dropped
  UpstreamSlot upstream;

  void reset_locked(uint64_t msix_bytes) {
    config.reset();
    registers = Registers{};
    registers.msix.assign(msix_bytes, std::byte{0});
    ++life;
  }
};

namespace {

constexpr uint64_t kMsixBytes = MemoryFunction::kRegisterBytes - MemoryFunction::kMsixTable;

void put32(uint64_t& where, bool high, uint32_t value) {
  where = high ? (where & 0xffffffffull) | uint64_t{value} << 32 : (where & ~0xffffffffull) | value;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryFunction>> MemoryFunction::create(const MemoryFunctionOptions& options) {
  if (options.vectors < 1 || options.vectors > 64) return absl::InvalidArgumentError("vectors must be 1 to 64");
  if (options.ram_bytes > (uint64_t{1} << 30)) return absl::InvalidArgumentError("ram_bytes must be at most 1 GiB");
  pcie::ConfigDescription description;
  description.vendor_id = 0xd80b;
  description.device_id = 0x4d01;
  description.class_code = 0x058000;  // memory controller, other
  description.subsystem_vendor_id = 0xd80b;
  description.subsystem_id = 0x0001;
  description.bars[kRegisterBar] = {.size = kRegisterBytes};
  description.bars[kRamBar] = {.size = options.ram_bytes, .is_64bit = true, .prefetchable = true};
  description.msix = {.vectors = options.vectors,
                      .table_bar = kRegisterBar,
                      .table_offset = kMsixTable,
                      .pba_bar = kRegisterBar,
                      .pba_offset = kMsixPba};
  description.serial_number = options.serial_number;
  auto config = pcie::ConfigSpace::build(description);
  if (!config.ok()) return config.status();
  return std::unique_ptr<MemoryFunction>(new MemoryFunction(options, *std::move(config)));
}

MemoryFunction::MemoryFunction(const MemoryFunctionOptions& options, pcie::ConfigSpace config)
    : options_(options), state_(std::make_shared<State>(std::move(config))) {
  state_->ram.resize(options.ram_bytes);
  state_->registers.msix.assign(kMsixBytes, std::byte{0});
}

Identity MemoryFunction::identity() const {
  return {.vendor_id = 0xd80b,
          .device_id = 0x4d01,
          .class_code = 0x058000,
          .serial_number = options_.serial_number,
          .model = "memory test function"};
}

pcie::ConfigSpace MemoryFunction::config() const {
  std::lock_guard lock(state_->mutex);
  return state_->config;
}

void MemoryFunction::config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) {
  {
    std::lock_guard lock(state_->mutex);
    state_->config.write(offset, size, value);
    if (state_->config.take_function_level_reset()) state_->reset_locked(kMsixBytes);
  }
  done(Outcome::kSuccess);
}

void MemoryFunction::config_read(uint32_t offset, unsigned size, ReadDone done) {
  uint32_t value;
  {
    std::lock_guard lock(state_->mutex);
    value = state_->config.read(offset, size);
  }
  std::byte bytes[4];
  std::memcpy(bytes, &value, sizeof bytes);
  done(Outcome::kSuccess, std::span(bytes, std::min<size_t>(size, sizeof bytes)));
}

uint32_t MemoryFunction::read_register(uint64_t offset) {
  Registers& r = state_->registers;
  if (offset >= kMsixTable) {
    uint32_t value;
    std::memcpy(&value, r.msix.data() + (offset - kMsixTable), sizeof value);
    return value;
  }
  if (offset >= kScratch && offset < kScratch + sizeof r.scratch) return r.scratch[(offset - kScratch) / 4];
  switch (offset) {
    case kMagicOffset:
      return kMagic;
    case kCounter:
      return r.counter++;
    case kWrites:
      return r.writes;
    case kDmaAddress:
      return static_cast<uint32_t>(r.dma_address);
    case kDmaAddress + 4:
      return static_cast<uint32_t>(r.dma_address >> 32);
    case kDmaOffset:
      return r.dma_offset;
    case kDmaBytes:
      return r.dma_bytes;
    case kDmaStatus:
      return r.dma_status;
    case kDmaVector:
      return r.dma_vector;
    case kFetchAddOld:
      return static_cast<uint32_t>(r.fetch_add_old);
    case kFetchAddOld + 4:
      return static_cast<uint32_t>(r.fetch_add_old >> 32);
    default:
      return 0;
  }
}

uint32_t MemoryFunction::write_register(uint64_t offset, uint32_t value) {
  Registers& r = state_->registers;
  if (offset >= kMsixTable) {
    std::memcpy(r.msix.data() + (offset - kMsixTable), &value, sizeof value);
  } else if (offset >= kScratch && offset < kScratch + sizeof r.scratch) {
    r.scratch[(offset - kScratch) / 4] = value;
  } else if (offset == kDmaAddress || offset == kDmaAddress + 4) {
    put32(r.dma_address, offset != kDmaAddress, value);
  } else if (offset == kDmaOffset) {
    r.dma_offset = value;
  } else if (offset == kDmaBytes) {
    r.dma_bytes = value;
  } else if (offset == kDmaVector) {
    r.dma_vector = value;
  } else if (offset == kFetchAdd) {
    r.fetch_add_low = value;
  } else if (offset == kFetchAdd + 4 || offset == kDmaCommand) {
    if (r.dma_status == kBusy) return 0;
    r.dma_status = kBusy;
    if (offset == kDmaCommand) return value == 0 ? kRaise : value;
    put32(r.fetch_add_old, true, value);  // the operand until the old value takes its place
    put32(r.fetch_add_old, false, r.fetch_add_low);
    return ~0u;
  }
  return 0;
}

void MemoryFunction::bar_read(unsigned bar, uint64_t offset, uint32_t length, ReadDone done) {
  const uint64_t size = bar == kRegisterBar ? kRegisterBytes : bar == kRamBar ? options_.ram_bytes : 0;
  if (length < 1 || length > 4096 || offset > size || length > size - offset) {
    done(Outcome::kUnsupportedRequest, {});
    return;
  }
  std::vector<std::byte> data(length);
  {
    std::lock_guard lock(state_->mutex);
    if (bar == kRamBar) {
      std::memcpy(data.data(), state_->ram.data() + offset, length);
    } else {
      for (uint64_t at = offset & ~3ull; at < offset + length; at += 4) {
        const uint32_t value = read_register(at);
        for (uint64_t i = 0; i < 4; ++i) {
          if (at + i >= offset && at + i < offset + length) {
            data[at + i - offset] = static_cast<std::byte>(value >> (8 * i));
          }
        }
      }
    }
  }
  done(Outcome::kSuccess, data);
}

void MemoryFunction::bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) {
  const uint64_t size = bar == kRegisterBar ? kRegisterBytes : bar == kRamBar ? options_.ram_bytes : 0;
  std::vector<std::pair<uint32_t, uint64_t>> commands;
  {
    std::lock_guard lock(state_->mutex);
    const bool misaligned = bar == kRegisterBar && (offset % 4 != 0 || data.size() % 4 != 0);
    if (offset > size || data.size() > size - offset || misaligned) {
      ++state_->dropped_writes;
      return;
    }
    ++state_->registers.writes;
    if (bar == kRamBar) {
      std::memcpy(state_->ram.data() + offset, data.data(), data.size());
      return;
    }
    for (size_t at = 0; at < data.size(); at += 4) {
      uint32_t value;
      std::memcpy(&value, data.data() + at, sizeof value);
      const uint32_t command = write_register(offset + at, value);
      if (command != 0) commands.emplace_back(command, state_->registers.fetch_add_old);
    }
  }
  for (const auto& [command, operand] : commands) {
    if (command == ~0u) {
      run_fetch_add(operand);
    } else {
      run_dma(command);
    }
  }
}

void MemoryFunction::run_dma(uint32_t command) {
  std::shared_ptr<State> state = state_;
  uint64_t address, life;
  uint32_t offset, bytes, vector;
  bool master;
  {
    std::lock_guard lock(state->mutex);
    address = state->registers.dma_address;
    offset = state->registers.dma_offset;
    bytes = state->registers.dma_bytes;
    vector = state->registers.dma_vector;
    master = state->config.bus_master_enabled();
    life = state->life;
  }
  auto finish = [state, life, vector, command](Outcome outcome) {
    bool raise;
    {
      std::lock_guard lock(state->mutex);
      if (state->life != life) return;
      state->registers.dma_status = outcome == Outcome::kSuccess ? kDone : kFailed | static_cast<uint32_t>(outcome);
      raise = outcome == Outcome::kSuccess && ((command & kThenRaise) != 0 || (command & 0xff) == kRaise) &&
              state->config.msix_enabled() && state->config.bus_master_enabled() &&
              vector < state->config.msix().vectors;
    }
    if (!raise) return;
    if (auto upstream = state->upstream.use()) upstream->raise_msix(vector);
  };
  const uint32_t what = command & 0xff;
  if (what == kRaise) return finish(Outcome::kSuccess);
  auto upstream = state->upstream.use();
  if ((what != kToRam && what != kToHost) || !master || !upstream || offset > options_.ram_bytes ||
      bytes > options_.ram_bytes - offset || bytes == 0) {
    return finish(Outcome::kUnsupportedRequest);
  }
  // A buffer of its own: RAM may be read and written by the host meanwhile.
  auto buffer = std::make_shared<std::vector<std::byte>>(bytes);
  if (what == kToRam) {
    upstream->dma_read(address, *buffer, [state, life, offset, buffer, finish](Outcome outcome) {
      if (outcome == Outcome::kSuccess) {
        std::lock_guard lock(state->mutex);
        if (state->life == life) std::memcpy(state->ram.data() + offset, buffer->data(), buffer->size());
      }
      finish(outcome);
    });
  } else {
    {
      std::lock_guard lock(state->mutex);
      std::memcpy(buffer->data(), state->ram.data() + offset, bytes);
    }
    upstream->dma_write(address, *buffer);
    finish(Outcome::kSuccess);
  }
}

void MemoryFunction::run_fetch_add(uint64_t operand) {
  std::shared_ptr<State> state = state_;
  uint64_t address, life;
  bool master;
  {
    std::lock_guard lock(state->mutex);
    address = state->registers.dma_address;
    master = state->config.bus_master_enabled();
    life = state->life;
  }
  auto finish = [state, life](Outcome outcome, std::span<const std::byte> data) {
    std::lock_guard lock(state->mutex);
    if (state->life != life) return;
    state->registers.fetch_add_old = 0;
    if (outcome == Outcome::kSuccess) {
      std::memcpy(&state->registers.fetch_add_old, data.data(), std::min<size_t>(data.size(), 8));
    }
    state->registers.dma_status = outcome == Outcome::kSuccess ? kDone : kFailed | static_cast<uint32_t>(outcome);
  };
  auto upstream = state->upstream.use();
  if (!master || !upstream) return finish(Outcome::kUnsupportedRequest, {});
  upstream->dma_atomic(AtomicOp::kFetchAdd, address, 8, operand, 0, finish);
}

void MemoryFunction::connect(Upstream* upstream) { state_->upstream.connect(upstream); }

void MemoryFunction::reset(function::Done done) {
  {
    std::lock_guard lock(state_->mutex);
    state_->reset_locked(kMsixBytes);
  }
  done(Outcome::kSuccess);
}

absl::Status MemoryFunction::scrub() {
  std::lock_guard lock(state_->mutex);
  state_->reset_locked(kMsixBytes);
  std::fill(state_->ram.begin(), state_->ram.end(), std::byte{0});
  state_->dropped_writes = 0;
  return absl::OkStatus();
}

uint64_t MemoryFunction::dropped_writes() const {
  std::lock_guard lock(state_->mutex);
  return state_->dropped_writes;
}

}  // namespace dxpu::function
