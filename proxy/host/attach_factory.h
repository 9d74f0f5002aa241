// Which attach points a host has. The one place of the host room that knows which kinds exist.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proxy/attach/attach_point.h"
#include "proxy/fabric/session.h"

namespace dxpu::host {

struct AttachOptions {
  std::string kind;                  // "kernel" or "direct"
  uint32_t ports = 4;                // direct: how many; kernel: 0 or as many as the module has
  std::string device = "/dev/dxpu";  // kernel
  fabric::Deadlines deadlines;
};

class AttachPoints {
 public:
  virtual ~AttachPoints() = default;
  virtual std::vector<attach::AttachPoint*> ports() = 0;
};

// INVALID_ARGUMENT: no such kind in this build. The errors of the attach point otherwise.
absl::StatusOr<std::unique_ptr<AttachPoints>> open_attach_points(const AttachOptions& options);

}  // namespace dxpu::host
