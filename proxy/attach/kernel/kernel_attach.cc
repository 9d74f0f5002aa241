#include "proxy/attach/kernel/kernel_attach.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kmod/uapi/dxpu.h"
#include "proxy/attach/kernel/kernel_rings.h"
#include "proxy/base/status.h"
#include "proxy/function/blocking_reads.h"

namespace dxpu::attach {
namespace {

using function::Outcome;

static_assert(static_cast<int>(Outcome::kSuccess) == DXPU_STATUS_SUCCESS);
static_assert(static_cast<int>(Outcome::kUnsupportedRequest) == DXPU_STATUS_UR);
static_assert(static_cast<int>(Outcome::kConfigRetry) == DXPU_STATUS_CRS);
static_assert(static_cast<int>(Outcome::kCompleterAbort) == DXPU_STATUS_CA);
static_assert(static_cast<int>(Outcome::kTimeout) == DXPU_STATUS_CTO);
static_assert(static_cast<int>(Outcome::kPoisoned) == DXPU_STATUS_POISONED);
static_assert(static_cast<int>(Outcome::kLinkDown) == DXPU_STATUS_LINK_DOWN);
static_assert(static_cast<int>(function::AtomicOp::kFetchAdd) == DXPU_ATOMIC_FETCH_ADD);
static_assert(static_cast<int>(function::AtomicOp::kSwap) == DXPU_ATOMIC_SWAP);
static_assert(static_cast<int>(function::AtomicOp::kCompareSwap) == DXPU_ATOMIC_COMPARE_SWAP);
static_assert(static_cast<int>(PortState::kEmpty) == DXPU_PORT_EMPTY);
static_assert(static_cast<int>(PortState::kPlugging) == DXPU_PORT_PLUGGING);
static_assert(static_cast<int>(PortState::kAttached) == DXPU_PORT_ATTACHED);
static_assert(static_cast<int>(PortState::kGone) == DXPU_PORT_GONE);
static_assert(static_cast<int>(PortState::kRemoving) == DXPU_PORT_REMOVING);

constexpr uint8_t kVpdCapability = 0x03;
// How long the serving thread sleeps at most; it is woken for everything, so this only bounds a lost wake-up.
constexpr uint32_t kWaitMs = 10000;

uint32_t milliseconds(absl::Duration duration) {
  return static_cast<uint32_t>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, DXPU_MAX_DEADLINE_MS));
}

// The thread that serves some port's ring: what it completes is taken in by its own next WAIT.
thread_local const KernelRings* serving_rings = nullptr;

void answer(KernelRings& rings, uint64_t id, Outcome outcome, std::span<const std::byte> data) {
  rings.complete(id, static_cast<uint16_t>(outcome),
                 outcome == Outcome::kSuccess ? data : std::span<const std::byte>());
  if (serving_rings != &rings) (void)rings.run(DXPU_IOC_COMPLETE, 0ul);
}

}  // namespace

// The function while it is plugged. unplug() waits for those inside.
struct KernelAttach::Plugged {
  explicit Plugged(function::Function& plugged)
      : function(plugged), blocking(dynamic_cast<function::BlockingReads*>(&plugged)) {}

  bool enter() {
    std::lock_guard lock(mutex);
    if (!active) return false;
    ++users;
    return true;
  }
  void leave() {
    std::lock_guard lock(mutex);
    if (--users == 0) idle.notify_all();
  }
  void retire() {
    std::unique_lock lock(mutex);
    active = false;
    idle.wait(lock, [&] { return users == 0; });
  }

  function::Function& function;
  function::BlockingReads* const blocking;
  uint32_t vpd = 0;  // offset of the VPD capability, 0 when absent
  std::mutex mutex;
  std::condition_variable idle;
  bool active = true;  // guarded by mutex
  unsigned users = 0;  // guarded by mutex
};

absl::StatusOr<unsigned> KernelAttach::port_count(const std::string& device) {
  DXPU_ASSIGN_OR_RETURN(std::shared_ptr<KernelRings> rings, KernelRings::open(device));
  return rings->ports();
}

