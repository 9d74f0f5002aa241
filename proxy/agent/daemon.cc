#include "proxy/agent/daemon.h"

#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"

namespace dxpu::agent {

DeadlineFlags::DeadlineFlags() {
  const fabric::Deadlines defaults;
  read = absl::FormatDuration(defaults.read);
  fast_io_fail = absl::FormatDuration(defaults.fast_io_fail);
  ctrl_loss = absl::FormatDuration(defaults.ctrl_loss);
  lease = absl::FormatDuration(defaults.lease);
  keep_alive = absl::FormatDuration(defaults.keep_alive);
}

void DeadlineFlags::add_to(CLI::App& app) {
  const char* group = "Deadlines (read < fast-io-fail < ctrl-loss < lease)";
  app.add_option("--read-deadline", read, "Longest wait for a read's answer; then all ones")
      ->group(group)
      ->capture_default_str();
  app.add_option("--fast-io-fail", fast_io_fail, "Longest wait of a posted write for room; then the epoch ends")
      ->group(group)
      ->capture_default_str();
  app.add_option("--ctrl-loss", ctrl_loss, "Silence of the peer after which the session is dead")
      ->group(group)
      ->capture_default_str();
  app.add_option("--lease", lease, "Time without a host after which the box takes the function back")
      ->group(group)
      ->capture_default_str();
  app.add_option("--keep-alive", keep_alive, "Ping interval, both ways")->group(group)->capture_default_str();
}

absl::StatusOr<absl::Duration> parse_duration(const std::string& flag, const std::string& text) {
  absl::Duration value;
  if (!absl::ParseDuration(text, &value) || value <= absl::ZeroDuration() || value == absl::InfiniteDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "=", text, ": not a duration above zero; write it with a unit, like 50ms, 2s or 1m"));
  }
  return value;
}

absl::StatusOr<fabric::Deadlines> DeadlineFlags::parse() const {
  fabric::Deadlines out;
  DXPU_ASSIGN_OR_RETURN(out.read, parse_duration("--read-deadline", read));
  DXPU_ASSIGN_OR_RETURN(out.fast_io_fail, parse_duration("--fast-io-fail", fast_io_fail));
  DXPU_ASSIGN_OR_RETURN(out.ctrl_loss, parse_duration("--ctrl-loss", ctrl_loss));
  DXPU_ASSIGN_OR_RETURN(out.lease, parse_duration("--lease", lease));
  DXPU_ASSIGN_OR_RETURN(out.keep_alive, parse_duration("--keep-alive", keep_alive));
  DXPU_RETURN_IF_ERROR(fabric::check(out));
  return out;
}

std::vector<std::string> DeadlineFlags::to_flags(const fabric::Deadlines& deadlines) {
  return {absl::StrCat("--read-deadline=", absl::FormatDuration(deadlines.read)),
          absl::StrCat("--fast-io-fail=", absl::FormatDuration(deadlines.fast_io_fail)),
          absl::StrCat("--ctrl-loss=", absl::FormatDuration(deadlines.ctrl_loss)),
          absl::StrCat("--lease=", absl::FormatDuration(deadlines.lease)),
          absl::StrCat("--keep-alive=", absl::FormatDuration(deadlines.keep_alive))};
}

absl::StatusOr<uint64_t> parse_size(const std::string& flag, absl::string_view text) {
  struct Unit {
    absl::string_view suffix;
    unsigned shift;
  };
  static constexpr std::array<Unit, 4> kUnits = {{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}};
  absl::string_view digits = text;
  unsigned shift = 0;
  for (const Unit& unit : kUnits) {
    if (absl::EndsWith(text, unit.suffix)) {
      digits = text.substr(0, text.size() - unit.suffix.size());
      shift = unit.shift;
    }
  }
  uint64_t value = 0;
  if (!absl::SimpleAtoi(digits, &value) || value == 0 || (value << shift) >> shift != value) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, "=", text, ": not a size; write bytes or a whole number with KiB, MiB, GiB or TiB, like 256MiB"));
  }
  return value << shift;
}

absl::Status check_id(const std::string& flag, const std::string& id) {
  auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  bool good = !id.empty() && id.size() <= 63 && letter(id[0]) &&
              std::all_of(id.begin(), id.end(), [&](char c) { return letter(c) || c == '.' || c == '-'; });
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, "=", id, ": not an id; use 1 to 63 of a-z, 0-9, '.' and '-', beginning with a letter or a digit"));
}

void start_logging(const std::string& program) {
  auto logger = spdlog::stderr_logger_mt(program);
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %n %v");
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(logger);
}

absl::StatusOr<int> stop_signals() {
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  if (int error = pthread_sigmask(SIG_BLOCK, &set, nullptr); error != 0)
    return base::errno_status("pthread_sigmask", error);
  int fd = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd < 0) return base::errno_status("signalfd");
  return fd;
}

}  // namespace dxpu::agent
