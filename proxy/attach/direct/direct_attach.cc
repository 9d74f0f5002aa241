#include "proxy/attach/direct/direct_attach.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proxy/attach/direct/port.h"

namespace dxpu::attach {
namespace {

constexpr uint32_t kCommand = 0x04;
constexpr uint16_t kMemoryEnable = 0x2, kBusMaster = 0x4;

std::string this_process() {
  std::string name;
  std::ifstream("/proc/self/comm") >> name;
  return absl::StrCat("pid ", ::getpid(), " (", name, ")");
}

void signal_eventfd(int fd) {
  const uint64_t one = 1;
  // Full (2^64 - 2 signals unread) or closed by its owner: nobody to tell.
  if (::write(fd, &one, sizeof one) < 0) spdlog::debug("attach=direct eventfd={} error={}", fd, std::strerror(errno));
}

template <typename T>
T modify(function::AtomicOp op, void* place, uint64_t operand, uint64_t compare) {
  T* target = static_cast<T*>(place);
  switch (op) {
    case function::AtomicOp::kFetchAdd:
      return __atomic_fetch_add(target, static_cast<T>(operand), __ATOMIC_SEQ_CST);
    case function::AtomicOp::kSwap:
      return __atomic_exchange_n(target, static_cast<T>(operand), __ATOMIC_SEQ_CST);
    case function::AtomicOp::kCompareSwap: {
      T expected = static_cast<T>(compare);
      __atomic_compare_exchange_n(target, &expected, static_cast<T>(operand), false, __ATOMIC_SEQ_CST,
                                  __ATOMIC_SEQ_CST);
      return expected;
    }
  }
  return 0;
}

}  // namespace

DirectAttach::DirectAttach(const DirectOptions& options) : port_(std::make_shared<Port>()) { port_->options = options; }

DirectAttach::~DirectAttach() { (void)unplug("attach point closed"); }

absl::Status DirectAttach::plug(function::Function& function) {
  const pcie::ConfigSpace config = function.config();
  {
    std::lock_guard lock(port_->mutex);
    if (port_->state != PortState::kEmpty) {
      return absl::FailedPreconditionError(absl::StrCat("direct port is ", name_of(port_->state),
                                                        port_->holder.empty() ? "" : ", held by ", port_->holder,
                                                        ": unplug it and close its users first"));
    }
    port_->state = PortState::kPlugging;
    port_->vectors = config.msix().vectors;
    const auto msix = config.find_capability(0x11);
    port_->msix_control = msix ? *msix + 2u : 0;
    for (unsigned bar = 0; bar < pcie::kBarCount; ++bar) port_->bar_sizes[bar] = config.bar(bar).size;
  }
  port_->forget_interrupts();
  function.connect(this);
  {
    std::lock_guard lock(port_->mutex);
    port_->function = &function;
    port_->blocking = dynamic_cast<function::BlockingReads*>(&function);
    port_->state = PortState::kAttached;
  }
  port_->notify();
  return absl::OkStatus();
}

absl::Status DirectAttach::unplug(const std::string& reason) {
  function::Function* function;
  {
    std::unique_lock lock(port_->mutex);
    function = std::exchange(port_->function, nullptr);
    if (function == nullptr) return absl::OkStatus();
    port_->blocking = nullptr;
    port_->is_gone = port_->is_open;
    port_->state = port_->is_open ? PortState::kGone : PortState::kRemoving;
    for (ReadWait* wait : port_->waits) {
      std::lock_guard wait_lock(wait->mutex);
      wait->abandoned = true;
      wait->outcome = function::Outcome::kLinkDown;
      wait->changed.notify_all();
    }
    spdlog::info("attach=direct event=unplug reason=\"{}\" holder=\"{}\"", reason, port_->holder);
    // Those inside the function: waiters were just ended; a BlockingReads has its own deadline.
    port_->idle.wait(lock, [&] { return port_->users == 0; });
  }
  function->connect(nullptr);
  port_->dma.remove_all();
  {
    std::lock_guard lock(port_->irq_mutex);
    port_->removal_wanted = true;
    if (port_->removal_eventfd >= 0) signal_eventfd(port_->removal_eventfd);
  }
  {
    std::lock_guard lock(port_->mutex);
    if (!port_->is_open) port_->state = PortState::kEmpty;
  }
  port_->notify();
  return absl::OkStatus();
}

absl::Status DirectAttach::request_release() {
  std::lock_guard lock(port_->irq_mutex);
  port_->removal_wanted = true;
  if (port_->removal_eventfd >= 0) signal_eventfd(port_->removal_eventfd);
  return absl::OkStatus();
}

PortStatus DirectAttach::status() const {
  std::lock_guard lock(port_->mutex);
  return {.state = port_->state, .bus_address = "", .holder = port_->holder, .detail = ""};
}

void DirectAttach::set_status_callback(absl::AnyInvocable<void()> changed) {
  std::lock_guard lock(port_->changed_mutex);
  port_->changed = std::move(changed);
}

absl::StatusOr<std::unique_ptr<DirectDevice>> DirectAttach::open(const std::string& holder) {
  {
    std::lock_guard lock(port_->mutex);
    if (port_->function == nullptr || port_->state != PortState::kAttached) {
      return absl::FailedPreconditionError(absl::StrCat("direct port is ", name_of(port_->state), ": nothing to open"));
    }
    if (port_->is_open) {
      return absl::FailedPreconditionError(absl::StrCat("the function is in use by ", port_->holder));
    }
    port_->is_open = true;
    port_->is_gone = false;
    port_->holder = holder.empty() ? this_process() : holder;
  }
  port_->forget_interrupts();
  {
    std::lock_guard setup(port_->setup_mutex);
    if (absl::Status status = port_->reset_keeping_bars(kMemoryEnable | kBusMaster, false); !status.ok()) {
      port_->close();
      return status;
    }
  }
  port_->notify();
  return std::unique_ptr<DirectDevice>(new DirectDevice(port_));
}

DirectStats DirectAttach::stats() const {
  return {.dma_reads = port_->dma_reads,
          .dma_writes = port_->dma_writes,
          .dma_atomics = port_->dma_atomics,
          .dma_refused = port_->dma_refused,
          .interrupts = port_->interrupts,
          .interrupts_pending = port_->interrupts_pending,
          .read_timeouts = port_->read_timeouts,
          .read_errors = port_->read_errors};
}

void DirectAttach::dma_read(uint64_t address, std::span<std::byte> out, function::Done done) {
  ++port_->dma_reads;
  const bool mapped = port_->dma.read(address, out);
  if (!mapped) ++port_->dma_refused;
  done(mapped ? function::Outcome::kSuccess : function::Outcome::kUnsupportedRequest);
}

void DirectAttach::dma_write(uint64_t address, std::span<const std::byte> data) {
  ++port_->dma_writes;
  if (!port_->dma.write(address, data)) ++port_->dma_refused;
}

void DirectAttach::dma_atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand,
                              uint64_t compare, function::ReadDone done) {
  ++port_->dma_atomics;
  uint64_t old = 0;
  const bool possible = (width == 4 || width == 8) && port_->dma.modify(address, width, [&](void* place) {
    old = width == 4 ? modify<uint32_t>(op, place, operand, compare) : modify<uint64_t>(op, place, operand, compare);
  });
  if (!possible) {
    ++port_->dma_refused;
    return done(function::Outcome::kUnsupportedRequest, {});
  }
  done(function::Outcome::kSuccess, std::as_bytes(std::span(&old, 1)).first(width));
}

