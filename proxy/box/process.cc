#include "proxy/box/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "proxy/base/status.h"

extern char** environ;

namespace dxpu::box {

absl::StatusOr<Child> spawn(const std::vector<std::string>& arguments, const std::vector<std::pair<int, int>>& passed) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);

  // dup2 onto its own number would keep close-on-exec, and could run over a descriptor still to be passed: first out of
  // the way.
  std::vector<base::UniqueFd> high;
  for (const auto& [fd, number] : passed) {
    int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 100 + number);
    if (copy < 0) return base::errno_status("F_DUPFD_CLOEXEC");
    high.emplace_back(copy);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, 2, 1);
  int next = 3;
  for (size_t i = 0; i < passed.size(); ++i) {
    posix_spawn_file_actions_adddup2(&actions, high[i].get(), passed[i].second);
    next = std::max(next, passed[i].second + 1);
  }
  posix_spawn_file_actions_addclosefrom_np(&actions, next);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  sigaddset(&defaults, SIGPIPE);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);

  Child child;
  int error = ::posix_spawn(&child.pid, arguments[0].c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return base::errno_status(absl::StrCat("start ", arguments[0]), error);
  DXPU_ASSIGN_OR_RETURN(child.pidfd, open_pidfd(child.pid));  // not reaped yet, so the number is still its own
  return child;
}

absl::StatusOr<base::UniqueFd> open_pidfd(int32_t pid) {
  base::UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (fd.valid()) return fd;
  if (errno == ESRCH) return absl::NotFoundError(absl::StrCat("process ", pid, " does not exist"));
  return base::errno_status(absl::StrCat("pidfd_open ", pid));
}

void kill_pidfd(int pidfd, int signal) { ::syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0); }

Exit collect(int pidfd) {
  siginfo_t info{};
  Exit exit;
  if (::waitid(P_PIDFD, static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG) != 0 || info.si_pid == 0) return exit;
  exit.known = true;
  if (info.si_code == CLD_EXITED) {
    exit.code = info.si_status;
  } else {
    exit.signal = info.si_status;
  }
  return exit;
}

std::string describe(const Exit& exit) {
  if (!exit.known) return "ended (not a child of this box daemon)";
  if (exit.signal != 0) return absl::StrCat("signal ", exit.signal, " (", sigabbrev_np(exit.signal), ")");
  return absl::StrCat("exit status ", exit.code);
}

}  // namespace dxpu::box
