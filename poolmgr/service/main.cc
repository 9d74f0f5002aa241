// dxpu-poolmgr: who is joined to whom.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "poolmgr/service/server.h"

namespace {

using dxpu::poolmgr::Options;
using dxpu::poolmgr::PoolServer;
using dxpu::poolmgr::ServerConfig;

void add_duration(CLI::App& app, const std::string& name, absl::Duration& value, const std::string& help) {
  app.add_option_function<std::string>(
         name,
         [&value, name](const std::string& text) {
           if (!absl::ParseDuration(text, &value)) {
             throw CLI::ValidationError(name, "\"" + text + "\" is not a duration such as 500ms, 30s or 5m");
           }
         },
         help)
      ->default_str(absl::FormatDuration(value));
}

int fail(const absl::Status& status) {
  spdlog::error("poolmgr=not_started error=\"{}\"", std::string(status.message()));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Before any thread exists, so that only sigwait() below sees them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  auto logger = spdlog::stderr_logger_mt("poolmgr");
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l poolmgr %v");
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(logger);

  CLI::App app(
      "The pool manager: keeps the pool in one database, tells boxes and hosts what to hold, answers operators.");
  app.set_version_flag("--version", DXPU_VERSION);
  ServerConfig config;
  config.listen = "127.0.0.1:7400";
  app.add_option("--listen", config.listen, "Address and port for operators and agents")->capture_default_str();
  app.add_option("--database", config.database.path, "SQLite file that holds the pool; made when it is not there")
      ->required();
  Options& o = config.options;
  add_duration(app, "--heartbeat", o.heartbeat, "How often agents say that they live");
  add_duration(app, "--agent-silence", o.silence, "After this an agent is taken for disconnected");
  add_duration(app, "--serve-timeout", o.serve, "Attach: until the box serves the function");
  add_duration(app, "--link-timeout", o.link, "Attach: until the host has connected");
  add_duration(app, "--plug-timeout", o.plug, "Attach: until the host shows the function");
  add_duration(app, "--attach-timeout", o.attach, "Attach: all of it, unless the request says otherwise");
  add_duration(app, "--unplug-timeout", o.unplug, "Detach: until a host that does not answer is left behind");
  add_duration(app, "--detach-timeout", o.detach, "Detach: all of it, unless the request says otherwise");
  add_duration(app, "--ticket-life", o.ticket_life, "How long a ticket may wait for its use");
  add_duration(app, "--orphan-grace", o.orphan_grace, "Until an attachment this pool does not know is taken apart");
  app.add_option("--keep-events", o.retention.events, "Events kept")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1000}, int64_t{1} << 40));
  CLI11_PARSE(app, argc, argv);

  absl::StatusOr<std::unique_ptr<PoolServer>> server = PoolServer::start(config);
  if (!server.ok()) return fail(server.status());
  spdlog::info("poolmgr=started version={} listen={} port={} database={} revision={}", DXPU_VERSION, config.listen,
               (*server)->port(), config.database.path, (*server)->store().revision());
  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("poolmgr=stopping signal={} (nothing is detached)", signal);
  (*server)->stop();
  return 0;
}
