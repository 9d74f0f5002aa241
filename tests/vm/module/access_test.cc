// The function as the kernel and a VFIO program see it: enumeration, configuration space, BARs, interrupts, reset.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/vm/module/served.h"

namespace dxpu::vm {
namespace {

using attach::PortState;
using function::MemoryFunction;

constexpr unsigned kRegisters = MemoryFunction::kRegisterBar, kRam = MemoryFunction::kRamBar;

TEST(Plug, ShowsTheFunctionBehindItsPort) {
  Served served(0);
  const absl::Time start = absl::Now();
  ASSERT_TRUE(served.plug().ok());
  std::printf("  plugged to offered: %s\n", absl::FormatDuration(absl::Now() - start).c_str());
  const std::string device = "/sys/bus/pci/devices/" + served.address();
  EXPECT_EQ(read_file(device + "/vendor"), "0xd80b\n");
  EXPECT_EQ(read_file(device + "/device"), "0x4d01\n");
  const std::string path = std::filesystem::canonical(device);
  EXPECT_TRUE(absl::StrContains(path, served.address().substr(0, 4) + ":00:00.0/")) << path;
  EXPECT_EQ(std::filesystem::read_symlink(device + "/driver").filename(), "dxpu-vfio");
  EXPECT_TRUE(exists(device + "/iommu_group"));
  // Both BARs have an address.
  EXPECT_FALSE(absl::StartsWith(read_file(device + "/resource"), "0x0000000000000000 0x0000000000000000"));
  EXPECT_EQ(std::filesystem::file_size(device + "/resource0"), MemoryFunction::kRegisterBytes);
  EXPECT_EQ(std::filesystem::file_size(device + "/resource2"), 64u * 1024);

  // sysfs reads configuration space with IRQs off, all 4096 bytes of it.
  const std::string config = read_file(device + "/config");
  ASSERT_EQ(config.size(), 4096u);
  const pcie::ConfigSpace image = served.function.config();
  for (size_t i = 0; i < config.size(); ++i) {
    if (i >= 0x04 && i < 0x08) continue;  // command
    if (i >= 0x10 && i < 0x28) continue;  // BARs
    if (i == 0x0c || i == 0x0d || i == 0x3c) continue;
    if (std::byte(config[i]) != image.bytes()[i] && image.write_mask()[i] == std::byte{0}) {
      ADD_FAILURE() << absl::StrCat("byte ", absl::Hex(i), " is ", int(std::byte(config[i])), " and not ",
                                    int(image.bytes()[i]));
    }
  }
  EXPECT_TRUE(absl::StrContains(read_file("/sys/class/dxpu/port0/state"), "attached"));
  EXPECT_TRUE(served.port->unplug("test").ok());
  EXPECT_TRUE(served.port->wait_for(PortState::kEmpty, kPatience).ok());
  EXPECT_FALSE(exists(device));
}

TEST(Plug, ASecondFunctionIsRefused) {
  Served served(0);
  ASSERT_TRUE(served.plug().ok());
  StubbornFunction other;
  EXPECT_EQ(served.port->plug(other).code(), absl::StatusCode::kFailedPrecondition);
}

class Device : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(served.plug().ok());
    device = served.open();
    ASSERT_NE(device, nullptr);
  }
  Served served{0};
  std::unique_ptr<attach::VfioDevice> device;
};

TEST_F(Device, RegistersAndTheirSideEffects) {
  EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  for (uint32_t i = 0; i < 5; ++i)
    EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kCounter), i) << "read once each";
  for (uint32_t i = 0; i < 100; ++i) {
    write32(*device, kRegisters, MemoryFunction::kScratch + 4 * (i % 8), i);
    EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kScratch + 4 * (i % 8)), i)
        << "a read sees the writes before it";
  }
  EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kWrites), 100u);
  EXPECT_EQ(*device->bar_size(kRam), 64u * 1024);
  std::byte byte[4];
  EXPECT_FALSE(device->bar_read(kRegisters, MemoryFunction::kRegisterBytes, byte).ok()) << "outside";
  EXPECT_FALSE(device->bar_read(4, 0, byte).ok()) << "no such BAR";
}

