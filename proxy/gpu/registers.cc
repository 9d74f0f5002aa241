// BAR0 as a map of numbers: which register is where, what a write to it means.

#include <algorithm>
#include <cstring>

#include "proxy/gpu/core.h"

namespace dxpu::gpu {
namespace {

uint32_t half(uint64_t value, bool high) { return static_cast<uint32_t>(high ? value >> 32 : value); }

void set_half(uint64_t& where, bool high, uint32_t value) {
  where = high ? (where & 0xffffffffull) | uint64_t{value} << 32 : (where & ~0xffffffffull) | value;
}

bool in(uint64_t offset, uint64_t base, uint64_t bytes) { return offset >= base && offset < base + bytes; }

// The two parts of BAR0 that are memory rather than registers: written in any size and alignment.
bool in_push(uint64_t offset) {
  return in(offset, DXGPU_USER_BASE, uint64_t{DXGPU_CHANNELS_MAX} * DXGPU_PAGE) &&
         offset % DXGPU_PAGE >= DXGPU_USER_PUSH;
}
bool in_table(uint64_t offset) { return in(offset, DXGPU_MSIX_TABLE, DXGPU_VECTORS * 16); }

}  // namespace

void Core::read_registers(uint64_t offset, std::span<std::byte> out) {
  std::lock_guard lock(mutex_);
  const uint64_t end = offset + out.size();
  for (uint64_t at = offset & ~3ull; at < end; at += 4) {
    const uint32_t value = read32(static_cast<uint32_t>(at));
    std::byte bytes[4];
    std::memcpy(bytes, &value, sizeof bytes);
    const uint64_t from = std::max(at, offset), to = std::min(at + 4, end);
    std::memcpy(out.data() + (from - offset), bytes + (from - at), to - from);
  }
}

uint32_t Core::read32(uint32_t offset) const {
  if (offset < DXGPU_PAGE) return read_global(offset);
  if (in(offset, DXGPU_MSIX_TABLE, 2 * DXGPU_PAGE)) return read_msix(offset);
  if (in(offset, DXGPU_CHANNEL_BASE, DXGPU_CHANNELS_MAX * DXGPU_PAGE)) {
    return read_channel(channels_[(offset - DXGPU_CHANNEL_BASE) / DXGPU_PAGE], offset % DXGPU_PAGE);
  }
  if (in(offset, DXGPU_USER_BASE, DXGPU_CHANNELS_MAX * DXGPU_PAGE)) {
    return read_user(channels_[(offset - DXGPU_USER_BASE) / DXGPU_PAGE], offset % DXGPU_PAGE);
  }
  return 0;
}

uint32_t Core::read_global(uint32_t offset) const {
  const bool high = offset % 8 != 0;
  if (in(offset, DXGPU_REG_COUNTERS, DXGPU_COUNTERS * 8)) {
    return half(counters_[(offset - DXGPU_REG_COUNTERS) / 8], high);
  }
  if (in(offset, DXGPU_REG_MODEL, DXGPU_MODEL_BYTES)) {
    char model[DXGPU_MODEL_BYTES] = {};
    options.model.copy(model, sizeof model - 1);
    uint32_t value;
    std::memcpy(&value, model + (offset - DXGPU_REG_MODEL), sizeof value);
    return value;
  }
  switch (offset) {
    case DXGPU_REG_MAGIC:
      return DXGPU_MAGIC;
    case DXGPU_REG_VERSION:
      return DXGPU_VERSION;
    case DXGPU_REG_CAPABILITIES:
      return DXGPU_CAP_RING | DXGPU_CAP_PUSH | DXGPU_CAP_SEGMENTS_IN_MEMORY;
    case DXGPU_REG_CHANNELS:
      return DXGPU_CHANNELS_MAX;
    case DXGPU_REG_MEMORY_BYTES:
    case DXGPU_REG_MEMORY_BYTES + 4:
      return half(description_.memory_bytes, high);
    case DXGPU_REG_ENGINE:
      return description_.id;
    case DXGPU_REG_VECTORS:
      return DXGPU_VECTORS;
    case DXGPU_REG_OPCODES:
      return description_.opcodes;
    case DXGPU_REG_SEGMENTS_MAX:
      return DXGPU_SEGMENTS_MAX;
    case DXGPU_REG_SERIAL:
    case DXGPU_REG_SERIAL + 4:
      return half(options.serial, high);
    case DXGPU_REG_STATUS:
      return resetting_ ? DXGPU_STATUS_RESETTING : DXGPU_STATUS_READY;
    case DXGPU_REG_INTERRUPT_STATUS:
      return interrupt_status_;
    case DXGPU_REG_INTERRUPT_ENABLE:
      return interrupt_enable_;
    case DXGPU_REG_CHANNEL_FAULTS:
    case DXGPU_REG_CHANNEL_FAULTS + 4:
      return half(faulted_channels(), high);
    case DXGPU_REG_SCRATCH:
    case DXGPU_REG_SCRATCH + 4:
      return half(scratch_, high);
    case DXGPU_REG_LAST_FAULT_CHANNEL:
      return last_fault_channel_;
    case DXGPU_REG_LAST_FAULT_CODE:
      return last_fault_code_;
    default:
      return 0;
  }
}

uint64_t Core::faulted_channels() const {
  uint64_t bits = 0;
  for (unsigned c = 0; c < DXGPU_CHANNELS_MAX; ++c) {
    if (channels_[c].state == DXGPU_STATE_ERROR) bits |= uint64_t{1} << c;
  }
  return bits;
}

uint32_t Core::read_channel(const Channel& channel, uint32_t offset) const {
  const bool high = offset % 8 != 0;
  switch (offset) {
    case DXGPU_CH_CONTROL:
      return channel.state == DXGPU_STATE_RUNNING || channel.state == DXGPU_STATE_ERROR ? DXGPU_CH_ENABLE : 0;
    case DXGPU_CH_MODE:
      return channel.mode;
    case DXGPU_CH_RING_BASE:
    case DXGPU_CH_RING_BASE + 4:
      return half(channel.ring_base, high);
    case DXGPU_CH_RING_LOG2:
      return channel.ring_log2;
    case DXGPU_CH_FAULT_VECTOR:
      return channel.fault_vector;
    case DXGPU_CH_STATE:
      return channel.state;
    case DXGPU_CH_PUT:
      return channel.put;
    case DXGPU_CH_GET:
      return channel.get;
    case DXGPU_CH_FAULT_CODE:
      return channel.fault.code;
    case DXGPU_CH_FAULT_ADDRESS:
    case DXGPU_CH_FAULT_ADDRESS + 4:
      return half(channel.fault.address, high);
    case DXGPU_CH_FAULT_INDEX:
      return channel.fault_index;
    case DXGPU_CH_FAULT_COOKIE:
      return channel.fault_cookie;
    case DXGPU_CH_LAST_FENCE:
    case DXGPU_CH_LAST_FENCE + 4:
      return half(channel.last_fence, high);
    case DXGPU_CH_COMMANDS:
    case DXGPU_CH_COMMANDS + 4:
      return half(channel.commands, high);
    default:
      return 0;
  }
}

uint32_t Core::read_user(const Channel& channel, uint32_t offset) const {
  if (offset >= DXGPU_USER_PUSH) {
    uint32_t value;
    std::memcpy(&value, channel.push.data() + (offset - DXGPU_USER_PUSH), sizeof value);
    return value;
  }
  switch (offset) {
    case DXGPU_USER_GET:
      return channel.get;
    case DXGPU_USER_STATE:
      return channel.state;
    case DXGPU_USER_LAST_FENCE:
    case DXGPU_USER_LAST_FENCE + 4:
      return half(channel.last_fence, offset % 8 != 0);
    default:
      return 0;
  }
}

uint32_t Core::read_msix(uint32_t offset) const {
  if (in_table(offset)) {
    uint32_t value;
    std::memcpy(&value, msix_table_.data() + (offset - DXGPU_MSIX_TABLE), sizeof value);
    return value;
  }
  if (!in(offset, DXGPU_MSIX_PBA, (DXGPU_VECTORS + 63) / 64 * 8)) return 0;
  uint32_t value = 0;
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned vector = (offset - DXGPU_MSIX_PBA) * 8 + i;
    if (vector < DXGPU_VECTORS && pending_[vector]) value |= 1u << i;
  }
  return value;
}

