#include "poolmgr/service/options.h"

#include "absl/strings/str_cat.h"

namespace dxpu::poolmgr {

absl::Status Options::check() const {
  struct Named {
    const char* flag;
    absl::Duration value;
  };
  const Named all[] = {{"--heartbeat", heartbeat},      {"--agent-silence", silence}, {"--serve-timeout", serve},
                       {"--link-timeout", link},        {"--plug-timeout", plug},     {"--attach-timeout", attach},
                       {"--unplug-timeout", unplug},    {"--detach-timeout", detach}, {"--ticket-life", ticket_life},
                       {"--orphan-grace", orphan_grace}};
  for (const Named& n : all) {
    if (n.value <= absl::ZeroDuration() || n.value > absl::Hours(24)) {
      return absl::InvalidArgumentError(
          absl::StrCat(n.flag, " is ", absl::FormatDuration(n.value), "; it must be more than 0 and at most 24h"));
    }
  }
  auto order = [](const Named& shorter, const Named& longer, const char* why) {
    if (shorter.value < longer.value) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(shorter.flag, " (", absl::FormatDuration(shorter.value),
                                                   ") must be shorter than ", longer.flag, " (",
                                                   absl::FormatDuration(longer.value), "): ", why));
  };
  absl::Status status = order({"--heartbeat", heartbeat * 2}, {"--agent-silence", silence},
                              "two heartbeats must fit, or a late one ends a connection");
  if (status.ok())
    status = order({"--link-timeout", link}, {"--ticket-life", ticket_life},
                   "the host must have the time to use its ticket");
  if (status.ok())
    status = order({"--serve-timeout", serve}, {"--attach-timeout", attach}, "a step must end before the whole");
  if (status.ok())
    status = order({"--link-timeout", link}, {"--attach-timeout", attach}, "a step must end before the whole");
  if (status.ok())
    status = order({"--plug-timeout", plug}, {"--attach-timeout", attach}, "a step must end before the whole");
  if (status.ok())
    status = order({"--unplug-timeout", unplug}, {"--detach-timeout", detach}, "a step must end before the whole");
  return status;
}

}  // namespace dxpu::poolmgr
