#include "proxy/gpu/engine/copy/copy_engine.h"

#include <array>
#include <mutex>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proxy/gpu/engine/copy/queue.h"

namespace dxpu::gpu {
namespace {

constexpr uint32_t kOpcodes = 1u << DXGPU_OP_NOP | 1u << DXGPU_OP_COPY_IN | 1u << DXGPU_OP_COPY_OUT |
                              1u << DXGPU_OP_COPY_LOCAL | 1u << DXGPU_OP_FILL | 1u << DXGPU_OP_FENCE |
                              1u << DXGPU_OP_CHECKSUM;

class CopyEngine : public Engine {
 public:
  CopyEngine(std::shared_ptr<DeviceMemory> memory, const CopyEngineOptions& options)
      : memory_(std::move(memory)), options_(options) {}

  EngineDescription describe() const override {
    return {.name = "copy", .id = DXGPU_ENGINE_COPY, .opcodes = kOpcodes, .memory_bytes = memory_->size()};
  }

  absl::Status open(unsigned queue, QueueHost* host) override {
    if (queue >= queues_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("queue ", queue, ": there are ", queues_.size()));
    }
    std::lock_guard lock(mutex_);
    if (queues_[queue] == nullptr) {
      const CommandLimits limits{.memory_bytes = memory_->size(), .vectors = DXGPU_VECTORS, .opcodes = kOpcodes};
      try {
        queues_[queue] = std::make_unique<CopyQueue>(memory_, options_, limits, *host);
      } catch (const std::system_error& error) {  // the one way the standard library says "no more threads"
        return absl::ResourceExhaustedError(absl::StrCat("no thread for queue ", queue, ": ", error.what()));
      }
    }
    return absl::OkStatus();
  }

  void submit(unsigned queue, std::span<const Command> commands, Completion done) override {
    CopyQueue* target = find(queue);
    if (target == nullptr) return done(BatchResult{.fault = {DXGPU_FAULT_ENGINE, queue}});
    target->submit(commands, std::move(done));
  }

  void abort(unsigned queue, absl::AnyInvocable<void()> stopped) override {
    CopyQueue* target = find(queue);
    if (target == nullptr) return stopped();
    target->abort(std::move(stopped));
  }

  void read_memory(uint64_t offset, std::span<std::byte> out) override { memory_->read(offset, out); }
  void write_memory(uint64_t offset, std::span<const std::byte> data) override { memory_->write(offset, data); }
  absl::Status wipe() override { return memory_->wipe(); }
  absl::Status check_wiped() override { return memory_->check_zero(); }

 private:
  CopyQueue* find(unsigned queue) {
    std::lock_guard lock(mutex_);
    return queue < queues_.size() ? queues_[queue].get() : nullptr;
  }

  const std::shared_ptr<DeviceMemory> memory_;
  const CopyEngineOptions options_;
  std::mutex mutex_;
  std::array<std::unique_ptr<CopyQueue>, DXGPU_CHANNELS_MAX> queues_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> make_copy_engine(std::shared_ptr<DeviceMemory> memory,
                                                         const CopyEngineOptions& options) {
  if (options.read_bytes == 0 || options.write_bytes == 0 || options.window_bytes < options.read_bytes ||
      options.dma_deadline <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat("copy engine: read_bytes ", options.read_bytes, ", write_bytes ",
                                                   options.write_bytes, ", window_bytes ", options.window_bytes,
                                                   ": none may be zero and a window holds at least one read"));
  }
  return std::make_unique<CopyEngine>(std::move(memory), options);
}

}  // namespace dxpu::gpu