void DirectAttach::raise_msix(unsigned vector) {
  std::lock_guard lock(port_->irq_mutex);
  if (vector >= port_->eventfds.size()) return;
  ++port_->interrupts;
  if (port_->eventfds[vector] >= 0) {
    signal_eventfd(port_->eventfds[vector]);
  } else {
    port_->pending[vector] = true;
    ++port_->interrupts_pending;
  }
}

// ---- Port
// ---------------------------------------------------------------------------------------------------------------

DirectAttach::Port::Use::Use(Port& port) : port_(port) {
  std::lock_guard lock(port.mutex);
  function = port.function;
  blocking = port.blocking;
  if (function != nullptr) ++port.users;
}

DirectAttach::Port::Use::~Use() {
  if (function == nullptr) return;
  std::lock_guard lock(port_.mutex);
  if (--port_.users == 0) port_.idle.notify_all();
}

void DirectAttach::Port::notify() {
  std::lock_guard lock(changed_mutex);
  if (changed) changed();
}

void DirectAttach::Port::forget_interrupts() {
  std::lock_guard lock(irq_mutex);
  eventfds.assign(vectors, -1);
  pending.assign(vectors, false);
  removal_eventfd = -1;
  removal_wanted = false;
}

template <typename Issue>
function::Outcome DirectAttach::Port::await(absl::Duration deadline, std::span<std::byte> out, Issue issue) {
  auto wait = std::make_shared<ReadWait>();
  {
    std::lock_guard lock(mutex);
    if (function == nullptr) {
      std::fill(out.begin(), out.end(), std::byte{0xff});
      return function::Outcome::kLinkDown;
    }
    waits.insert(wait.get());
  }
  issue(wait);
  function::Outcome outcome;
  {
    std::unique_lock lock(wait->mutex);
    const bool over = wait->changed.wait_for(lock, absl::ToChronoNanoseconds(deadline),
                                             [&] { return wait->outstanding == 0 || wait->abandoned; });
    if (!over) wait->outcome = function::Outcome::kTimeout;
    wait->abandoned = true;
    outcome = wait->outcome;
  }
  {
    std::lock_guard lock(mutex);
    waits.erase(wait.get());
  }
  if (outcome != function::Outcome::kSuccess) {
    ++(outcome == function::Outcome::kTimeout ? read_timeouts : read_errors);
    std::fill(out.begin(), out.end(), std::byte{0xff});
  }
  return outcome;
}

