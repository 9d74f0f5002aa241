// One attached function at work: the inside of dxpu-worker.
//
// What this is: takes fabric sockets from boxd over the control socket, serves the function on the newest one, keeps
// the lease. What it is not: it checks no tickets and knows no pool manager. boxd's death changes nothing here; a
// worker ends when it is told to, or when its host has not been heard for the length of the lease, by its own monotonic
// clock.
//
// Threads: run() is one; the session has its own.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "proxy/base/unique_fd.h"
#include "proxy/box/control.h"
#include "proxy/fabric/session.h"
#include "proxy/function/function.h"

namespace dxpu::box {

struct WorkerOptions {
  std::string box_id;
  uint32_t slot = 0;
  std::string attachment_id;
  uint64_t generation = 0;  // of the ticket it was started for
  fabric::SessionOptions session;
};

// Serves until told to stop (by message, or by `stop_fd` becoming readable) or until the lease runs out. The listener
// is a bound control socket (control_listen).
WorkerEnd run_worker(const WorkerOptions& options, function::Function& function, base::UniqueFd listener, int stop_fd);

}  // namespace dxpu::box
