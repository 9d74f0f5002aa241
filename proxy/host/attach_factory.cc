#include "proxy/host/attach_factory.h"

#include "absl/strings/str_cat.h"
#include "proxy/attach/direct/direct_attach.h"
#include "proxy/base/status.h"
#ifdef DXPU_ATTACH_KERNEL
#include "proxy/attach/kernel/kernel_attach.h"
#endif

namespace dxpu::host {
namespace {

#ifdef DXPU_ATTACH_KERNEL
constexpr char kKinds[] = "\"kernel\" and \"direct\"";
#else
constexpr char kKinds[] = "\"direct\"";
#endif

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

#ifdef DXPU_ATTACH_KERNEL
class KernelPoints : public AttachPoints {
 public:
  static absl::StatusOr<std::unique_ptr<AttachPoints>> open(const AttachOptions& options) {
    attach::KernelOptions kernel;
    kernel.device = options.device;
    // Later than the session's own deadlines, so that it is the session that knows and counts why.
    kernel.read_deadline = options.deadlines.read * 1.25 + absl::Milliseconds(50);
    kernel.write_deadline = options.deadlines.ctrl_loss;
    DXPU_ASSIGN_OR_RETURN(const unsigned count, attach::KernelAttach::port_count(options.device));
    auto points = std::make_unique<KernelPoints>();
    for (unsigned port = 0; port < count; ++port) {
      DXPU_ASSIGN_OR_RETURN(auto point, attach::KernelAttach::open(port, kernel));
      points->points_.push_back(std::move(point));
    }
    return points;
  }
  std::vector<attach::AttachPoint*> ports() override {
    std::vector<attach::AttachPoint*> out;
    for (auto& point : points_) out.push_back(point.get());
    return out;
  }

 private:
  std::vector<std::unique_ptr<attach::KernelAttach>> points_;
};
#endif

}  // namespace

absl::StatusOr<std::unique_ptr<AttachPoints>> open_attach_points(const AttachOptions& options) {
  if (options.kind == "direct") {
    if (options.ports < 1 || options.ports > 64) {
      return absl::InvalidArgumentError(absl::StrCat("--ports=", options.ports, ": a host has 1 to 64 ports"));
    }
    return std::make_unique<DirectPoints>(options);
  }
#ifdef DXPU_ATTACH_KERNEL
  if (options.kind == "kernel") return KernelPoints::open(options);
#endif
  return absl::InvalidArgumentError(absl::StrCat("--attach=", options.kind, ": this build knows ", kKinds));
}

}  // namespace dxpu::host
