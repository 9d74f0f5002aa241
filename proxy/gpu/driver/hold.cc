#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "proxy/base/status.h"
#include "proxy/gpu/driver/exercise.h"

namespace dxpu::gpu {

absl::StatusOr<HoldReport> hold(function::LocalDevice& device, const HoldOptions& options,
                                absl::FunctionRef<void(const std::string&)> event) {
  using Clock = std::chrono::steady_clock;
  base::UniqueFd removal(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!removal.valid()) return base::errno_status("eventfd");
  DXPU_RETURN_IF_ERROR(device.set_removal_eventfd(removal.get()));
  HoldReport report;
  const auto start = Clock::now();
  auto since_start = [&] { return absl::FromChrono(Clock::now() - start); };
  absl::Status status;
  event("holding the function open");
  while (!(report.told && report.all_ones) && since_start() < options.deadline) {
    uint32_t magic = 0;
    const absl::Duration before = since_start();
    status = device.bar_read(DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC, std::as_writable_bytes(std::span(&magic, 1)));
    if (!status.ok()) break;
    const absl::Duration took = since_start() - before;
    report.longest_read = std::max(report.longest_read, took);
    ++report.reads;
    if (magic == 0xffffffff && !report.all_ones) {
      report.all_ones = true;
      report.all_ones_after = since_start();
      event(fmt::format("registers read as all ones (that read took {:.1f} ms)", absl::ToDoubleMilliseconds(took)));
    }
    pollfd poll_for{.fd = removal.get(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&poll_for, 1, static_cast<int>(absl::ToInt64Milliseconds(options.interval)));
    uint64_t count = 0;
    if (ready > 0 && ::read(removal.get(), &count, sizeof count) == sizeof count && !report.told) {
      report.told = true;
      report.told_after = since_start();
      event("told to close the function (removal interrupt)");
    }
  }
  (void)device.set_removal_eventfd(-1);  // before the descriptor closes
  if (!status.ok()) return status;
  return report;
}

}  // namespace dxpu::gpu
