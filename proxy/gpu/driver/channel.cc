#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proxy/base/status.h"
#include "proxy/gpu/driver/driver.h"

namespace dxpu::gpu {
namespace {

// Layout of the memory a channel shares with the function.
constexpr uint64_t kFenceAt = 0, kChecksumAt = 64, kRingAt = 4096;
// A segment carries at most 2^32 - 1 bytes; longer copies are several commands.
constexpr uint64_t kCommandBytesMax = uint64_t{1} << 30;
constexpr uint32_t kDefaultVector = 0xfffffffe;

Command make(uint8_t opcode, uint8_t flags, uint32_t cookie) {
  Command command;
  std::memset(&command, 0, sizeof command);
  command.header.opcode = opcode;
  command.header.flags = flags;
  command.header.cookie = cookie;
  return command;
}

}  // namespace

uint32_t Channel::entries() const {
  return options_.mode == ChannelMode::kPush ? DXGPU_PUSH_SLOTS : 1u << options_.ring_log2;
}

absl::Status Channel::open() {
  if (options_.ring_log2 < DXGPU_RING_LOG2_MIN || options_.ring_log2 > DXGPU_RING_LOG2_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("ring_log2 ", options_.ring_log2, ": must be 1 to 16"));
  }
  if (options_.vector == kDefaultVector) options_.vector = 1 + index_;
  const uint64_t ring_bytes = options_.mode == ChannelMode::kRing ? uint64_t{entries()} * DXGPU_COMMAND_BYTES : 0;
  DXPU_ASSIGN_OR_RETURN(shared_, driver_.allocate(kRingAt + ring_bytes));
  if (options_.vector != DXGPU_NO_VECTOR) {
    eventfd_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!eventfd_.valid()) return base::errno_status("eventfd");
    DXPU_RETURN_IF_ERROR(driver_.device().set_msix_eventfd(options_.vector, eventfd_.get()));
  }
  DXPU_RETURN_IF_ERROR(stop(DXGPU_CH_RESET));
  return enable();
}

absl::Status Channel::enable() {
  const uint64_t page = control_page();
  const bool push = options_.mode == ChannelMode::kPush;
  DXPU_RETURN_IF_ERROR(driver_.write32(page + DXGPU_CH_MODE, push ? DXGPU_MODE_PUSH : DXGPU_MODE_RING));
  if (!push) {
    DXPU_RETURN_IF_ERROR(driver_.write64(page + DXGPU_CH_RING_BASE, shared_->iova() + kRingAt));
    DXPU_RETURN_IF_ERROR(driver_.write32(page + DXGPU_CH_RING_LOG2, options_.ring_log2));
  }
  DXPU_RETURN_IF_ERROR(driver_.write32(page + DXGPU_CH_FAULT_VECTOR, options_.vector));
  DXPU_RETURN_IF_ERROR(driver_.write32(page + DXGPU_CH_CONTROL, DXGPU_CH_ENABLE));
  put_ = get_ = rung_ = 0;
  enabled_ = true;
  return check_alive();
}

absl::Status Channel::stop(uint32_t control) {
  DXPU_RETURN_IF_ERROR(driver_.write32(control_page() + DXGPU_CH_CONTROL, control));
  const absl::Time end = absl::Now() + driver_.options().deadline;
  for (;;) {
    DXPU_ASSIGN_OR_RETURN(const uint32_t state, driver_.read32(control_page() + DXGPU_CH_STATE));
    if (state == 0xffffffff) return absl::UnavailableError("the function is gone: channel state reads as all ones");
    if (state == DXGPU_STATE_DISABLED) return absl::OkStatus();
    if (absl::Now() > end) {
      return absl::DeadlineExceededError(absl::StrCat("channel ", index_, " did not stop: its state is ", state));
    }
    absl::SleepFor(absl::Microseconds(100));
  }
}

Channel::~Channel() {
  if (enabled_) (void)stop(DXGPU_CH_RESET);  // gone, or stuck: the mapping is taken away below either way
  if (eventfd_.valid()) (void)driver_.device().set_msix_eventfd(options_.vector, -1);
}

absl::Status Channel::reset() {
  DXPU_RETURN_IF_ERROR(stop(DXGPU_CH_RESET));
  return enable();
}

absl::StatusOr<ChannelFault> Channel::fault() {
  ChannelFault fault;
  const uint64_t page = control_page();
  DXPU_ASSIGN_OR_RETURN(fault.state, driver_.read32(page + DXGPU_CH_STATE));
  DXPU_ASSIGN_OR_RETURN(fault.code, driver_.read32(page + DXGPU_CH_FAULT_CODE));
  DXPU_ASSIGN_OR_RETURN(fault.address, driver_.read64(page + DXGPU_CH_FAULT_ADDRESS));
  DXPU_ASSIGN_OR_RETURN(fault.index, driver_.read32(page + DXGPU_CH_FAULT_INDEX));
  DXPU_ASSIGN_OR_RETURN(fault.cookie, driver_.read32(page + DXGPU_CH_FAULT_COOKIE));
  return fault;
}