TEST_F(Device, AnySizeAndAlignment) {
  std::mt19937 random(1);
  std::vector<std::byte> model(64 * 1024);
  for (std::byte& b : model) b = std::byte(random());
  ASSERT_TRUE(device->bar_write(kRam, 0, model).ok());
  std::vector<size_t> sizes = {1,  2,  3,  4,   5,   6,   7,    8,    9,    15,   16,    17,   31,
                               63, 64, 65, 127, 255, 256, 1000, 4095, 4096, 4097, 10000, 20000};
  for (size_t size : sizes) {
    for (int i = 0; i < 4; ++i) {
      const size_t offset = random() % (model.size() - size + 1);
      std::vector<std::byte> out(size);
      ASSERT_TRUE(device->bar_read(kRam, offset, out).ok());
      ASSERT_TRUE(std::equal(out.begin(), out.end(), model.begin() + offset)) << "read of " << size << " at " << offset;
      for (size_t j = 0; j < size; ++j) model[offset + j] = out[j] = std::byte(random());
      ASSERT_TRUE(device->bar_write(kRam, offset, out).ok());
    }
  }
  std::vector<std::byte> all(model.size());
  ASSERT_TRUE(device->bar_read(kRam, 0, all).ok());
  EXPECT_EQ(all, model);
}

TEST_F(Device, ConfigurationSpace) {
  EXPECT_EQ(config16(*device, 0x00), 0xd80b);
  EXPECT_EQ(config16(*device, 0x04) & 0x6, 0x2) << "memory on, bus mastering off after open";
  std::vector<std::byte> whole(256);
  ASSERT_TRUE(device->config_read(0, whole).ok()) << "256 bytes at once, as QEMU reads";
  // BAR sizing by the user moves nothing on the host.
  const std::string resources = read_file("/sys/bus/pci/devices/" + served.address() + "/resource");
  const uint32_t ones = 0xffffffff;
  uint32_t value = 0;
  ASSERT_TRUE(device->config_write(0x10, std::as_bytes(std::span(&ones, 1))).ok());
  ASSERT_TRUE(device->config_read(0x10, std::as_writable_bytes(std::span(&value, 1))).ok());
  EXPECT_EQ(value, 0xfffff000u);
  const std::string host = read_file("/sys/bus/pci/devices/" + served.address() + "/config");
  EXPECT_NE(host.substr(0x10, 4), std::string("\x00\xf0\xff\xff", 4));
  EXPECT_EQ(read_file("/sys/bus/pci/devices/" + served.address() + "/resource"), resources);
  ASSERT_TRUE(device->config_write(0x30, std::as_bytes(std::span(&ones, 1))).ok());
  ASSERT_TRUE(device->config_read(0x30, std::as_writable_bytes(std::span(&value, 1))).ok());
  EXPECT_EQ(value, 0u) << "no ROM";
  // A write that matters reaches the function.
  enable_bus_master(*device);
  EXPECT_TRUE(eventually([&] { return served.function.config().bus_master_enabled(); }));
  // Memory decoding off: all ones, as on a bus.
  set_config16(*device, 0x04, config16(*device, 0x04) & ~0x2);
  EXPECT_EQ(read32(*device, kRegisters, 0), 0xffffffffu);
  EXPECT_GE(counter(0, "refused_mmio"), 1u);
}

TEST_F(Device, InterruptsByEventfd) {
  enable_bus_master(*device);  // an interrupt is a write to memory
  base::UniqueFd first = make_eventfd(), second = make_eventfd();
  ASSERT_TRUE(device->set_msix_eventfd(0, first.get()).ok());
  ASSERT_TRUE(device->set_msix_eventfd(2, second.get()).ok());
  ASSERT_TRUE(eventually([&] { return served.function.config().msix_enabled(); })) << "enabling reaches the function";
  write32(*device, kRegisters, MemoryFunction::kDmaVector, 0);
  write32(*device, kRegisters, MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_TRUE(signalled(first.get()));
  write32(*device, kRegisters, MemoryFunction::kDmaVector, 2);
  write32(*device, kRegisters, MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_TRUE(signalled(second.get()));
  EXPECT_FALSE(signalled(first.get(), absl::ZeroDuration()));

  // Masked in the table: pending, delivered when unmasked.
  const uint64_t control = MemoryFunction::kMsixTable + 2 * 16 + 12;
  write32(*device, kRegisters, control, 1);
  EXPECT_EQ(read32(*device, kRegisters, control), 1u);
  write32(*device, kRegisters, MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_TRUE(eventually([&] { return read32(*device, kRegisters, MemoryFunction::kMsixPba) == 1u << 2; }));
  EXPECT_FALSE(signalled(second.get(), absl::ZeroDuration()));
  write32(*device, kRegisters, control, 0);
  EXPECT_TRUE(signalled(second.get()));
  EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kMsixPba), 0u);

  // The whole function masked.
  const uint32_t capability = served.function.config().find_capability(0x11).value_or(0);
  ASSERT_NE(capability, 0u);
  const uint16_t flags = config16(*device, capability + 2);
  set_config16(*device, capability + 2, flags | 0x4000);
  const uint64_t pended = counter(0, "interrupts_pended");
  write32(*device, kRegisters, MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_TRUE(eventually([&] { return counter(0, "interrupts_pended") > pended; }));
  EXPECT_FALSE(signalled(second.get(), absl::ZeroDuration()));
  set_config16(*device, capability + 2, flags);
  EXPECT_TRUE(signalled(second.get()));

  ASSERT_TRUE(device->set_msix_eventfd(0, -1).ok());
  ASSERT_TRUE(device->set_msix_eventfd(2, -1).ok());
  EXPECT_TRUE(eventually([&] { return !served.function.config().msix_enabled(); }));
}

TEST_F(Device, ResetKeepsTheConfiguration) {
  enable_bus_master(*device);
  write32(*device, kRegisters, MemoryFunction::kScratch, 0x1234);
  const uint16_t command = config16(*device, 0x04);
  ASSERT_TRUE(device->reset().ok());
  EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kScratch), 0u) << "registers are at their reset values";
  EXPECT_EQ(config16(*device, 0x04), command);
  EXPECT_TRUE(eventually([&] { return served.function.config().bus_master_enabled(); }))
      << "written to the function again";
}