namespace {

// Ends one announced continuation; `take` runs only while the waiter still waits.
template <typename Take>
void answer(ReadWait& wait, function::Outcome outcome, Take take) {
  std::lock_guard lock(wait.mutex);
  --wait.outstanding;
  if (!wait.abandoned) {
    if (outcome != function::Outcome::kSuccess) {
      wait.outcome = outcome;
    } else {
      take();
    }
  }
  wait.changed.notify_all();
}

void announce(ReadWait& wait) {
  std::lock_guard lock(wait.mutex);
  ++wait.outstanding;
}

}  // namespace

function::Outcome DirectAttach::Port::read_bar(unsigned bar, uint64_t offset, std::span<std::byte> out) {
  Use use(*this);
  if (!use) {
    std::fill(out.begin(), out.end(), std::byte{0xff});
    return function::Outcome::kLinkDown;
  }
  constexpr size_t kPiece = 4096;
  if (use.blocking != nullptr && out.size() <= kPiece) {
    const function::Outcome outcome = use.blocking->bar_read_wait(bar, offset, out);
    if (outcome != function::Outcome::kSuccess)
      ++(outcome == function::Outcome::kTimeout ? read_timeouts : read_errors);
    return outcome;
  }
  function::Outcome result = function::Outcome::kSuccess;
  // A window of reads in flight at a time: long ones cost a round trip per window, not per piece.
  constexpr size_t kWindow = 32 * kPiece;
  for (size_t at = 0; at < out.size() && result == function::Outcome::kSuccess; at += kWindow) {
    const std::span<std::byte> window = out.subspan(at, std::min(kWindow, out.size() - at));
    result = await(options.read_deadline, window, [&](const std::shared_ptr<ReadWait>& wait) {
      for (size_t piece = 0; piece < window.size(); piece += kPiece) {
        const std::span<std::byte> part = window.subspan(piece, std::min(kPiece, window.size() - piece));
        announce(*wait);
        use.function->bar_read(bar, offset + at + piece, static_cast<uint32_t>(part.size()),
                               [wait, part](function::Outcome outcome, std::span<const std::byte> data) {
                                 answer(*wait, outcome, [&] {
                                   std::copy_n(data.begin(), std::min(data.size(), part.size()), part.begin());
                                 });
                               });
      }
    });
  }
  if (result != function::Outcome::kSuccess) std::fill(out.begin(), out.end(), std::byte{0xff});
  return result;
}