absl::Status Channel::check_alive() {
  DXPU_ASSIGN_OR_RETURN(const uint32_t state, driver_.read32(user_page() + DXGPU_USER_STATE));
  if (state == DXGPU_STATE_RUNNING) return absl::OkStatus();
  if (state == 0xffffffff) return absl::UnavailableError("the function is gone: channel state reads as all ones");
  if (state != DXGPU_STATE_ERROR) {
    return absl::FailedPreconditionError(
        absl::StrCat("channel ", index_, " was stopped (state ", state, "): reset it"));
  }
  DXPU_ASSIGN_OR_RETURN(const ChannelFault what, fault());
  return absl::AbortedError(absl::StrCat("channel ", index_, " fault ", what.code, " (", name_of_fault(what.code),
                                         ") at address 0x", absl::Hex(what.address), ", command ", what.index,
                                         ", cookie 0x", absl::Hex(what.cookie), ": reset the channel"));
}

absl::Status Channel::make_room() {
  if (put_ - get_ < entries()) return absl::OkStatus();
  DXPU_RETURN_IF_ERROR(kick());
  const absl::Time end = absl::Now() + driver_.options().deadline;
  for (;;) {
    DXPU_ASSIGN_OR_RETURN(const uint32_t get, driver_.read32(user_page() + DXGPU_USER_GET));
    if (put_ - get < entries()) {
      get_ = get;
      return absl::OkStatus();
    }
    DXPU_RETURN_IF_ERROR(check_alive());
    if (absl::Now() > end) return absl::DeadlineExceededError(absl::StrCat("channel ", index_, " stays full"));
    absl::SleepFor(absl::Microseconds(50));
  }
}

absl::Status Channel::queue(const Command& command) {
  DXPU_RETURN_IF_ERROR(make_room());
  const uint64_t slot = put_ % entries();
  if (options_.mode == ChannelMode::kRing) {
    std::memcpy(shared_->bytes().data() + kRingAt + slot * DXGPU_COMMAND_BYTES, &command, sizeof command);
  } else {
    DXPU_RETURN_IF_ERROR(driver_.device().bar_write(DXGPU_BAR_REGISTERS,
                                                    user_page() + DXGPU_USER_PUSH + slot * DXGPU_COMMAND_BYTES,
                                                    std::as_bytes(std::span(&command, 1))));
  }
  ++put_;
  return absl::OkStatus();
}

absl::Status Channel::kick() {
  if (rung_ == put_) return absl::OkStatus();
    // The ring first, then its index. bar_write() of both devices there are orders memory by itself (a lock, a system
    // call); this is for one that will write through a mapping. ThreadSanitizer does not know fences, and needs none
    // here.
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_release);
#endif
  DXPU_RETURN_IF_ERROR(driver_.write32(user_page() + DXGPU_USER_DOORBELL, put_));
  rung_ = put_;
  return absl::OkStatus();
}

absl::Status Channel::copy_host(dxgpu_opcode direction, uint64_t memory, uint64_t iova, uint64_t bytes) {
  while (bytes > 0) {
    const uint64_t step = std::min(bytes, kCommandBytesMax);
    Command command = make(static_cast<uint8_t>(direction), 0, put_);
    command.copy_host.memory = memory;
    command.copy_host.bytes = step;
    command.copy_host.segments = 1;
    command.copy_host.segment[0] = {.address = iova, .bytes = static_cast<uint32_t>(step), .flags = 0};
    DXPU_RETURN_IF_ERROR(queue(command));
    memory += step;
    iova += step;
    bytes -= step;
  }
  return absl::OkStatus();
}

namespace {
absl::Status check_buffer(const HostBuffer& buffer, uint64_t offset, uint64_t bytes) {
  if (bytes == 0 || offset > buffer.size() || bytes > buffer.size() - offset) {
    return absl::OutOfRangeError(
        absl::StrCat(bytes, " bytes at offset ", offset, " do not lie in a buffer of ", buffer.size()));
  }
  return absl::OkStatus();
}
}  // namespace

absl::Status Channel::copy_to_device(uint64_t memory, const HostBuffer& from, uint64_t offset, uint64_t bytes) {
  DXPU_RETURN_IF_ERROR(check_buffer(from, offset, bytes));
  return copy_host(DXGPU_OP_COPY_IN, memory, from.iova() + offset, bytes);
}

