// dxpu-worker: the process of one slot. Started by dxpu-boxd, not by people.
//
//   --serve      serves the function to one attachment (worker.h)
//   --scrub      wipes the slot's memory and registers
//   --validate   reads the wiped memory back and runs the self-test; a fresh process, so nothing cached by the scrubber
//   answers
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proxy/agent/daemon.h"
#include "proxy/base/status.h"
#include "proxy/base/sync_point.h"
#include "proxy/box/boxd.h"
#include "proxy/box/function_factory.h"
#include "proxy/box/worker.h"

namespace dxpu::box {
namespace {

// The last holder of the memory file may be dying still.
constexpr absl::Duration kLockWait = absl::Seconds(5);

absl::StatusOr<std::unique_ptr<SlotFunction>> open_function(const FunctionOptions& options) {
  const absl::Time end = absl::Now() + kLockWait;
  for (;;) {
    auto made = make_function(options);
    if (made.ok() || !absl::IsFailedPrecondition(made.status()) || absl::Now() >= end) return made;
    absl::SleepFor(absl::Milliseconds(20));
  }
}

// A wipe or a test without its box daemon has nobody to report to; the next daemon begins anew.
absl::Status die_with_parent(int32_t parent) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return base::errno_status("PR_SET_PDEATHSIG");
  if (::getppid() != parent) return absl::CancelledError("the box daemon that started this is gone");
  return absl::OkStatus();
}

absl::Status run_job(bool scrub, const FunctionOptions& options, int32_t parent) {
  DXPU_RETURN_IF_ERROR(die_with_parent(parent));
  DXPU_ASSIGN_OR_RETURN(auto held, open_function(options));
  base::sync_point(scrub ? "worker.scrub" : "worker.validate");
  return scrub ? held->function().scrub() : held->validate();
}

int run(int argc, char** argv) {
  bool serve = false, scrub = false, validate = false;
  FunctionOptions function;
  WorkerOptions worker;
  agent::DeadlineFlags deadlines;
  std::string serial;
  int32_t parent = 0;
  CLI::App app("The process of one slot. Started by dxpu-boxd.", "dxpu-worker");
  auto* mode = app.add_option_group("mode");
  mode->add_flag("--serve", serve, "Serve the function to one attachment");
  mode->add_flag("--scrub", scrub, "Wipe the slot");
  mode->add_flag("--validate", validate, "Read the wiped slot back and test it");
  mode->require_option(1);
  app.add_option("--box", worker.box_id)->required();
  app.add_option("--slot", worker.slot)->required();
  app.add_option("--attachment", worker.attachment_id);
  app.add_option("--generation", worker.generation);
  app.add_option("--model", function.model)->required();
  app.add_option("--memory", function.memory_bytes)->required();
  app.add_option("--engine", function.engine)->required();
  app.add_option("--serial", serial, "16 hexadecimal digits")->required();
  app.add_option("--memory-file", function.memory_file)->required();
  app.add_option("--parent", parent, "Process id of the box daemon");
  deadlines.add_to(app);
  CLI11_PARSE(app, argc, argv);
  agent::start_logging("dxpu-worker");
  if (!absl::SimpleHexAtoi(serial, &function.serial)) {
    spdlog::error("--serial={}: not hexadecimal", serial);
    return kExitFailed;
  }

  if (!serve) {
    absl::Status done = run_job(scrub, function, parent);
    if (done.ok()) return kExitStopped;
    spdlog::error("slot={} mode={} failed reason=\"{}\"", worker.slot, scrub ? "scrub" : "validate", done.ToString());
    const std::string line(done.message().substr(0, 4000));
    [[maybe_unused]] ssize_t n = ::write(kInheritedFd, line.data(), line.size());
    return kExitFailed;
  }

  auto stop = agent::stop_signals();
  base::UniqueFd listener(kInheritedFd);
  auto parsed = deadlines.parse();
  if (!stop.ok() || !parsed.ok()) {
    spdlog::error("slot={} worker=failed reason=\"{}\"", worker.slot,
                  (stop.ok() ? parsed.status() : stop.status()).ToString());
    return kExitFailed;
  }
  worker.session.deadlines = *parsed;
  auto held = open_function(function);
  if (!held.ok()) {
    spdlog::error("slot={} worker=failed reason=\"{}\"", worker.slot, held.status().ToString());
    return kExitFailed;
  }
  base::sync_point("worker.started");
  switch (run_worker(worker, (*held)->function(), std::move(listener), *stop)) {
    case WorkerEnd::kStopped:
      return kExitStopped;
    case WorkerEnd::kLeaseExpired:
      return kExitLeaseExpired;
    case WorkerEnd::kDied:
      return kExitFailed;
  }
  return kExitFailed;
}

}  // namespace
}  // namespace dxpu::box

int main(int argc, char** argv) { return dxpu::box::run(argc, argv); }