absl::StatusOr<std::unique_ptr<KernelAttach>> KernelAttach::open(unsigned port, const KernelOptions& options) {
  DXPU_ASSIGN_OR_RETURN(std::shared_ptr<KernelRings> rings, KernelRings::open(options.device));
  DXPU_RETURN_IF_ERROR(rings->claim({.size = sizeof(dxpu_claim),
                                     .port = port,
                                     .read_deadline_ms = milliseconds(options.read_deadline),
                                     .write_deadline_ms = milliseconds(options.write_deadline),
                                     .reset_deadline_ms = milliseconds(options.reset_deadline),
                                     .reserved = 0}));
  return std::unique_ptr<KernelAttach>(new KernelAttach(port, options, std::move(rings)));
}

KernelAttach::KernelAttach(unsigned port, const KernelOptions& options, std::shared_ptr<KernelRings> rings)
    : port_(port), options_(options), rings_(std::move(rings)), thread_([this] { serve(); }) {}

KernelAttach::~KernelAttach() {
  (void)unplug("attach point closed");
  stopping_ = true;
  (void)rings_->run(DXPU_IOC_WAKE, 0ul);
  thread_.join();
  rings_->close();
}

std::shared_ptr<KernelAttach::Plugged> KernelAttach::plugged() const {
  std::lock_guard lock(mutex_);
  return plugged_;
}

absl::Status KernelAttach::plug(function::Function& function) {
  std::lock_guard plug_lock(plug_mutex_);
  const PortStatus now = status();
  if (now.state != PortState::kEmpty || plugged() != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("port ", port_, " is ", name_of(now.state),
                                                      now.holder.empty() ? "" : absl::StrCat(", held by ", now.holder),
                                                      ": unplug it and let its users close it first"));
  }
  {
    // Nothing meant for the function before this one may reach it. The port is empty, so nothing is added meanwhile.
    std::unique_lock lock(mutex_);
    const uint64_t drains = drains_;
    (void)rings_->run(DXPU_IOC_WAKE, 0ul);
    if (!condition_.wait_for(lock, std::chrono::seconds(10), [&] { return drains_ != drains; })) {
      return absl::DeadlineExceededError(absl::StrCat("port ", port_, ": the thread that serves it does not answer"));
    }
  }
  const pcie::ConfigSpace config = function.config();
  auto plugged = std::make_shared<Plugged>(function);
  plugged->vpd = config.find_capability(kVpdCapability).value_or(0);
  function.connect(this);
  {
    std::lock_guard lock(mutex_);
    plugged_ = plugged;
  }
  dxpu_plug argument = {.size = sizeof(dxpu_plug),
                        .reserved = 0,
                        .image = reinterpret_cast<uint64_t>(config.bytes().data()),
                        .write_mask = reinterpret_cast<uint64_t>(config.write_mask().data()),
                        .w1c_mask = reinterpret_cast<uint64_t>(config.w1c_mask().data())};
  const int result = rings_->run(DXPU_IOC_PLUG, &argument);
  if (result >= 0) {
    spdlog::info("attach=kernel port={} event=plug", port_);
    return absl::OkStatus();
  }
  {
    std::lock_guard lock(mutex_);
    plugged_ = nullptr;
  }
  plugged->retire();
  function.connect(nullptr);
  switch (-result) {
    case EBUSY:
      return absl::FailedPreconditionError(absl::StrCat("port ", port_, " is not empty"));
    case ENOSPC:
      return absl::InvalidArgumentError(
          absl::StrCat("port ", port_,
                       ": the function's BARs do not fit its windows: load dxpu.ko with larger pref_mib or mem_mib"));
    case EINVAL:
      return absl::InvalidArgumentError(
          absl::StrCat("port ", port_, ": the function's configuration space is not that of one PCI Express endpoint"));
    default:
      return base::errno_status(absl::StrCat("port ", port_, ": plug"), -result);
  }
}