void Core::write_registers(uint64_t offset, std::span<const std::byte> data) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    while (!data.empty()) {
      size_t step;
      if (in_push(offset) || in_table(offset)) {
        const uint64_t end =
            in_push(offset) ? (offset / DXGPU_PAGE + 1) * DXGPU_PAGE : DXGPU_MSIX_TABLE + DXGPU_VECTORS * 16;
        step = std::min<size_t>(data.size(), end - offset);
        if (!write_bytes(offset, data.first(step))) ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
      } else if (offset % 4 == 0 && data.size() >= 4) {
        step = 4;
        uint32_t value;
        std::memcpy(&value, data.data(), sizeof value);
        write32(static_cast<uint32_t>(offset), value, work);
      } else {
        step = std::min<size_t>(data.size(), 4 - offset % 4);  // a part of a register: not taken
        ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
      }
      offset += step;
      data = data.subspan(step);
    }
  }
  run(work);
}

bool Core::write_bytes(uint64_t offset, std::span<const std::byte> data) {
  if (resetting_) return false;
  if (in_table(offset)) {
    std::memcpy(msix_table_.data() + (offset - DXGPU_MSIX_TABLE), data.data(), data.size());
    return true;
  }
  Channel& channel = channels_[(offset - DXGPU_USER_BASE) / DXGPU_PAGE];
  if (channel.mode != DXGPU_MODE_PUSH || channel.state != DXGPU_STATE_RUNNING) return false;
  std::memcpy(channel.push.data() + (offset % DXGPU_PAGE - DXGPU_USER_PUSH), data.data(), data.size());
  return true;
}

