// dxpu-boxd: lends the functions of one machine (a box). See boxd.h.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "proxy/agent/daemon.h"
#include "proxy/base/status.h"
#include "proxy/box/boxd.h"

namespace dxpu::box {
namespace {

// dxpu-worker beside this program.
std::string default_worker() {
  std::string self(4096, '\0');
  const ssize_t n = ::readlink("/proc/self/exe", self.data(), self.size());
  self.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return self.substr(0, self.rfind('/') + 1) + "dxpu-worker";
}

absl::Status check(const BoxdOptions& options) {
  DXPU_RETURN_IF_ERROR(agent::check_id("--id", options.id));
  if (options.slots < 1 || options.slots > 64) {
    return absl::InvalidArgumentError(absl::StrCat("--slots=", options.slots, ": a box has 1 to 64 slots"));
  }
  if (options.engine != "copy") {
    return absl::InvalidArgumentError(
        absl::StrCat("--engine=", options.engine, ": not an engine of this release; it has \"copy\""));
  }
  if (options.model.empty() || options.model.size() > 63) {
    return absl::InvalidArgumentError("--model: 1 to 63 characters");
  }
  if (::access(options.worker_program.c_str(), X_OK) != 0) {
    return base::errno_status(absl::StrCat("--worker=", options.worker_program, ": cannot be started"));
  }
  return absl::OkStatus();
}

int run(int argc, char** argv) {
  BoxdOptions options;
  options.worker_program = default_worker();
  std::string memory = "256MiB";
  agent::DeadlineFlags deadlines;
  CLI::App app("Lends the GPU functions of this machine to the hosts of a dxpu pool.", "dxpu-boxd");
  app.add_option("--id", options.id, "Name of this box in the pool")->required();
  app.add_option("--pool", options.pool_address, "ADDRESS:PORT of the pool manager")->required();
  app.add_option("--listen", options.listen, "ADDRESS:PORT where the fabric listens for hosts")->required();
  app.add_option("--advertise", options.advertise,
                 "ADDRESS:PORT[,ADDRESS:PORT…] told to hosts, in order of preference; default: --listen")
      ->delimiter(',');
  app.add_option("--slots", options.slots, "Number of functions")->capture_default_str();
  app.add_option("--model", options.model, "Model name that requests are compared with")->capture_default_str();
  app.add_option("--memory", memory, "Device memory of each function, a power of two")->capture_default_str();
  app.add_option("--engine", options.engine, "What executes the commands")->capture_default_str();
  app.add_option("--runtime-dir", options.runtime_dir, "Directory for state, sockets and device memory; one boxd each")
      ->required();
  app.add_option("--worker", options.worker_program, "The dxpu-worker program")->capture_default_str();
  deadlines.add_to(app);
  CLI11_PARSE(app, argc, argv);

  agent::start_logging("dxpu-boxd");
  auto stop = agent::stop_signals();
  auto start = [&]() -> absl::StatusOr<std::unique_ptr<Boxd>> {
    DXPU_RETURN_IF_ERROR(stop.status());
    DXPU_ASSIGN_OR_RETURN(options.memory_bytes, agent::parse_size("--memory", memory));
    DXPU_ASSIGN_OR_RETURN(options.deadlines, deadlines.parse());
    DXPU_RETURN_IF_ERROR(check(options));
    return Boxd::create(options);
  };
  auto boxd = start();
  if (!boxd.ok()) {
    std::cerr << "dxpu-boxd: " << boxd.status().message() << "\n";
    return 1;
  }
  (*boxd)->run(*stop);
  return 0;
}

}  // namespace
}  // namespace dxpu::box

int main(int argc, char** argv) { return dxpu::box::run(argc, argv); }