absl::Status KernelAttach::unplug(const std::string& reason) {
  std::lock_guard plug_lock(plug_mutex_);
  std::shared_ptr<Plugged> plugged;
  {
    std::lock_guard lock(mutex_);
    plugged = std::exchange(plugged_, nullptr);
  }
  // Also with nothing plugged here: what an earlier life of this port left goes too.
  const int error = rings_->run(DXPU_IOC_UNPLUG, 0ul);
  if (plugged != nullptr) {
    plugged->retire();
    plugged->function.connect(nullptr);
    spdlog::info("attach=kernel port={} event=unplug reason=\"{}\" holder=\"{}\"", port_, reason, status().holder);
  }
  return error < 0 ? base::errno_status(absl::StrCat("port ", port_, ": unplug"), -error) : absl::OkStatus();
}

absl::Status KernelAttach::request_release() {
  const int error = rings_->run(DXPU_IOC_RELEASE, 0ul);
  if (error == -ENODEV) return absl::FailedPreconditionError(absl::StrCat("port ", port_, " is empty"));
  return error < 0 ? base::errno_status(absl::StrCat("port ", port_, ": release"), -error) : absl::OkStatus();
}

PortStatus KernelAttach::status() const {
  dxpu_port_status now = {};
  now.size = sizeof now;
  now.port = port_;
  if (const int error = rings_->run(DXPU_IOC_PORT_STATUS, &now); error < 0) {
    return {.state = PortState::kEmpty,
            .bus_address = "",
            .holder = "",
            .detail = absl::StrCat("no status: ", std::strerror(-error))};
  }
  PortStatus status;
  status.state = static_cast<PortState>(now.state);
  if (now.enumerated != 0) {
    status.bus_address = absl::StrFormat("%04x:%02x:%02x.%u", now.domain, now.bus, now.devfn >> 3, now.devfn & 7);
  }
  if (now.holder_pid != 0) {
    status.holder = absl::StrCat("pid ", now.holder_pid, " (",
                                 std::string(now.holder, ::strnlen(now.holder, sizeof now.holder)), ")");
  }
  if (now.error != 0)
    status.detail = absl::StrCat("dxpu-vfio did not take it: ", std::strerror(-now.error), "; see dmesg");
  return status;
}

void KernelAttach::set_status_callback(absl::AnyInvocable<void()> changed) {
  std::lock_guard lock(callback_mutex_);
  changed_ = std::move(changed);
}

void KernelAttach::notify_changed() {
  {
    std::lock_guard lock(mutex_);
    ++changes_;
  }
  condition_.notify_all();
  std::lock_guard lock(callback_mutex_);
  if (changed_) changed_();
}

absl::Status KernelAttach::wait_for(PortState state, absl::Duration deadline) const {
  const absl::Time until = absl::Now() + deadline;
  std::unique_lock lock(mutex_);
  while (true) {
    const uint64_t changes = changes_;
    lock.unlock();
    const PortStatus now = status();
    lock.lock();
    if (now.state == state) return absl::OkStatus();
    if (changes_ != changes) continue;
    if (!condition_.wait_until(lock, absl::ToChronoTime(until), [&] { return changes_ != changes; })) {
      return absl::DeadlineExceededError(absl::StrCat("port ", port_, " is ", name_of(now.state), " and not ",
                                                      name_of(state), " after ", absl::FormatDuration(deadline),
                                                      now.holder.empty() ? "" : absl::StrCat(", held by ", now.holder),
                                                      now.detail.empty() ? "" : absl::StrCat(": ", now.detail)));
    }
  }
}

