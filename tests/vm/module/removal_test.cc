// How functions go: politely, by surprise, with their server, under readers, with users that never close.
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/vm/module/served.h"

namespace dxpu::vm {
namespace {

using attach::KernelAttach;
using attach::PortState;
using function::MemoryFunction;

// A server in a process of its own.
struct Server {
  explicit Server(unsigned port) {
    int out[2];
    EXPECT_EQ(::pipe2(out, O_CLOEXEC), 0);
    pid = ::fork();
    if (pid == 0) {
      ::dup2(out[1], 1);
      const std::string number = std::to_string(port);
      ::execl("/proc/self/exe", "module_test", "--serve", number.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(out[1]);
    char line[16] = {};
    ready = ::read(out[0], line, sizeof line - 1) > 0 && absl::StartsWith(line, "ready");
    ::close(out[0]);
  }
  ~Server() { kill(); }
  void kill() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    pid = 0;
  }
  pid_t pid = 0;
  bool ready = false;
};

std::string port_address(unsigned port) {
  const std::string line = read_file(absl::StrCat("/sys/class/dxpu/port", port, "/address"));
  return line.substr(0, line.find('\n'));
}

TEST(Removal, UnplugWithReadsOutstanding) {
  Served served(0, {.read_deadline = absl::Seconds(60)});
  ASSERT_TRUE(served.plug().ok());
  auto device = served.open();
  ASSERT_NE(device, nullptr);
  const std::string address = served.address();
  base::UniqueFd removal = make_eventfd();
  ASSERT_TRUE(device->set_removal_eventfd(removal.get()).ok());
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] { EXPECT_EQ(read32(*device, 0, StubbornFunction::kStuck), 0xffffffffu); });
  }
  ASSERT_TRUE(served.function.wait_held(4, kPatience));
  const absl::Time start = absl::Now();
  ASSERT_TRUE(served.port->unplug("test").ok());
  for (std::thread& reader : readers) reader.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10)) << "no reader pays its deadline";
  EXPECT_TRUE(signalled(removal.get())) << "the user is told";

  attach::PortStatus status = served.port->status();
  EXPECT_EQ(status.state, PortState::kGone);
  EXPECT_TRUE(absl::StrContains(status.holder, absl::StrCat("pid ", ::getpid(), " (module_test"))) << status.holder;
  EXPECT_EQ(read32(*device, 0, 0), 0xffffffffu);
  EXPECT_EQ(config16(*device, 0), 0xffff);
  write32(*device, 0, MemoryFunction::kScratch, 1);
  EXPECT_FALSE(device->reset().ok());
  EXPECT_TRUE(exists("/sys/bus/pci/devices/" + address)) << "not removed under its user";
  EXPECT_EQ(read_file("/sys/bus/pci/devices/" + address + "/config").find_first_not_of('\xff'), std::string::npos);
  EXPECT_EQ(served.port->plug(served.function).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(served.function.release(), 4u) << "answers nobody waits for are harmless";

  device.reset();
  EXPECT_TRUE(served.port->wait_for(PortState::kEmpty, kPatience).ok());
  EXPECT_FALSE(exists("/sys/bus/pci/devices/" + address));
  EXPECT_TRUE(served.plug().ok()) << "the port can be used again";
}

