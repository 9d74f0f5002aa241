// The GPU function through the module: its large BAR, its VPD, and its own driver over VFIO.
#include <cstdio>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "proxy/gpu/driver/exercise.h"
#include "proxy/gpu/gpu_function.h"
#include "tests/vm/module/served.h"

namespace dxpu::vm {
namespace {

using attach::PortState;

TEST(Gpu, AsLspciAndADriverSeeIt) {
  auto function = gpu::GpuFunction::create({.memory_bytes = uint64_t{256} << 20, .serial = 0x1234});
  ASSERT_TRUE(function.ok()) << function.status();
  auto port = attach::KernelAttach::open(0, {.read_deadline = absl::Seconds(10)});
  ASSERT_TRUE(port.ok()) << port.status();
  ASSERT_TRUE((*port)->wait_for(PortState::kEmpty, kPatience).ok());
  ASSERT_TRUE((*port)->plug(**function).ok());
  ASSERT_TRUE((*port)->wait_for(PortState::kAttached, kPatience).ok());
  const std::string address = (*port)->status().bus_address;

  // VPD is read through registers that change on their own: the kernel polls them until the function has answered.
  const std::string vpd = read_file("/sys/bus/pci/devices/" + address + "/vpd");
  EXPECT_TRUE(absl::StrContains(vpd, "dxpu-soft")) << vpd.size() << " bytes of VPD";
  EXPECT_TRUE(absl::StrContains(vpd, "0000000000001234"));

  auto device = attach::VfioDevice::open(address);
  ASSERT_TRUE(device.ok()) << device.status();
  enable_bus_master(**device);
  for (gpu::ChannelMode mode : {gpu::ChannelMode::kRing, gpu::ChannelMode::kPush}) {
    auto report = gpu::exercise(**device, {.bytes = 8 << 20, .reads = 200, .mode = mode});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->host_crc32c, report->device_crc32c);
    EXPECT_EQ(report->host_crc32c, report->returned_crc32c);
    EXPECT_GT(report->interrupts, 0u);
    std::printf("%s\n", gpu::to_string(*report).c_str());
  }
  device->reset();
  EXPECT_TRUE((*port)->unplug("test").ok());
}

}  // namespace
}  // namespace dxpu::vm