void Core::write32(uint32_t offset, uint32_t value, Work& work) {
  // While a reset runs, registers are about to be overwritten: nothing is taken.
  if (resetting_) {
    ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
  } else if (offset < DXGPU_PAGE) {
    write_global(offset, value, work);
  } else if (in(offset, DXGPU_CHANNEL_BASE, DXGPU_CHANNELS_MAX * DXGPU_PAGE)) {
    write_channel((offset - DXGPU_CHANNEL_BASE) / DXGPU_PAGE, offset % DXGPU_PAGE, value, work);
  } else if (in(offset, DXGPU_USER_BASE, DXGPU_CHANNELS_MAX * DXGPU_PAGE) &&
             offset % DXGPU_PAGE == DXGPU_USER_DOORBELL) {
    doorbell((offset - DXGPU_USER_BASE) / DXGPU_PAGE, value, work);
  } else {
    ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
  }
}

void Core::write_global(uint32_t offset, uint32_t value, Work& work) {
  switch (offset) {
    case DXGPU_REG_CONTROL:
      work.reset = work.reset || (value & DXGPU_CONTROL_RESET) != 0;
      break;
    case DXGPU_REG_INTERRUPT_STATUS:
      interrupt_status_ &= ~value;
      break;
    case DXGPU_REG_INTERRUPT_ENABLE:
      set_interrupt(interrupt_status_, value & (DXGPU_INTERRUPT_CHANNEL_FAULT | DXGPU_INTERRUPT_DROPPED_DOORBELL),
                    work);
      break;
    case DXGPU_REG_SCRATCH:
    case DXGPU_REG_SCRATCH + 4:
      set_half(scratch_, offset % 8 != 0, value);
      break;
    default:
      ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
  }
}

void Core::set_interrupt(uint32_t status, uint32_t enable, Work& work) {
  const bool before = (interrupt_status_ & interrupt_enable_) != 0;
  interrupt_status_ = status;
  interrupt_enable_ = enable;
  if (!before && (status & enable) != 0) work.raise.push_back(0);
}

void Core::write_channel(unsigned c, uint32_t offset, uint32_t value, Work& work) {
  Channel& channel = channels_[c];
  if (offset == DXGPU_CH_CONTROL) return write_control(c, value, work);
  if (channel.state != DXGPU_STATE_DISABLED) {
    ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
    return;
  }
  switch (offset) {
    case DXGPU_CH_MODE:
      channel.mode = value;
      break;
    case DXGPU_CH_RING_BASE:
    case DXGPU_CH_RING_BASE + 4:
      set_half(channel.ring_base, offset % 8 != 0, value);
      break;
    case DXGPU_CH_RING_LOG2:
      channel.ring_log2 = value;
      break;
    case DXGPU_CH_FAULT_VECTOR:
      channel.fault_vector = value;
      break;
    default:
      ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
  }
}

void Core::write_control(unsigned c, uint32_t value, Work& work) {
  Channel& channel = channels_[c];
  const bool reset = (value & DXGPU_CH_RESET) != 0;
  const bool on = (value & DXGPU_CH_ENABLE) != 0 && !reset;
  switch (channel.state) {
    case DXGPU_STATE_DISABLED:
      if (reset) {
        channel = Channel{};
      } else if (on) {
        enable(c, work);
      }
      return;
    case DXGPU_STATE_STOPPING:
      channel.clear_after_stop = channel.clear_after_stop || reset;
      if (on) ++counters_[DXGPU_COUNTER_DROPPED_WRITES];
      return;
    default:
      if (on) return;  // already
      channel.state = DXGPU_STATE_STOPPING;
      channel.clear_after_stop = reset;
      work.stop.push_back(c);
  }
}

}  // namespace dxpu::gpu
