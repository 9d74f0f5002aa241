// Child processes by pidfd.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "proxy/base/unique_fd.h"

namespace dxpu::box {

struct Child {
  int32_t pid = 0;
  base::UniqueFd pidfd;  // readable when it has ended
};

// Starts arguments[0] in a session of its own. `passed`: (descriptor here, number there); numbers from 3 on without
// gap. Nothing else is inherited but stderr (twice, as stdout too).
absl::StatusOr<Child> spawn(const std::vector<std::string>& arguments, const std::vector<std::pair<int, int>>& passed);

// A process that is not our child. NOT_FOUND when there is none.
absl::StatusOr<base::UniqueFd> open_pidfd(int32_t pid);
void kill_pidfd(int pidfd, int signal);

struct Exit {
  bool known = false;  // false: it was not our child
  int code = 0;        // when it exited
  int signal = 0;      // when it was killed, else 0
};
std::string describe(const Exit& exit);
// After the pidfd has become readable.
Exit collect(int pidfd);

}  // namespace dxpu::box
