// What the daemons' mains share: deadline flags, logging, signals, sizes. No gRPC.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proxy/fabric/session.h"

namespace CLI {
class App;
}

namespace dxpu::agent {

// --read-deadline, --fast-io-fail, --ctrl-loss, --lease, --keep-alive as absl durations ("50ms", "2s").
struct DeadlineFlags {
  std::string read, fast_io_fail, ctrl_loss, lease, keep_alive;
  DeadlineFlags();
  void add_to(CLI::App& app);
  // INVALID_ARGUMENT names the flag, or the two that break the rule read < fast_io_fail < ctrl_loss < lease.
  absl::StatusOr<fabric::Deadlines> parse() const;
  // The same as flags again, for a child process.
  static std::vector<std::string> to_flags(const fabric::Deadlines& deadlines);
};

absl::StatusOr<absl::Duration> parse_duration(const std::string& flag, const std::string& text);
// "256MiB", "1GiB", "4096": bytes. INVALID_ARGUMENT otherwise, or when it is 0 or does not fit.
absl::StatusOr<uint64_t> parse_size(const std::string& flag, absl::string_view text);
// [a-z0-9][a-z0-9.-]{0,62}
absl::Status check_id(const std::string& flag, const std::string& id);

// Logs to stderr, one line per record: time level program key=value….
void start_logging(const std::string& program);
// Blocks SIGTERM and SIGINT in this thread and those it starts (call it first in main) and returns a descriptor that
// becomes readable when one arrives. SIGPIPE is ignored.
absl::StatusOr<int> stop_signals();

}  // namespace dxpu::agent