absl::Status Channel::copy_from_device(HostBuffer& to, uint64_t offset, uint64_t memory, uint64_t bytes) {
  DXPU_RETURN_IF_ERROR(check_buffer(to, offset, bytes));
  return copy_host(DXGPU_OP_COPY_OUT, memory, to.iova() + offset, bytes);
}

absl::Status Channel::copy_list(dxgpu_opcode direction, uint64_t memory, uint64_t bytes, const HostBuffer& list,
                                uint64_t offset, uint32_t count) {
  DXPU_RETURN_IF_ERROR(check_buffer(list, offset, uint64_t{count} * sizeof(dxgpu_segment)));
  Command command = make(static_cast<uint8_t>(direction), DXGPU_COPY_LIST, put_);
  command.copy_host.memory = memory;
  command.copy_host.bytes = bytes;
  command.copy_host.segments = count;
  command.copy_host.segment[0].address = list.iova() + offset;
  return queue(command);
}

absl::Status Channel::copy_on_device(uint64_t destination, uint64_t source, uint64_t bytes) {
  Command command = make(DXGPU_OP_COPY_LOCAL, 0, put_);
  command.copy_local.destination = destination;
  command.copy_local.source = source;
  command.copy_local.bytes = bytes;
  return queue(command);
}

absl::Status Channel::fill(uint64_t memory, uint64_t bytes, uint64_t pattern, uint32_t pattern_bytes) {
  Command command = make(DXGPU_OP_FILL, 0, put_);
  command.fill.memory = memory;
  command.fill.bytes = bytes;
  command.fill.pattern = pattern;
  command.fill.pattern_bytes = pattern_bytes;
  return queue(command);
}

absl::StatusOr<uint64_t> Channel::fence() {
  const bool interrupt = eventfd_.valid();
  Command command = make(DXGPU_OP_FENCE, DXGPU_FENCE_HOST | (interrupt ? DXGPU_FENCE_INTERRUPT : 0), put_);
  command.fence.value = last_fence_ + 1;
  command.fence.host_address = shared_->iova() + kFenceAt;
  command.fence.vector = interrupt ? options_.vector : 0;
  DXPU_RETURN_IF_ERROR(queue(command));
  ++last_fence_;
  DXPU_RETURN_IF_ERROR(kick());
  return last_fence_;
}

uint64_t Channel::fence_seen() const {
  return __atomic_load_n(reinterpret_cast<const uint64_t*>(shared_->bytes().data() + kFenceAt), __ATOMIC_ACQUIRE);
}

absl::Status Channel::wait(uint64_t fence, WaitBy by) {
  if (by == WaitBy::kInterrupt && !eventfd_.valid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("channel ", index_, " was opened without an interrupt vector: wait by polling"));
  }
  const absl::Time end = absl::Now() + driver_.options().deadline;
  // A look at the registers now and then: a channel in error, or a function that is gone, raises no fence.
  constexpr absl::Duration kLook = absl::Milliseconds(100);
  absl::Time next_look = absl::Now() + kLook;
  while (fence_seen() < fence) {
    bool woken = false;
    if (by == WaitBy::kInterrupt) {
      pollfd poll_for{.fd = eventfd_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&poll_for, 1, static_cast<int>(absl::ToInt64Milliseconds(kLook))) < 0 && errno != EINTR) {
        return base::errno_status("wait for the interrupt");
      }
      uint64_t count = 0;
      if (::read(eventfd_.get(), &count, sizeof count) == sizeof count) {
        interrupts_ += count;
        woken = true;
      }
    } else {
      absl::SleepFor(absl::Microseconds(20));
    }
    const absl::Time now = absl::Now();
    if (fence_seen() >= fence) break;
    if (woken || now >= next_look) {
      DXPU_RETURN_IF_ERROR(check_alive());
      next_look = now + kLook;
    }
    if (now > end) {
      return absl::DeadlineExceededError(
          absl::StrCat("channel ", index_, ": fence ", fence, " did not come, the last one is ", fence_seen()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Channel::checksum(uint64_t memory, uint64_t bytes, WaitBy by) {
  Command command = make(DXGPU_OP_CHECKSUM, DXGPU_CHECKSUM_HOST, put_);
  command.checksum.memory = memory;
  command.checksum.bytes = bytes;
  command.checksum.host_address = shared_->iova() + kChecksumAt;
  const uint32_t cookie = put_;
  DXPU_RETURN_IF_ERROR(queue(command));
  DXPU_ASSIGN_OR_RETURN(const uint64_t value, fence());
  DXPU_RETURN_IF_ERROR(wait(value, by));
  dxgpu_checksum_result result;
  std::memcpy(&result, shared_->bytes().data() + kChecksumAt, sizeof result);
  if (result.cookie != cookie) return absl::InternalError("the checksum result is of another command");
  return result.crc32c;
}

}  // namespace dxpu::gpu
