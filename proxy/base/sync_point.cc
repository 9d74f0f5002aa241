#include "proxy/base/sync_point.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"

namespace dxpu::base {
namespace {

struct Plan {
  std::string name;
  int signal = 0;
  std::string marker;
};

Plan read_plan() {
  Plan plan;
  const char* text = std::getenv("DXPU_SYNC_POINT");
  if (text == nullptr || *text == '\0') return plan;
  std::vector<std::string> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
  if (words.size() != 3 || (words[1] != "kill" && words[1] != "stop")) {
    std::fprintf(stderr, "DXPU_SYNC_POINT=\"%s\": expected \"NAME kill|stop MARKER-FILE\"\n", text);
    std::_Exit(2);
  }
  plan.name = words[0];
  plan.signal = words[1] == "kill" ? SIGKILL : SIGSTOP;
  plan.marker = words[2];
  return plan;
}

}  // namespace

void sync_point(std::string_view name) {
  static const Plan plan = read_plan();
  if (plan.signal == 0 || name != plan.name) return;
  int fd = ::open(plan.marker.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return;
  std::string line = std::to_string(::getpid()) + "\n";
  if (::write(fd, line.data(), line.size()) < 0) std::perror("DXPU_SYNC_POINT marker");
  ::close(fd);
  ::kill(::getpid(), plan.signal);
  // A SIGKILL sent to oneself may take effect on another thread first: go no further.
  if (plan.signal == SIGKILL) {
    for (;;) ::pause();
  }
}

}  // namespace dxpu::base