TEST_F(Device, TheNextUserFindsNothingOfThisOne) {
  enable_bus_master(*device);
  write32(*device, kRegisters, MemoryFunction::kScratch, 0x1234);
  device.reset();
  device = served.open();
  ASSERT_NE(device, nullptr);
  EXPECT_EQ(config16(*device, 0x04) & 0x4, 0);
  EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kScratch), 0u);
}

TEST(Deadline, ReadWithoutAnswerIsAllOnes) {
  Served served(0, {.read_deadline = absl::Milliseconds(300)});
  ASSERT_TRUE(served.plug().ok());
  auto device = served.open();
  ASSERT_NE(device, nullptr);
  const uint64_t timeouts = counter(0, "completion_timeouts"), late = counter(0, "late_completions");
  const absl::Time start = absl::Now();
  EXPECT_EQ(read32(*device, kRegisters, StubbornFunction::kStuck), 0xffffffffu);
  const absl::Duration took = absl::Now() - start;
  EXPECT_GE(took, absl::Milliseconds(280));
  EXPECT_LT(took, absl::Seconds(10));
  EXPECT_EQ(counter(0, "completion_timeouts"), timeouts + 1);
  EXPECT_EQ(served.function.release(), 1u);
  EXPECT_TRUE(eventually([&] { return counter(0, "late_completions") == late + 1; })) << "dropped by its generation";
  EXPECT_EQ(read32(*device, kRegisters, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
}

TEST(TwoPorts, AtOnce) {
  Served served[2] = {Served(0), Served(1)};
  std::vector<std::thread> threads;
  for (Served& one : served) {
    threads.emplace_back([&one] {
      ASSERT_TRUE(one.plug().ok());
      auto device = one.open();
      ASSERT_NE(device, nullptr);
      for (uint32_t i = 0; i < 200; ++i) {
        write32(*device, kRegisters, MemoryFunction::kScratch, i);
        ASSERT_EQ(read32(*device, kRegisters, MemoryFunction::kScratch), i);
      }
      device.reset();
      EXPECT_TRUE(one.port->unplug("test").ok());
      EXPECT_TRUE(one.port->wait_for(PortState::kEmpty, kPatience).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(TwoPorts, ASlowReadDelaysNobody) {
  Served slow(0, {.read_deadline = absl::Seconds(60)}), quick(1);
  ASSERT_TRUE(slow.plug().ok());
  ASSERT_TRUE(quick.plug().ok());
  auto slow_device = slow.open(), quick_device = quick.open();
  ASSERT_NE(slow_device, nullptr);
  ASSERT_NE(quick_device, nullptr);
  std::thread stuck([&] { EXPECT_EQ(read32(*slow_device, kRegisters, StubbornFunction::kStuck), 0u); });
  ASSERT_TRUE(slow.function.wait_held(1, kPatience));
  EXPECT_EQ(read32(*quick_device, kRegisters, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  EXPECT_EQ(read32(*slow_device, kRegisters, MemoryFunction::kMagicOffset), MemoryFunction::kMagic)
      << "same port, another reader";
  EXPECT_EQ(slow.function.release(), 1u);
  stuck.join();
}

}  // namespace
}  // namespace dxpu::vm
