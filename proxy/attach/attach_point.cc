#include "proxy/attach/attach_point.h"

namespace dxpu::attach {

const char* name_of(PortState state) {
  switch (state) {
    case PortState::kEmpty:
      return "empty";
    case PortState::kPlugging:
      return "plugging";
    case PortState::kAttached:
      return "attached";
    case PortState::kGone:
      return "gone";
    case PortState::kRemoving:
      return "removing";
  }
  return "unknown";
}

}  // namespace dxpu::attach
