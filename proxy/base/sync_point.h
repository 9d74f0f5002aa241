// Named steps at which a test may take the process away.
//
// sync_point("box.worker_started") does nothing unless DXPU_SYNC_POINT names that step. The variable has three words,
// "NAME ACTION MARKER": ACTION is `kill` (SIGKILL to this process) or `stop` (SIGSTOP), MARKER a file that is created
// when the step is reached, so that the test knows. A step whose marker exists already does nothing: it happens once,
// also in children and restarted processes that inherited the variable.
//
// Thread-safe. For rare steps (state changes), never for the data path. A malformed variable ends the process at its
// first step with a message: a fault test that tests nothing must not pass.
#pragma once

#include <string_view>

namespace dxpu::base {

void sync_point(std::string_view name);

}  // namespace dxpu::base
