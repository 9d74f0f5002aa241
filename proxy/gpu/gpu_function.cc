#include "proxy/gpu/gpu_function.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proxy/base/status.h"
#include "proxy/gpu/core.h"
#include "proxy/gpu/crc32c.h"
#include "proxy/gpu/self_test.h"

namespace dxpu::gpu {
namespace {

// A copy through the aperture must not hold the caller's thread for longer than a page takes.
constexpr uint32_t kReadMax = 4096;

class SoftGpu final : public GpuFunction {
 public:
  explicit SoftGpu(std::shared_ptr<Core> core) : core_(std::move(core)), reset_image_(core_->image()) {}

  ~SoftGpu() override {
    core_->upstream.connect(nullptr);
    if (!core_->reset_and_wait(core_->options.stop_deadline)) {
      spdlog::error("gpu=stop serial={} result=timeout action=abandon-reads-in-flight", core_->options.serial);
    }
  }

  function::Identity identity() const override {
    return {.vendor_id = DXGPU_VENDOR_ID,
            .device_id = DXGPU_DEVICE_ID,
            .class_code = DXGPU_CLASS_CODE,
            .serial_number = core_->options.serial,
            .model = core_->options.model};
  }
  pcie::ConfigSpace config() const override { return core_->config(); }

  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override {
    core_->config_write(offset, size, value);
    done(function::Outcome::kSuccess);
  }
  void config_read(uint32_t offset, unsigned size, function::ReadDone done) override {
    const uint32_t value = core_->config_read(offset, size);
    done(function::Outcome::kSuccess, std::as_bytes(std::span(&value, 1)).first(std::min<size_t>(size, 4)));
  }

  void bar_read(unsigned bar, uint64_t offset, uint32_t length, function::ReadDone done) override {
    if (length < 1 || length > kReadMax || !inside(bar, offset, length)) {
      return done(function::Outcome::kUnsupportedRequest, {});
    }
    std::byte data[kReadMax];
    const std::span<std::byte> out(data, length);
    if (bar == DXGPU_BAR_REGISTERS) {
      core_->read_registers(offset, out);
    } else {
      core_->engine().read_memory(offset, out);
    }
    done(function::Outcome::kSuccess, out);
  }
  void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override {
    if (!inside(bar, offset, data.size())) return core_->count_dropped_write();
    if (bar == DXGPU_BAR_REGISTERS) {
      core_->write_registers(offset, data);
    } else {
      core_->engine().write_memory(offset, data);
    }
  }

  void connect(function::Upstream* upstream) override { core_->upstream.connect(upstream); }

  void reset(function::Done done) override {
    core_->reset_config();  // first: bus mastering is off before anybody can see that the reset runs
    core_->begin_reset(std::move(done));
  }

  absl::Status scrub() override {
    // Configuration first: with bus mastering off nothing new leaves while channels stop.
    core_->reset_config();
    if (!core_->reset_and_wait(core_->options.stop_deadline)) {
      return absl::DeadlineExceededError(
          "scrub: channels did not stop, host reads are still in flight: end the session and the worker, then scrub in "
          "a new one");
    }
    return core_->engine().wipe();
  }

  absl::Status self_test_wiped() override {
    DXPU_RETURN_IF_ERROR(check_untouched());
    DXPU_RETURN_IF_ERROR(run_self_test(*this));
    if (!core_->reset_and_wait(core_->options.stop_deadline))
      return absl::InternalError("self test: channels did not stop");
    return check_untouched();
  }

 private:
  bool inside(unsigned bar, uint64_t offset, uint64_t length) const {
    const uint64_t size = bar == DXGPU_BAR_REGISTERS ? DXGPU_REGISTER_BYTES
                          : bar == DXGPU_BAR_MEMORY  ? core_->options.memory_bytes
                                                     : 0;
    return offset <= size && length <= size - offset;
  }

  absl::Status check_untouched() {
    const std::vector<std::byte> now = core_->image();
    const auto [ours, first] = std::mismatch(now.begin(), now.end(), reset_image_.begin());
    if (ours != now.end()) {
      const size_t at = static_cast<size_t>(ours - now.begin());
      const bool config = at >= DXGPU_REGISTER_BYTES;
      return absl::DataLossError(absl::StrCat(config ? "configuration byte 0x" : "register byte 0x",
                                              absl::Hex(config ? at - DXGPU_REGISTER_BYTES : at),
                                              " is not at its reset value"));
    }
    return core_->engine().check_wiped();
  }

  const std::shared_ptr<Core> core_;
  const std::vector<std::byte> reset_image_;
};

absl::Status check(const GpuOptions& options) {
  const bool printable =
      std::all_of(options.model.begin(), options.model.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
  if (options.model.empty() || options.model.size() >= DXGPU_MODEL_BYTES || !printable) {
    return absl::InvalidArgumentError(
        absl::StrCat("model: 1 to ", DXGPU_MODEL_BYTES - 1, " printable ASCII characters, not ", options.model.size()));
  }
  if (options.engine != "copy") {
    return absl::InvalidArgumentError(
        absl::StrCat("engine \"", options.engine, "\" is not in this build: use \"copy\""));
  }
  if (options.stop_deadline <= absl::ZeroDuration())
    return absl::InvalidArgumentError("stop_deadline must be positive");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuFunction>> GpuFunction::create(const GpuOptions& options) {
  DXPU_RETURN_IF_ERROR(check(options));
  DXPU_ASSIGN_OR_RETURN(std::shared_ptr<DeviceMemory> memory,
                        DeviceMemory::open(options.vram_file, options.memory_bytes));
  DXPU_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, make_copy_engine(std::move(memory), options.copy));

  pcie::ConfigDescription description;
  description.vendor_id = DXGPU_VENDOR_ID;
  description.device_id = DXGPU_DEVICE_ID;
  description.revision = DXGPU_VERSION_MAJOR;
  description.class_code = DXGPU_CLASS_CODE;
  description.subsystem_vendor_id = options.subsystem_vendor_id;
  description.subsystem_id = options.subsystem_id;
  description.bars[DXGPU_BAR_REGISTERS] = {.size = DXGPU_REGISTER_BYTES};
  description.bars[DXGPU_BAR_MEMORY] = {.size = options.memory_bytes, .is_64bit = true, .prefetchable = true};
  description.msix = {.vectors = DXGPU_VECTORS,
                      .table_bar = DXGPU_BAR_REGISTERS,
                      .table_offset = DXGPU_MSIX_TABLE,
                      .pba_bar = DXGPU_BAR_REGISTERS,
                      .pba_offset = DXGPU_MSIX_PBA};
  description.serial_number = options.serial;
  description.vpd_product = options.model;
  description.vpd_serial = absl::StrCat(absl::Hex(options.serial, absl::kZeroPad16));
  DXPU_ASSIGN_OR_RETURN(pcie::ConfigSpace config, pcie::ConfigSpace::build(description));
  return std::make_unique<SoftGpu>(std::make_shared<Core>(options, std::move(config), std::move(engine)));
}

}  // namespace dxpu::gpu