TEST(Removal, PoliteRequest) {
  Served served(0);
  ASSERT_TRUE(served.plug().ok());
  auto device = served.open();
  ASSERT_NE(device, nullptr);
  base::UniqueFd removal = make_eventfd();
  ASSERT_TRUE(device->set_removal_eventfd(removal.get()).ok());
  ASSERT_TRUE(served.port->request_release().ok());
  EXPECT_TRUE(signalled(removal.get()));
  EXPECT_EQ(read32(*device, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic) << "it works on";
}

TEST(Removal, AHolderThatNeverClosesDelaysNoOtherPort) {
  Served held(0), other(1);
  ASSERT_TRUE(held.plug().ok());
  auto device = held.open();
  ASSERT_NE(device, nullptr);
  ASSERT_TRUE(held.port->unplug("test").ok());
  for (int i = 0; i < 3; ++i) {
    const absl::Time start = absl::Now();
    ASSERT_TRUE(other.plug().ok());
    ASSERT_TRUE(other.port->unplug("test").ok());
    ASSERT_TRUE(other.port->wait_for(PortState::kEmpty, kPatience).ok());
    EXPECT_LT(absl::Now() - start, absl::Seconds(10));
    EXPECT_EQ(held.port->status().state, PortState::kGone);
  }
}

TEST(Removal, ServerKilledWithTheFunctionOpen) {
  Server server(0);
  ASSERT_TRUE(server.ready);
  auto opened = attach::VfioDevice::open(port_address(0));
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::unique_ptr<attach::VfioDevice> device = *std::move(opened);
  base::UniqueFd removal = make_eventfd();
  ASSERT_TRUE(device->set_removal_eventfd(removal.get()).ok());
  EXPECT_EQ(read32(*device, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  server.kill();
  EXPECT_TRUE(signalled(removal.get()));
  EXPECT_EQ(read32(*device, 0, MemoryFunction::kMagicOffset), 0xffffffffu);

  auto next = KernelAttach::open(0);
  ASSERT_TRUE(next.ok()) << "the port stays: " << next.status();
  EXPECT_EQ((*next)->status().state, PortState::kGone);
  StubbornFunction function;
  EXPECT_EQ((*next)->plug(function).code(), absl::StatusCode::kFailedPrecondition);
  device.reset();
  EXPECT_TRUE((*next)->wait_for(PortState::kEmpty, kPatience).ok());
  ASSERT_TRUE((*next)->plug(function).ok());
  EXPECT_TRUE((*next)->wait_for(PortState::kAttached, kPatience).ok());
  // Before the function goes out of scope.
  next->reset();
}

TEST(Removal, ServerKilledAtAnyMoment) {
  for (int i = 0; i < 3; ++i) {
    Server server(1);
    ASSERT_TRUE(server.ready);
    server.kill();
  }
  auto next = KernelAttach::open(1);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE((*next)->wait_for(PortState::kEmpty, kPatience).ok());
}

TEST(Removal, PlugAndUnplugWithoutWaiting) {
  Served served(2);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(served.port->wait_for(PortState::kEmpty, kPatience).ok());
    ASSERT_TRUE(served.port->plug(served.function).ok());
    absl::SleepFor(absl::Milliseconds(60 * i));  // before, while and after pciehp scans
    ASSERT_TRUE(served.port->unplug("test").ok());
  }
  ASSERT_TRUE(served.port->wait_for(PortState::kEmpty, kPatience).ok());
  EXPECT_TRUE(served.plug().ok()) << served.port->status().detail;
}

TEST(Removal, ByAnAdministrator) {
  Served served(0);
  ASSERT_TRUE(served.plug().ok());
  const std::string device = "/sys/bus/pci/devices/" + served.address();
  std::ofstream(device + "/remove") << "1";
  EXPECT_FALSE(exists(device));
  EXPECT_TRUE(served.port->wait_for(PortState::kPlugging, kPatience).ok()) << "plugged still, not shown";
  std::ofstream("/sys/bus/pci/rescan") << "1";
  EXPECT_TRUE(served.port->wait_for(PortState::kAttached, kPatience).ok());
  EXPECT_TRUE(exists(device));
  // Unbound and bound again.
  std::ofstream("/sys/bus/pci/drivers/dxpu-vfio/unbind") << served.address();
  EXPECT_TRUE(served.port->wait_for(PortState::kPlugging, kPatience).ok());
  std::ofstream("/sys/bus/pci/drivers/dxpu-vfio/bind") << served.address();
  EXPECT_TRUE(served.port->wait_for(PortState::kAttached, kPatience).ok());
  auto opened = served.open();
  ASSERT_NE(opened, nullptr);
  EXPECT_EQ(read32(*opened, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
}

// rmmod with users is refused.
TEST(Module, StaysWhileUsed) {
  auto remove = [] { return ::syscall(SYS_delete_module, "dxpu", O_NONBLOCK) == 0 ? 0 : errno; };
  Served served(0);
  ASSERT_TRUE(served.plug().ok());
  EXPECT_TRUE(remove() == EWOULDBLOCK || remove() == EBUSY) << "a server";
  auto device = served.open();
  served.port.reset();
  EXPECT_TRUE(remove() == EWOULDBLOCK || remove() == EBUSY) << "a VFIO user alone";
  EXPECT_EQ(read32(*device, 0, 0), 0xffffffffu);
}

TEST(Cycles, PlugOpenReadCloseUnplug) {
  const char* wanted = std::getenv("DXPU_CYCLES");
  const int cycles = wanted ? std::atoi(wanted) : 20;
  Served served(3);
  for (int i = 0; i < cycles; ++i) {
    ASSERT_TRUE(served.plug().ok()) << "cycle " << i;
    auto device = served.open();
    ASSERT_NE(device, nullptr) << "cycle " << i;
    ASSERT_EQ(read32(*device, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
    // Half of them with the user still there.
    if (i % 2) device.reset();
    ASSERT_TRUE(served.port->unplug("test").ok());
    device.reset();
    ASSERT_TRUE(served.port->wait_for(PortState::kEmpty, kPatience).ok()) << "cycle " << i;
  }
}

}  // namespace
}  // namespace dxpu::vm
