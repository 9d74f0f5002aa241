#include "tests/vm/module/served.h"

#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace dxpu::vm {

using function::MemoryFunction;
using function::Outcome;

StubbornFunction::StubbornFunction(function::MemoryFunctionOptions options)
    : memory_(*MemoryFunction::create(options)) {}

void StubbornFunction::bar_read(unsigned bar, uint64_t offset, uint32_t length, function::ReadDone done) {
  if (bar != MemoryFunction::kRegisterBar || offset != kStuck)
    return memory_->bar_read(bar, offset, length, std::move(done));
  std::lock_guard lock(mutex_);
  held_.push_back(std::move(done));
  changed_.notify_all();
}

size_t StubbornFunction::held() const {
  std::lock_guard lock(mutex_);
  return held_.size();
}

bool StubbornFunction::wait_held(size_t count, absl::Duration deadline) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoMilliseconds(deadline), [&] { return held_.size() >= count; });
}

size_t StubbornFunction::release() {
  std::vector<function::ReadDone> held;
  {
    std::lock_guard lock(mutex_);
    held.swap(held_);
  }
  const std::byte data[4] = {};
  for (function::ReadDone& done : held) done(Outcome::kSuccess, data);
  return held.size();
}

Served::Served(unsigned number, const attach::KernelOptions& options) {
  auto opened = attach::KernelAttach::open(number, options);
  EXPECT_TRUE(opened.ok()) << opened.status();
  if (opened.ok()) port = *std::move(opened);
}

absl::Status Served::plug() {
  if (port == nullptr) return absl::InternalError("the port could not be claimed");
  if (absl::Status status = port->wait_for(attach::PortState::kEmpty, kPatience); !status.ok()) return status;
  if (absl::Status status = port->plug(function); !status.ok()) return status;
  return port->wait_for(attach::PortState::kAttached, kPatience);
}

std::unique_ptr<attach::VfioDevice> Served::open() {
  auto device = attach::VfioDevice::open(address());
  EXPECT_TRUE(device.ok()) << device.status();
  return device.ok() ? *std::move(device) : nullptr;
}

uint32_t read32(attach::VfioDevice& device, unsigned bar, uint64_t offset) {
  uint32_t value = 0;
  EXPECT_TRUE(device.bar_read(bar, offset, std::as_writable_bytes(std::span(&value, 1))).ok());
  return value;
}

void write32(attach::VfioDevice& device, unsigned bar, uint64_t offset, uint32_t value) {
  EXPECT_TRUE(device.bar_write(bar, offset, std::as_bytes(std::span(&value, 1))).ok());
}

uint16_t config16(attach::VfioDevice& device, uint32_t offset) {
  uint16_t value = 0;
  EXPECT_TRUE(device.config_read(offset, std::as_writable_bytes(std::span(&value, 1))).ok());
  return value;
}

void set_config16(attach::VfioDevice& device, uint32_t offset, uint16_t value) {
  EXPECT_TRUE(device.config_write(offset, std::as_bytes(std::span(&value, 1))).ok());
}

void enable_bus_master(attach::VfioDevice& device, bool on) {
  const uint16_t command = config16(device, 0x04);
  set_config16(device, 0x04, on ? command | 0x4 : command & ~0x4);
}

bool eventually(const std::function<bool()>& condition, absl::Duration deadline) {
  const absl::Time until = absl::Now() + deadline;
  while (!condition()) {
    if (absl::Now() >= until) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

bool signalled(int eventfd, absl::Duration deadline) {
  pollfd poll = {.fd = eventfd, .events = POLLIN, .revents = 0};
  if (::poll(&poll, 1, static_cast<int>(absl::ToInt64Milliseconds(deadline))) != 1) return false;
  uint64_t count = 0;
  return ::read(eventfd, &count, sizeof count) == sizeof count && count > 0;
}

base::UniqueFd make_eventfd() { return base::UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

bool exists(const std::string& path) { return std::filesystem::exists(std::filesystem::symlink_status(path)); }

uint64_t counter(unsigned port, const std::string& name) {
  std::istringstream lines(read_file(absl::StrCat("/sys/class/dxpu/port", port, "/counters")));
  std::string key;
  uint64_t value = 0;
  while (lines >> key >> value) {
    if (key == name) return value;
  }
  ADD_FAILURE() << "no counter " << name;
  return 0;
}

}  // namespace dxpu::vm