KernelStats KernelAttach::stats() const {
  dxpu_port_status now = {};
  now.size = sizeof now;
  now.port = port_;
  (void)rings_->run(DXPU_IOC_PORT_STATUS, &now);
  const auto& counters = now.counters;
  return {.reads = counters[DXPU_COUNT_READS],
          .writes = counters[DXPU_COUNT_WRITES],
          .config_writes = counters[DXPU_COUNT_CONFIG_WRITES],
          .resets = counters[DXPU_COUNT_RESETS],
          .timeouts = counters[DXPU_COUNT_CTO],
          .late_completions = counters[DXPU_COUNT_LATE],
          .error_completions = counters[DXPU_COUNT_ERROR_COMPLETION],
          .dma_reads = counters[DXPU_COUNT_DMA_READS],
          .dma_writes = counters[DXPU_COUNT_DMA_WRITES],
          .dma_refused = counters[DXPU_COUNT_DMA_UR],
          .dma_unmaps = counters[DXPU_COUNT_DMA_UNMAPS],
          .interrupts = counters[DXPU_COUNT_MSIX],
          .interrupts_dropped = counters[DXPU_COUNT_MSIX_DROPPED],
          .dma_writes_lost = dma_writes_lost_};
}

// ---- the ring ------------------------------------------------------------------------------------------------------

void KernelAttach::serve() {
  serving_rings = rings_.get();
  dxpu_wait wait = {.size = sizeof(dxpu_wait), .timeout_ms = kWaitMs, .seen_status_seq = 0, .status_seq = 0};
  while (!stopping_) {
    const int error = rings_->run(DXPU_IOC_WAIT, &wait);
    if (error < 0) spdlog::error("attach=kernel port={} wait error=\"{}\"", port_, std::strerror(-error));
    if (wait.status_seq != wait.seen_status_seq) {
      wait.seen_status_seq = wait.status_seq;
      notify_changed();
    }
    std::vector<std::byte> data;
    while (auto request = rings_->peek()) {
      const dxpu_request& head = request->head;
      const std::shared_ptr<Plugged> plugged = this->plugged();
      if (plugged != nullptr && plugged->enter()) {
        function::Function& function = plugged->function;
        switch (head.kind) {
          case DXPU_REQ_MMIO_WRITE:
            function.bar_write(head.bar, head.offset, request->data);
            break;
          case DXPU_REQ_CONFIG_WRITE:
            config_write(plugged, static_cast<uint32_t>(head.offset), head.length, head.value);
            break;
          case DXPU_REQ_RESET:
            function.reset([rings = rings_, id = head.id](Outcome outcome) {
              if (id != 0) answer(*rings, id, outcome, {});
            });
            break;
          case DXPU_REQ_MMIO_READ: {
            rings_->consume(*request);
            request.reset();
            // Alone, this thread may wait for the answer itself, which saves a switch; with others behind it, it must
            // not.
            if (plugged->blocking != nullptr && rings_->empty()) {
              data.resize(head.length);
              const Outcome outcome = plugged->blocking->bar_read_wait(head.bar, head.offset, data);
              answer(*rings_, head.id, outcome, data);
            } else {
              function.bar_read(head.bar, head.offset, head.length,
                                [rings = rings_, id = head.id](Outcome outcome, std::span<const std::byte> bytes) {
                                  answer(*rings, id, outcome, bytes);
                                });
            }
            break;
          }
          default:
            spdlog::error("attach=kernel port={} request kind={} unknown", port_, head.kind);
        }
        plugged->leave();
      }
      if (request.has_value()) rings_->consume(*request);
      // Whoever waits for an answer should not wait for what is behind it.
      if (!rings_->empty()) (void)rings_->run(DXPU_IOC_COMPLETE, 0ul);
    }
    {
      std::lock_guard lock(mutex_);
      ++drains_;
    }
    condition_.notify_all();
  }
}

