#include "proxy/box/function_factory.h"

#include <utility>

#include "proxy/base/status.h"
#include "proxy/gpu/gpu_function.h"

namespace dxpu::box {
namespace {

class GpuSlotFunction : public SlotFunction {
 public:
  explicit GpuSlotFunction(std::unique_ptr<gpu::GpuFunction> gpu) : gpu_(std::move(gpu)) {}
  function::Function& function() override { return *gpu_; }
  absl::Status validate() override { return gpu_->self_test_wiped(); }

 private:
  std::unique_ptr<gpu::GpuFunction> gpu_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SlotFunction>> make_function(const FunctionOptions& options) {
  gpu::GpuOptions gpu;
  gpu.model = options.model;
  gpu.memory_bytes = options.memory_bytes;
  gpu.serial = options.serial;
  gpu.vram_file = options.memory_file;
  gpu.engine = options.engine;
  DXPU_ASSIGN_OR_RETURN(auto made, gpu::GpuFunction::create(gpu));
  return std::make_unique<GpuSlotFunction>(std::move(made));
}

}  // namespace dxpu::box
