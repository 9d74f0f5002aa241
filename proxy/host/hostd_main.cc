// dxpu-hostd: borrows functions for one machine (a host). See host_agent.h.
#include <poll.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "proxy/agent/daemon.h"
#include "proxy/base/status.h"
#include "proxy/host/attach_factory.h"
#include "proxy/host/host_agent.h"

namespace dxpu::host {
namespace {

int run(int argc, char** argv) {
  HostOptions options;
  AttachOptions attach;
  attach.kind = "kernel";
  std::string plug = absl::FormatDuration(options.ports.plug), release = absl::FormatDuration(options.ports.release),
              connect = absl::FormatDuration(options.ports.connect);
  agent::DeadlineFlags deadlines;
  CLI::App app("Attaches functions of a dxpu pool to this machine.", "dxpu-hostd");
  app.add_option("--id", options.id, "Name of this host in the pool")->required();
  app.add_option("--pool", options.pool_address, "ADDRESS:PORT of the pool manager")->required();
  app.add_option("--attach", attach.kind, "kernel: ports of dxpu.ko; direct: ports inside this process, for tests")
      ->capture_default_str()
      ->check(CLI::IsMember({"kernel", "direct"}));
  app.add_option("--ports", attach.ports, "Number of ports (--attach direct)")->capture_default_str();
  app.add_option("--device", attach.device, "Control device of dxpu.ko (--attach kernel)")->capture_default_str();
  app.add_option("--connect-deadline", connect, "Longest time to open a session, all paths together")
      ->capture_default_str();
  app.add_option("--plug-deadline", plug, "Longest time until the host shows a function")->capture_default_str();
  app.add_option("--release-wait", release, "Time that users get to close when a function is detached")
      ->capture_default_str();
  deadlines.add_to(app);
  CLI11_PARSE(app, argc, argv);

  agent::start_logging("dxpu-hostd");
  auto stop = agent::stop_signals();
  auto open = [&]() -> absl::StatusOr<std::unique_ptr<AttachPoints>> {
    DXPU_RETURN_IF_ERROR(stop.status());
    DXPU_RETURN_IF_ERROR(agent::check_id("--id", options.id));
    DXPU_ASSIGN_OR_RETURN(options.session.deadlines, deadlines.parse());
    DXPU_ASSIGN_OR_RETURN(options.ports.connect, agent::parse_duration("--connect-deadline", connect));
    DXPU_ASSIGN_OR_RETURN(options.ports.plug, agent::parse_duration("--plug-deadline", plug));
    DXPU_ASSIGN_OR_RETURN(options.ports.release, agent::parse_duration("--release-wait", release));
    attach.deadlines = options.session.deadlines;
    return open_attach_points(attach);
  };
  auto points = open();
  if (!points.ok()) {
    std::cerr << "dxpu-hostd: " << points.status().message() << "\n";
    return 1;
  }
  options.attach_point = attach.kind;
  auto agent = HostAgent::start(options, (*points)->ports());
  spdlog::info("host={} attach={} ports={} pool={}", options.id, attach.kind, (*points)->ports().size(),
               options.pool_address);
  pollfd waiting{*stop, POLLIN, 0};
  while (::poll(&waiting, 1, -1) <= 0) {
  }
  spdlog::info("host={} stop=orderly (attachments come back in a new epoch)", options.id);
  agent->stop();
  return 0;
}

}  // namespace
}  // namespace dxpu::host

int main(int argc, char** argv) { return dxpu::host::run(argc, argv); }
