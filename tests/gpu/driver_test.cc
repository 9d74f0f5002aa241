// The driver and the demo logic on direct attach: what the VFIO program does, in milliseconds.

#include "proxy/gpu/driver/driver.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "proxy/attach/direct/direct_attach.h"
#include "proxy/function/memory_function.h"
#include "proxy/gpu/crc32c.h"
#include "proxy/gpu/driver/exercise.h"
#include "proxy/gpu/gpu_function.h"

namespace dxpu::gpu {
namespace {

class DriverTest : public testing::Test {
 protected:
  void SetUp() override {
    auto made = GpuFunction::create({.memory_bytes = uint64_t{16} << 20, .serial = 42});
    ASSERT_TRUE(made.ok()) << made.status();
    gpu = *std::move(made);
    port = std::make_unique<attach::DirectAttach>();
    ASSERT_TRUE(port->plug(*gpu).ok());
    auto opened = port->open();
    ASSERT_TRUE(opened.ok()) << opened.status();
    device = *std::move(opened);
  }
  std::unique_ptr<Driver> probe() {
    auto driver = Driver::probe(*device, {.deadline = absl::Seconds(20)});
    EXPECT_TRUE(driver.ok()) << driver.status();
    return driver.ok() ? *std::move(driver) : nullptr;
  }
  static std::unique_ptr<Channel> open(Driver& driver, unsigned index, const ChannelOptions& options) {
    auto channel = driver.open_channel(index, options);
    EXPECT_TRUE(channel.ok()) << channel.status();
    return channel.ok() ? *std::move(channel) : nullptr;
  }
  static std::unique_ptr<HostBuffer> allocate(Driver& driver, uint64_t bytes) {
    auto buffer = driver.allocate(bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return buffer.ok() ? *std::move(buffer) : nullptr;
  }
  static void finish(Channel& channel, WaitBy by = WaitBy::kInterrupt) {
    const auto fence = channel.fence();
    ASSERT_TRUE(fence.ok()) << fence.status();
    const absl::Status status = channel.wait(*fence, by);
    ASSERT_TRUE(status.ok()) << status;
  }

  std::unique_ptr<GpuFunction> gpu;
  std::unique_ptr<attach::DirectAttach> port;
  std::unique_ptr<attach::DirectDevice> device;
};

TEST_F(DriverTest, ProbeReadsIdentity) {
  auto driver = probe();
  ASSERT_NE(driver, nullptr);
  EXPECT_EQ(driver->info().model, "dxpu-soft");
  EXPECT_EQ(driver->info().serial, 42u);
  EXPECT_EQ(driver->info().memory_bytes, uint64_t{16} << 20);
  EXPECT_EQ(driver->info().channels, DXGPU_CHANNELS_MAX);
}

TEST_F(DriverTest, ProbeRefusesOtherFunctionsAndSilence) {
  auto memory = function::MemoryFunction::create({});
  ASSERT_TRUE(memory.ok());
  attach::DirectAttach other;
  ASSERT_TRUE(other.plug(**memory).ok());
  auto opened = other.open();
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(Driver::probe(**opened, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(port->unplug("test").ok());
  EXPECT_EQ(Driver::probe(*device, {}).status().code(), absl::StatusCode::kUnavailable);
}

class ExerciseTest : public DriverTest, public testing::WithParamInterface<ChannelMode> {};

TEST_P(ExerciseTest, PassesOnDirectAttach) {
  const auto report = exercise(*device, {.bytes = (uint64_t{4} << 20) + 12345, .reads = 100, .mode = GetParam()});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->host_crc32c, report->device_crc32c);
  EXPECT_EQ(report->host_crc32c, report->returned_crc32c);
  EXPECT_GT(report->interrupts, 0u);
  EXPECT_GT(report->to_device_mb_s, 0);
  EXPECT_GT(report->read_p50, absl::ZeroDuration());
  EXPECT_GE(report->read_p99, report->read_p50);
  const std::string text = to_string(*report);
  EXPECT_NE(text.find("d80b:6701 dxpu-soft"), std::string::npos) << text;
  EXPECT_EQ(port->stats().dma_refused, 0u);
}
INSTANTIATE_TEST_SUITE_P(Modes, ExerciseTest, testing::Values(ChannelMode::kRing, ChannelMode::kPush));

TEST_F(DriverTest, ExerciseRefusesMoreThanTheDeviceHas) {
  EXPECT_EQ(exercise(*device, {.bytes = uint64_t{17} << 20}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DriverTest, ManyMoreCommandsThanTheRingHolds) {
  auto driver = probe();
  auto buffer = allocate(*driver, 1 << 20);
  for (const ChannelMode mode : {ChannelMode::kRing, ChannelMode::kPush}) {
    auto channel = open(*driver, 3, {.mode = mode, .ring_log2 = 3});
    for (uint64_t i = 0; i < 500; ++i) {
      std::memcpy(buffer->bytes().data() + i * 64, &i, sizeof i);
      ASSERT_TRUE(channel->copy_to_device((499 - i) * 64, *buffer, i * 64, 64).ok());
    }
    finish(*channel);
    std::memset(buffer->bytes().data(), 0, 500 * 64);
    ASSERT_TRUE(channel->copy_from_device(*buffer, 0, 0, 500 * 64).ok());
    finish(*channel, WaitBy::kPoll);
    for (uint64_t i = 0; i < 500; ++i) {
      uint64_t value;
      std::memcpy(&value, buffer->bytes().data() + i * 64, sizeof value);
      ASSERT_EQ(value, 499 - i);
    }
  }
}

TEST_F(DriverTest, ListsFillsAndLocalCopies) {
  auto driver = probe();
  auto channel = open(*driver, 0, {});
  auto list = allocate(*driver, 4096);
  auto data = allocate(*driver, 65536);
  ASSERT_TRUE(channel->fill(0, 4096, 0x1111111111111111).ok());
  ASSERT_TRUE(channel->copy_on_device(8192, 0, 4096).ok());
  const dxgpu_segment segments[2] = {{data->iova() + 100, 1096, 0}, {data->iova() + 40000, 3000, 0}};
  std::memcpy(list->bytes().data(), segments, sizeof segments);
  ASSERT_TRUE(channel->copy_list(DXGPU_OP_COPY_OUT, 8192, 4096, *list, 0, 2).ok());
  finish(*channel);
  EXPECT_EQ(data->bytes()[99], std::byte{0});
  EXPECT_EQ(data->bytes()[100], std::byte{0x11});
  EXPECT_EQ(data->bytes()[100 + 1095], std::byte{0x11});
  EXPECT_EQ(data->bytes()[100 + 1096], std::byte{0});
  EXPECT_EQ(data->bytes()[42999], std::byte{0x11});
  EXPECT_EQ(data->bytes()[43000], std::byte{0});
  const auto sum = channel->checksum(8192, 4096);
  ASSERT_TRUE(sum.ok());
  EXPECT_EQ(*sum, crc32c(std::vector<std::byte>(4096, std::byte{0x11})));
}

TEST_F(DriverTest, AFaultIsToldAndResetHeals) {
  auto driver = probe();
  auto bad = open(*driver, 0, {});
  auto good = open(*driver, 1, {});
  ASSERT_TRUE(bad->fill(uint64_t{16} << 20, 8, 0).ok());  // just outside
  const auto fence = bad->fence();
  ASSERT_TRUE(fence.ok());
  for (const WaitBy by : {WaitBy::kInterrupt, WaitBy::kPoll}) {
    const absl::Status status = bad->wait(*fence, by);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_NE(status.message().find("range outside device memory"), std::string::npos) << status;
  }
  ASSERT_TRUE(good->fill(0, 8, 1).ok());
  finish(*good);
  const auto fault = bad->fault();
  ASSERT_TRUE(fault.ok());
  EXPECT_EQ(fault->code, DXGPU_FAULT_MEMORY_RANGE);
  EXPECT_EQ(fault->address, uint64_t{16} << 20);
  ASSERT_TRUE(bad->reset().ok());
  ASSERT_TRUE(bad->fill(0, 8, 2).ok());
  finish(*bad);
}

TEST_F(DriverTest, AnUnmappedBufferIsNotReached) {
  auto driver = probe();
  auto channel = open(*driver, 0, {});
  Command command;
  std::memset(&command, 0, sizeof command);
  command.header.opcode = DXGPU_OP_COPY_IN;
  command.copy_host.bytes = 4096;
  command.copy_host.segments = 1;
  {
    auto buffer = allocate(*driver, 4096);
    command.copy_host.segment[0] = {buffer->iova(), 4096, 0};
  }
  ASSERT_TRUE(channel->queue(command).ok());
  const auto fence = channel->fence();
  ASSERT_TRUE(fence.ok());
  EXPECT_EQ(channel->wait(*fence, WaitBy::kInterrupt).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(channel->fault()->code, DXGPU_FAULT_DMA_READ);
  EXPECT_EQ(port->stats().dma_refused, 1u);
}

TEST_F(DriverTest, TwoChannelsAtOnceFromTwoThreads) {
  auto driver = probe();
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      auto buffer = allocate(*driver, 256 << 10);
      auto channel = open(*driver, t, {.mode = t == 0 ? ChannelMode::kRing : ChannelMode::kPush});
      const uint64_t base = t * (uint64_t{8} << 20);
      for (unsigned round = 0; round < 20; ++round) {
        std::memset(buffer->bytes().data(), static_cast<int>(round * 2 + t + 1), buffer->size());
        ASSERT_TRUE(channel->copy_to_device(base, *buffer, 0, buffer->size()).ok());
        const auto sum = channel->checksum(base, buffer->size(), t == 0 ? WaitBy::kInterrupt : WaitBy::kPoll);
        ASSERT_TRUE(sum.ok()) << sum.status();
        ASSERT_EQ(*sum, crc32c(buffer->bytes()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(DriverTest, ResetRegistersWhileAChannelWorks) {
  auto driver = probe();
  {
    auto channel = open(*driver, 0, {});
    auto buffer = allocate(*driver, 8 << 20);
    ASSERT_TRUE(channel->copy_to_device(0, *buffer, 0, buffer->size()).ok());
    ASSERT_TRUE(channel->fence().ok());
    ASSERT_TRUE(driver->reset_registers().ok());
    EXPECT_EQ(channel->wait(1u << 30, WaitBy::kPoll).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(channel->reset().ok());
    ASSERT_TRUE(channel->fill(0, 8, 1).ok());
    finish(*channel);
  }
}

TEST_F(DriverTest, PatternsSurviveAResetButNotAScrub) {
  const auto left = leave_pattern(*device, 5);
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_EQ(*left, 65536u);
  // First and last page are among the places.
  uint8_t first = 0, last = 0;
  ASSERT_TRUE(device->bar_read(DXGPU_BAR_MEMORY, 0, std::as_writable_bytes(std::span(&first, 1))).ok());
  ASSERT_TRUE(device->bar_read(DXGPU_BAR_MEMORY, (16 << 20) - 1, std::as_writable_bytes(std::span(&last, 1))).ok());
  EXPECT_NE(first, 0);
  EXPECT_NE(last, 0);
  ASSERT_TRUE(device->reset().ok());
  auto found = find_pattern(*device, 5);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->bytes_found, 65536u);
  EXPECT_EQ(find_pattern(*device, 6)->bytes_nonzero, 65536u);
  EXPECT_LT(find_pattern(*device, 6)->bytes_found, 6000u);

  device.reset();
  ASSERT_TRUE(port->unplug("test").ok());
  ASSERT_TRUE(gpu->scrub().ok());
  ASSERT_TRUE(port->plug(*gpu).ok());
  auto again = port->open();
  ASSERT_TRUE(again.ok());
  found = find_pattern(**again, 5);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->bytes_looked, 65536u);
  EXPECT_EQ(found->bytes_found, 0u);
  EXPECT_EQ(found->bytes_nonzero, 0u);
  ASSERT_TRUE(port->unplug("test").ok());
  EXPECT_EQ(find_pattern(**again, 5).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DriverTest, AHolderIsToldAndSeesAllOnes) {
  std::vector<std::string> events;
  std::atomic<bool> holding{false};
  absl::StatusOr<HoldReport> report = absl::UnknownError("not run");
  std::thread holder([&] {
    report = hold(*device, {.deadline = absl::Seconds(20), .interval = absl::Milliseconds(5)},
                  [&](const std::string& event) {
                    events.push_back(event);
                    holding = true;
                  });
  });
  while (!holding) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(port->status().state, attach::PortState::kAttached);
  ASSERT_TRUE(port->unplug("worker died").ok());
  holder.join();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->told);
  EXPECT_TRUE(report->all_ones);
  EXPECT_EQ(events.size(), 3u);
  EXPECT_EQ(port->status().state, attach::PortState::kGone);
  device.reset();
  EXPECT_EQ(port->status().state, attach::PortState::kEmpty);
}

TEST_F(DriverTest, HoldEndsByItsDeadline) {
  const auto report =
      hold(*device, {.deadline = absl::Milliseconds(30), .interval = absl::Milliseconds(5)}, [](const std::string&) {});
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->told);
  EXPECT_FALSE(report->all_ones);
  EXPECT_GT(report->reads, 0u);
}

TEST_F(DriverTest, UnplugUnderWorkEndsEveryWait) {
  auto driver = probe();
  auto buffer = allocate(*driver, 4 << 20);
  auto channel = open(*driver, 0, {});
  absl::Status status;
  std::thread worker([&] {
    while (status.ok()) {
      status = channel->copy_to_device(0, *buffer, 0, buffer->size());
      if (!status.ok()) break;
      const auto fence = channel->fence();
      status = fence.ok() ? channel->wait(*fence, WaitBy::kInterrupt) : fence.status();
    }
  });
  absl::SleepFor(absl::Milliseconds(20));
  ASSERT_TRUE(port->unplug("test").ok());
  worker.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST_F(DriverTest, BadOptionsAreRefused) {
  auto driver = probe();
  EXPECT_EQ(driver->open_channel(64, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(driver->open_channel(0, {.ring_log2 = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(driver->open_channel(0, {.ring_log2 = 17}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(driver->open_channel(0, {.vector = 65}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(driver->allocate(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(driver->allocate(~uint64_t{0}).status().code(), absl::StatusCode::kInvalidArgument);
  auto buffer = allocate(*driver, 4096);
  auto channel = open(*driver, 0, {.vector = DXGPU_NO_VECTOR});
  EXPECT_EQ(channel->copy_to_device(0, *buffer, 1, 4096).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(channel->copy_to_device(0, *buffer, ~uint64_t{0}, 2).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(channel->wait(1, WaitBy::kInterrupt).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(channel->fill(0, 8, 0).ok());
  finish(*channel, WaitBy::kPoll);
}

TEST_F(DriverTest, AddressSpaceIsReused) {
  auto driver = Driver::probe(*device, {.iova_base = uint64_t{1} << 32, .iova_bytes = 64 << 10});
  ASSERT_TRUE(driver.ok());
  for (int i = 0; i < 50; ++i) {
    auto a = allocate(**driver, 20 << 10);
    auto b = allocate(**driver, 20 << 10);
    EXPECT_NE(a->iova(), b->iova());
    EXPECT_EQ((*driver)->allocate(20 << 10).status().code(), absl::StatusCode::kResourceExhausted);
  }
}

}  // namespace
}  // namespace dxpu::gpu