// VPD is read through registers that the function changes on its own: after each write they are read back into the
// kernel's shadow, so that the kernel's polling sees the flag flip and the data arrive.
void KernelAttach::config_write(const std::shared_ptr<Plugged>& plugged, uint32_t offset, unsigned size,
                                uint32_t value) {
  const uint32_t vpd = plugged->vpd;
  if (vpd == 0 || offset + size <= vpd || offset >= vpd + 8) {
    plugged->function.config_write(offset, size, value, [](Outcome) {});
    return;
  }
  plugged->function.config_write(offset, size, value, [plugged, vpd, rings = rings_](Outcome outcome) {
    if (outcome != Outcome::kSuccess || !plugged->enter()) return;
    plugged->function.config_read(vpd + 4, 4, [plugged, vpd, rings](Outcome outcome, std::span<const std::byte> bytes) {
      if (outcome != Outcome::kSuccess || bytes.size() < 4 || !plugged->enter()) return;
      std::array<std::byte, 4> data;
      std::copy_n(bytes.begin(), 4, data.begin());
      plugged->function.config_read(vpd, 4, [vpd, rings, data](Outcome outcome, std::span<const std::byte> bytes) {
        if (outcome != Outcome::kSuccess || bytes.size() < 4) return;
        // The data before the flag that says it is there.
        dxpu_config_update update = {.size = sizeof update, .offset = vpd + 4, .length = 4, .reserved = 0, .data = {}};
        std::memcpy(update.data, data.data(), 4);
        (void)rings->run(DXPU_IOC_CONFIG_UPDATE, &update);
        update.offset = vpd + 2;
        update.length = 2;
        std::memcpy(update.data, bytes.data() + 2, 2);
        (void)rings->run(DXPU_IOC_CONFIG_UPDATE, &update);
      });
      plugged->leave();
    });
    plugged->leave();
  });
}

// ---- upstream ------------------------------------------------------------------------------------------------------

bool KernelAttach::copy(uint64_t address, std::byte* data, size_t bytes, bool to_host) {
  std::array<dxpu_dma_range, 8> ranges;
  while (bytes != 0) {
    uint32_t count = 0;
    for (; count < ranges.size() && bytes != 0; ++count) {
      const auto step = static_cast<uint32_t>(std::min<size_t>(bytes, DXPU_DMA_MAX_BYTES));
      ranges[count] = {.iova = address,
                       .buffer = reinterpret_cast<uint64_t>(data),
                       .bytes = step,
                       .direction = static_cast<uint32_t>(to_host ? DXPU_DMA_WRITE_HOST : DXPU_DMA_READ_HOST),
                       .status = -EIO,
                       .reserved = 0};
      address += step;
      data += step;
      bytes -= step;
    }
    dxpu_dma dma = {.size = sizeof dma, .count = count, .ranges = reinterpret_cast<uint64_t>(ranges.data())};
    if (rings_->run(DXPU_IOC_DMA, &dma) < 0) return false;
    for (uint32_t i = 0; i < count; ++i) {
      if (ranges[i].status == 0) continue;
      if (ranges[i].status == -ENOMEM && !told_memlock_.exchange(true)) {
        spdlog::warn(
            "attach=kernel port={} dma iova={:#x} refused: RLIMIT_MEMLOCK of the program that holds the function is "
            "too low",
            port_, ranges[i].iova);
      }
      return false;
    }
  }
  return true;
}

void KernelAttach::dma_read(uint64_t address, std::span<std::byte> out, function::Done done) {
  done(copy(address, out.data(), out.size(), false) ? Outcome::kSuccess : Outcome::kUnsupportedRequest);
}

void KernelAttach::dma_write(uint64_t address, std::span<const std::byte> data) {
  if (!copy(address, const_cast<std::byte*>(data.data()), data.size(), true)) ++dma_writes_lost_;
}

void KernelAttach::dma_atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand,
                              uint64_t compare, function::ReadDone done) {
  dxpu_atomic atomic = {.size = sizeof atomic,
                        .op = static_cast<uint32_t>(op),
                        .iova = address,
                        .width = width,
                        .reserved = 0,
                        .operand = operand,
                        .compare = compare,
                        .old = 0};
  if (rings_->run(DXPU_IOC_ATOMIC, &atomic) < 0) return done(Outcome::kUnsupportedRequest, {});
  std::array<std::byte, 8> old;
  std::memcpy(old.data(), &atomic.old, sizeof atomic.old);
  done(Outcome::kSuccess, std::span(old).first(width));
}

void KernelAttach::raise_msix(unsigned vector) {
  (void)rings_->run(DXPU_IOC_RAISE_MSIX, static_cast<unsigned long>(vector));
}

}  // namespace dxpu::attach
