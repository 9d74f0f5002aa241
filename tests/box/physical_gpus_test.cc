#include "proxy/box/physical_gpus.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace dxpu::box {
namespace {

TEST(PhysicalGpus, DisplayControllersOfAFakeBusAreListedAndNothingElse) {
  namespace fs = std::filesystem;
  const fs::path bus = fs::path(::testing::TempDir()) / ("dxpu-pci-" + std::to_string(::getpid()));
  auto add = [&](const char* address, const char* vendor, const char* device, const char* pci_class) {
    const fs::path dir = bus / "devices" / address;
    fs::create_directories(dir);
    std::ofstream(dir / "vendor") << vendor << "\n";
    std::ofstream(dir / "device") << device << "\n";
    std::ofstream(dir / "class") << pci_class << "\n";
    std::ofstream(dir / "irq") << "0\n";
    std::ofstream(dir / "resource") << "0x0 0x0 0x0\n";
  };
  add("0000:3b:00.0", "0x10de", "0x20b2", "0x030200");
  add("0000:00:02.0", "0x1234", "0x1111", "0x030000");
  add("0000:00:1f.2", "0x8086", "0x2922", "0x010601");
  auto gpus = list_physical_gpus(bus);
  fs::remove_all(bus);
  ASSERT_EQ(gpus.size(), 2u);
  std::sort(gpus.begin(), gpus.end(), [](const auto& a, const auto& b) { return a.pci_address < b.pci_address; });
  EXPECT_EQ(gpus[0].pci_address, "0000:00:02.0");
  EXPECT_EQ(gpus[1].pci_address, "0000:3b:00.0");
  EXPECT_EQ(gpus[1].vendor_id, 0x10de);
  EXPECT_EQ(gpus[1].device_id, 0x20b2);
  EXPECT_FALSE(gpus[1].name.empty());
}

TEST(PhysicalGpus, NoBusIsNoGpus) { EXPECT_TRUE(list_physical_gpus("/nonexistent").empty()); }

TEST(PhysicalGpus, ThisMachineCanBeLookedAt) {
  for (const PhysicalGpu& gpu : list_physical_gpus()) EXPECT_FALSE(gpu.pci_address.empty());
}

}  // namespace
}  // namespace dxpu::box
