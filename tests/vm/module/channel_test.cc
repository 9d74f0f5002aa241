// /dev/dxpu by hand: what a program of another version, a clumsy one or a hostile one gets.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "gtest/gtest.h"
#include "kmod/uapi/dxpu.h"
#include "tests/vm/module/served.h"

namespace dxpu::vm {
namespace {

using attach::KernelAttach;
using attach::PortState;

constexpr unsigned kPort = 0;

dxpu_hello good_hello() {
  return {.size = sizeof(dxpu_hello),
          .major = DXPU_ABI_MAJOR,
          .minor = DXPU_ABI_MINOR,
          .request_bytes = sizeof(dxpu_request),
          .completion_bytes = sizeof(dxpu_completion),
          .plug_bytes = sizeof(dxpu_plug),
          .port_bytes = sizeof(dxpu_port_status),
          .map_bytes = DXPU_MAP_BYTES,
          .ports = 0,
          .domain = 0};
}

int run(int fd, unsigned long command, void* argument) { return ::ioctl(fd, command, argument) < 0 ? -errno : 0; }

// A server written by hand.
struct Raw {
  Raw() : fd(::open(DXPU_DEVICE_PATH, O_RDWR | O_CLOEXEC)) {
    dxpu_hello hello = good_hello();
    EXPECT_EQ(run(fd.get(), DXPU_IOC_HELLO, &hello), 0);
    dxpu_claim claim = {.size = sizeof claim,
                        .port = kPort,
                        .read_deadline_ms = 5000,
                        .write_deadline_ms = 1000,
                        .reset_deadline_ms = 1000,
                        .reserved = 0};
    EXPECT_EQ(run(fd.get(), DXPU_IOC_CLAIM, &claim), 0);
    map = ::mmap(nullptr, DXPU_MAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    EXPECT_NE(map, MAP_FAILED);
  }
  ~Raw() { ::munmap(map, DXPU_MAP_BYTES); }
  dxpu_control& control() { return *static_cast<dxpu_control*>(map); }
  std::byte* cq() { return static_cast<std::byte*>(map) + DXPU_CQ_OFFSET; }
  int plug(const pcie::ConfigSpace& config, std::span<const std::byte> mask) {
    dxpu_plug plug = {.size = sizeof plug,
                      .reserved = 0,
                      .image = reinterpret_cast<uint64_t>(config.bytes().data()),
                      .write_mask = reinterpret_cast<uint64_t>(mask.data()),
                      .w1c_mask = reinterpret_cast<uint64_t>(config.w1c_mask().data())};
    return run(fd.get(), DXPU_IOC_PLUG, &plug);
  }
  int plug() {
    const pcie::ConfigSpace config = StubbornFunction().config();
    return plug(config, config.write_mask());
  }
  int complete() { return run(fd.get(), DXPU_IOC_COMPLETE, nullptr); }
  uint32_t state() {
    dxpu_port_status status = {};
    status.size = sizeof status;
    status.port = kPort;
    EXPECT_EQ(run(fd.get(), DXPU_IOC_PORT_STATUS, &status), 0);
    return status.state;
  }
  base::UniqueFd fd;
  void* map = nullptr;
};

TEST(Channel, AnotherVersionIsRefused) {
  base::UniqueFd fd(::open(DXPU_DEVICE_PATH, O_RDWR));
  ASSERT_TRUE(fd.valid()) << std::strerror(errno);
  dxpu_hello hello = good_hello();
  hello.major = DXPU_ABI_MAJOR + 1;
  EXPECT_EQ(run(fd.get(), DXPU_IOC_HELLO, &hello), -EPROTO);
  EXPECT_EQ(hello.major, unsigned{DXPU_ABI_MAJOR}) << "it says which version it speaks";
  hello = good_hello();
  hello.request_bytes += 8;
  EXPECT_EQ(run(fd.get(), DXPU_IOC_HELLO, &hello), -EPROTO);
  dxpu_port_status status = {};
  EXPECT_EQ(run(fd.get(), DXPU_IOC_PORT_STATUS, &status), -EPROTO) << "no command before the hello";
  hello = good_hello();
  EXPECT_EQ(run(fd.get(), DXPU_IOC_HELLO, &hello), 0);
  EXPECT_GE(hello.ports, 2u);
  EXPECT_EQ(run(fd.get(), DXPU_IOC_UNPLUG, nullptr), -ENOTCONN) << "nothing is claimed";
}

TEST(Channel, OnePortHasOneServer) {
  auto first = KernelAttach::open(kPort);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = KernelAttach::open(kPort);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
  EXPECT_EQ(KernelAttach::open(999).status().code(), absl::StatusCode::kOutOfRange);
  first->reset();
  EXPECT_TRUE(KernelAttach::open(kPort).ok());
}

TEST(Channel, BadImagesAreRefused) {
  Raw raw;
  const pcie::ConfigSpace config = StubbornFunction().config();
  std::vector<std::byte> mask(config.write_mask().begin(), config.write_mask().end());
  std::vector<std::byte> bad = mask;
  bad[0x10] ^= std::byte{0x40};  // a BAR with a hole in its mask
  bad[0x12] ^= std::byte{0x01};
  EXPECT_EQ(raw.plug(config, bad), -EINVAL);
  bad = mask;
  bad[0x0e] = std::byte{0xff};  // a header type that can be written
  EXPECT_EQ(raw.plug(config, bad), -EINVAL);
  dxpu_plug plug = {.size = sizeof plug, .reserved = 0, .image = 0, .write_mask = 0, .w1c_mask = 0};
  EXPECT_EQ(run(raw.fd.get(), DXPU_IOC_PLUG, &plug), -EFAULT);
  EXPECT_EQ(raw.state(), unsigned{DXPU_PORT_EMPTY});

  pcie::ConfigDescription large;
  large.vendor_id = 0xd80b;
  large.device_id = 0x4d01;
  large.class_code = 0x030200;
  large.bars[0] = {.size = uint64_t{8} << 30, .is_64bit = true, .prefetchable = true};
  const auto large_config = pcie::ConfigSpace::build(large);
  ASSERT_TRUE(large_config.ok()) << large_config.status();
  EXPECT_EQ(raw.plug(*large_config, large_config->write_mask()), -ENOSPC) << "beyond the window";
  large.bars[0] = {.size = uint64_t{64} << 20};
  const auto wide_config = pcie::ConfigSpace::build(large);
  ASSERT_TRUE(wide_config.ok()) << wide_config.status();
  EXPECT_EQ(raw.plug(*wide_config, wide_config->write_mask()), -ENOSPC) << "32-bit BARs have a window of their own";
}

// Whatever a server writes into the rings costs its own function and nothing else.
class Hostile : public testing::TestWithParam<const char*> {};

TEST_P(Hostile, RingsCostTheFunctionOnly) {
  const std::string what = GetParam();
  const uint64_t before = counter(kPort, "protocol_errors");
  Raw raw;
  ASSERT_TRUE(eventually([&] { return raw.state() == DXPU_PORT_EMPTY; }));
  ASSERT_EQ(raw.plug(), 0);
  ASSERT_TRUE(eventually([&] { return raw.state() == DXPU_PORT_ATTACHED; })) << raw.state();
  dxpu_completion completion = {
      .bytes = 32, .status = 0, .reserved0 = 0, .id = 0x1234567, .length = 0, .reserved1 = {}};
  if (what == "unexpected") {
    const uint64_t unexpected = counter(kPort, "unexpected_completions") + counter(kPort, "late_completions");
    std::memcpy(raw.cq(), &completion, sizeof completion);
    __atomic_store_n(&raw.control().cq_tail, 32, __ATOMIC_RELEASE);
    EXPECT_EQ(raw.complete(), 0) << "dropped and counted";
    EXPECT_EQ(counter(kPort, "unexpected_completions") + counter(kPort, "late_completions"), unexpected + 1);
    EXPECT_EQ(raw.state(), unsigned{DXPU_PORT_ATTACHED});
    return;
  }
  if (what == "request index") {
    __atomic_store_n(&raw.control().sq_head, 0x40000000u, __ATOMIC_RELEASE);
    // The next request finds it: the kernel's own write to configuration space when the function is opened.
    (void)attach::VfioDevice::open(read_file("/sys/class/dxpu/port0/address").substr(0, 12));
  } else {
    if (what == "record of no bytes") completion.bytes = 0;
    if (what == "record past the end") completion.bytes = 4096;
    if (what == "odd record") completion.bytes = 40;
    if (what == "data past the record") completion.length = 4096;
    std::memcpy(raw.cq(), &completion, sizeof completion);
    __atomic_store_n(&raw.control().cq_tail, what == "completion index" ? 0x7fffffe0u : 64u, __ATOMIC_RELEASE);
    EXPECT_EQ(raw.complete(), -EPROTO);
  }
  EXPECT_TRUE(eventually([&] { return raw.state() == DXPU_PORT_EMPTY; })) << raw.state();
  EXPECT_GT(counter(kPort, "protocol_errors"), before);
}

INSTANTIATE_TEST_SUITE_P(All, Hostile,
                         testing::Values("unexpected", "request index", "completion index", "record of no bytes",
                                         "record past the end", "odd record", "data past the record"));

}  // namespace
}  // namespace dxpu::vm