function::Outcome DirectAttach::Port::read_config(uint32_t offset, std::span<std::byte> out) {
  Use use(*this);
  if (!use) {
    std::fill(out.begin(), out.end(), std::byte{0xff});
    return function::Outcome::kLinkDown;
  }
  while (!out.empty()) {
    const unsigned size = offset % 4 == 0 && out.size() >= 4 ? 4 : offset % 2 == 0 && out.size() >= 2 ? 2 : 1;
    const std::span<std::byte> part = out.first(size);
    const auto outcome = await(options.read_deadline, part, [&](const std::shared_ptr<ReadWait>& wait) {
      announce(*wait);
      use.function->config_read(offset, size, [wait, part](function::Outcome result, std::span<const std::byte> data) {
        answer(*wait, result, [&] { std::copy_n(data.begin(), std::min(data.size(), part.size()), part.begin()); });
      });
    });
    if (outcome != function::Outcome::kSuccess) {
      std::fill(out.begin(), out.end(), std::byte{0xff});
      return outcome;
    }
    offset += size;
    out = out.subspan(size);
  }
  return function::Outcome::kSuccess;
}

function::Outcome DirectAttach::Port::write_config(uint32_t offset, std::span<const std::byte> data) {
  Use use(*this);
  if (!use) return function::Outcome::kLinkDown;
  while (!data.empty()) {
    const unsigned size = offset % 4 == 0 && data.size() >= 4 ? 4 : offset % 2 == 0 && data.size() >= 2 ? 2 : 1;
    uint32_t value = 0;
    std::memcpy(&value, data.data(), size);
    const auto outcome = await(options.read_deadline, {}, [&](const std::shared_ptr<ReadWait>& wait) {
      announce(*wait);
      use.function->config_write(offset, size, value,
                                 [wait](function::Outcome result) { answer(*wait, result, [] {}); });
    });
    if (outcome != function::Outcome::kSuccess) return outcome;
    offset += size;
    data = data.subspan(size);
  }
  return function::Outcome::kSuccess;
}

uint32_t DirectAttach::Port::config_value(uint32_t offset, unsigned size) {
  uint32_t value = 0;
  read_config(offset, std::as_writable_bytes(std::span(&value, 1)).first(size));
  return value;
}

void DirectAttach::Port::set_config_value(uint32_t offset, unsigned size, uint32_t value) {
  write_config(offset, std::as_bytes(std::span(&value, 1)).first(size));
}

absl::Status DirectAttach::Port::reset_keeping_bars(uint16_t command, bool msix) {
  std::array<uint32_t, pcie::kBarCount> bars{};
  for (unsigned bar = 0; bar < bars.size(); ++bar) bars[bar] = config_value(0x10 + 4 * bar, 4);
  function::Outcome outcome;
  {
    Use use(*this);
    if (!use) return absl::OkStatus();  // gone: it will be wiped, not reset
    outcome = await(options.reset_deadline, {}, [&](const std::shared_ptr<ReadWait>& wait) {
      announce(*wait);
      use.function->reset([wait](function::Outcome result) { answer(*wait, result, [] {}); });
    });
  }
  if (outcome == function::Outcome::kLinkDown) return absl::OkStatus();
  if (outcome != function::Outcome::kSuccess) {
    return absl::DeadlineExceededError(absl::StrCat("the function did not reset: ", function::name_of(outcome)));
  }
  for (unsigned bar = 0; bar < bars.size(); ++bar) set_config_value(0x10 + 4 * bar, 4, bars[bar]);
  set_config_value(kCommand, 2, command);
  if (msix) set_msix_enable(true);
  return absl::OkStatus();
}

void DirectAttach::Port::set_msix_enable(bool on) {
  if (msix_control == 0) return;
  constexpr uint32_t kEnable = 0x8000;
  const uint32_t control = config_value(msix_control, 2);
  set_config_value(msix_control, 2, on ? control | kEnable : control & ~kEnable);
}

void DirectAttach::Port::close() {
  {
    std::lock_guard setup(setup_mutex);
    // Off before the mappings go, so that a function at work fails by its own rules and not into nothing.
    set_config_value(kCommand, 2, kMemoryEnable);
    set_msix_enable(false);
    dma.remove_all();
    forget_interrupts();
    if (absl::Status status = reset_keeping_bars(kMemoryEnable, false); !status.ok()) {
      spdlog::warn("attach=direct event=close error=\"{}\"", status.ToString());
    }
  }
  {
    std::lock_guard lock(mutex);
    is_open = false;
    is_gone = false;
    holder.clear();
    if (state == PortState::kGone) state = PortState::kEmpty;
  }
  notify();
}

}  // namespace dxpu::attach
