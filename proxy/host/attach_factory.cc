#include "proxy/host/attach_factory.h"

#include "absl/strings/str_cat.h"
#include "proxy/attach/direct/direct_attach.h"

namespace dxpu::host {
namespace {

class DirectPoints : public AttachPoints {
 public:
  explicit DirectPoints(const AttachOptions& options) {
    attach::DirectOptions direct;
    direct.read_deadline = options.deadlines.read;
    for (uint32_t i = 0; i < options.ports; ++i) points_.push_back(std::make_unique<attach::DirectAttach>(direct));
  }
  std::vector<attach::AttachPoint*> ports() override {
    std::vector<attach::AttachPoint*> out;
    for (auto& point : points_) out.push_back(point.get());
    return out;
  }

 private:
  std::vector<std::unique_ptr<attach::DirectAttach>> points_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AttachPoints>> open_attach_points(const AttachOptions& options) {
  if (options.kind == "direct") {
    if (options.ports < 1 || options.ports > 64) {
      return absl::InvalidArgumentError(absl::StrCat("--ports=", options.ports, ": a host has 1 to 64 ports"));
    }
    return std::make_unique<DirectPoints>(options);
  }
  return absl::InvalidArgumentError(absl::StrCat("--attach=", options.kind, ": must be \"direct\" in this build"));
}

}  // namespace dxpu::host
