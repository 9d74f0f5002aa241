#include "proxy/attach/direct/direct_attach.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "proxy/base/unique_fd.h"
#include "proxy/function/blocking_reads.h"
#include "proxy/function/memory_function.h"

namespace dxpu::attach {
namespace {

using function::MemoryFunction;
using function::Outcome;

base::UniqueFd make_eventfd() { return base::UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)); }
uint64_t drain(const base::UniqueFd& fd) {
  uint64_t count = 0;
  return ::read(fd.get(), &count, sizeof count) == sizeof count ? count : 0;
}

// Answers nothing until told; counts what it is asked.
class Silent : public function::Function {
 public:
  explicit Silent(MemoryFunction& inner) : inner_(inner) {}
  function::Identity identity() const override { return inner_.identity(); }
  pcie::ConfigSpace config() const override { return inner_.config(); }
  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override {
    inner_.config_write(offset, size, value, std::move(done));
  }
  void config_read(uint32_t offset, unsigned size, function::ReadDone done) override {
    inner_.config_read(offset, size, std::move(done));
  }
  void bar_read(unsigned, uint64_t, uint32_t, function::ReadDone done) override {
    std::lock_guard lock(mutex);
    held.push_back(std::move(done));
    changed.notify_all();
  }
  void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override {
    inner_.bar_write(bar, offset, data);
  }
  void connect(function::Upstream* upstream) override { inner_.connect(upstream); }
  void reset(function::Done done) override { inner_.reset(std::move(done)); }
  absl::Status scrub() override { return inner_.scrub(); }

  bool wait_held() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(10), [&] { return !held.empty(); });
  }
  void answer_all(Outcome outcome) {
    std::vector<function::ReadDone> dones;
    {
      std::lock_guard lock(mutex);
      dones.swap(held);
    }
    const std::vector<std::byte> data(4096, std::byte{0x33});
    for (function::ReadDone& done : dones) {
      done(outcome, outcome == Outcome::kSuccess ? std::span<const std::byte>(data) : std::span<const std::byte>());
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<function::ReadDone> held;

 private:
  MemoryFunction& inner_;
};

class Blocking : public Silent, public function::BlockingReads {
 public:
  using Silent::Silent;
  Outcome bar_read_wait(unsigned, uint64_t, std::span<std::byte> out) override {
    ++waits;
    std::fill(out.begin(), out.end(), result == Outcome::kSuccess ? std::byte{0x44} : std::byte{0xff});
    return result;
  }
  int waits = 0;
  Outcome result = Outcome::kSuccess;
};

class DirectAttachTest : public testing::Test {
 protected:
  void SetUp() override {
    function = *MemoryFunction::create({});
    port.set_status_callback([this] { ++changes; });
  }
  void plug_and_open() {
    ASSERT_TRUE(port.plug(*function).ok());
    auto opened = port.open();
    ASSERT_TRUE(opened.ok()) << opened.status();
    device = *std::move(opened);
  }
  template <typename T = uint32_t>
  T read(uint64_t offset, unsigned bar = 0) {
    T value{};
    EXPECT_TRUE(device->bar_read(bar, offset, std::as_writable_bytes(std::span(&value, 1))).ok());
    return value;
  }
  template <typename T = uint32_t>
  void write(uint64_t offset, T value, unsigned bar = 0) {
    EXPECT_TRUE(device->bar_write(bar, offset, std::as_bytes(std::span(&value, 1))).ok());
  }
  uint16_t command() {
    uint16_t value = 0;
    EXPECT_TRUE(device->config_read(4, std::as_writable_bytes(std::span(&value, 1))).ok());
    return value;
  }

  std::unique_ptr<MemoryFunction> function;
  std::atomic<int> changes{0};
  DirectAttach port{{.read_deadline = absl::Milliseconds(100)}};
  std::unique_ptr<DirectDevice> device;
};

TEST_F(DirectAttachTest, OnePlugOneHolder) {
  EXPECT_EQ(port.open().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(port.status().state, PortState::kEmpty);
  plug_and_open();
  EXPECT_EQ(port.status().state, PortState::kAttached);
  EXPECT_NE(port.status().holder.find(std::to_string(::getpid())), std::string::npos);
  const auto second = port.open("pid 1 (other)");
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(std::to_string(::getpid())), std::string::npos);
  auto other = *MemoryFunction::create({});
  EXPECT_EQ(port.plug(*other).code(), absl::StatusCode::kFailedPrecondition);
  device.reset();
  EXPECT_EQ(port.status().holder, "");
  auto again = port.open("pid 7 (me)");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(port.status().holder, "pid 7 (me)");
  EXPECT_GE(changes, 4);
}

TEST_F(DirectAttachTest, OpenAndCloseResetTheFunction) {
  plug_and_open();
  EXPECT_EQ(command() & 0x6, 0x6);
  write<uint32_t>(MemoryFunction::kScratch, 5);
  device.reset();
  EXPECT_FALSE(function->config().bus_master_enabled());
  auto opened = port.open();
  ASSERT_TRUE(opened.ok());
  device = *std::move(opened);
  EXPECT_EQ(read(MemoryFunction::kScratch), 0u);
}

TEST_F(DirectAttachTest, ArgumentsAreChecked) {
  plug_and_open();
  std::byte bytes[8];
  EXPECT_EQ(*device->bar_size(0), 4096u);
  EXPECT_EQ(*device->bar_size(1), 0u);
  EXPECT_EQ(device->bar_size(6).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->bar_read(1, 0, bytes).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->bar_read(0, 4092, bytes).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device->bar_read(0, ~uint64_t{0}, bytes).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device->bar_write(9, 0, bytes).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->bar_write(0, 4096, bytes).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device->config_read(4090, bytes).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device->config_write(4096, bytes).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device->set_msix_eventfd(4, -1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->map_dma(1, bytes, 4096, true, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->unmap_dma(0, 4096).code(), absl::StatusCode::kNotFound);
}

TEST_F(DirectAttachTest, ConfigurationOfAnyLengthAndAlignment) {
  plug_and_open();
  std::vector<std::byte> whole(4096), piece(7);
  ASSERT_TRUE(device->config_read(0, whole).ok());
  ASSERT_TRUE(device->config_read(1, piece).ok());
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), whole.begin() + 1));
  uint16_t vendor;
  std::memcpy(&vendor, whole.data(), 2);
  EXPECT_EQ(vendor, 0xd80b);
}

TEST_F(DirectAttachTest, LongReadsOfTheRam) {
  plug_and_open();
  std::vector<std::byte> data(60000), back(60000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7);
  ASSERT_TRUE(device->bar_write(2, 333, data).ok());
  ASSERT_TRUE(device->bar_read(2, 333, back).ok());
  EXPECT_EQ(data, back);
}

TEST_F(DirectAttachTest, DmaReachesMappingsOnlyAndInterruptsFollow) {
  plug_and_open();
  alignas(4096) static std::byte page[4096];
  std::memset(page, 0x5a, sizeof page);
  ASSERT_TRUE(device->map_dma(0x10000, page, sizeof page, true, false).ok());
  base::UniqueFd fd = make_eventfd();
  ASSERT_TRUE(device->set_msix_eventfd(1, fd.get()).ok());
  EXPECT_TRUE(function->config().msix_enabled());
  write<uint32_t>(MemoryFunction::kDmaVector, 1);
  write<uint64_t>(MemoryFunction::kDmaAddress, 0x10000);
  write<uint32_t>(MemoryFunction::kDmaBytes, 4096);
  write<uint32_t>(MemoryFunction::kDmaCommand, MemoryFunction::kToRam | MemoryFunction::kThenRaise);
  EXPECT_EQ(read(MemoryFunction::kDmaStatus), MemoryFunction::kDone);
  EXPECT_EQ(drain(fd), 1u);
  EXPECT_EQ(read<uint8_t>(4095, 2), 0x5a);
  // Mapped for reading only.
  write<uint8_t>(0, 1, 2);
  write<uint32_t>(MemoryFunction::kDmaCommand, MemoryFunction::kToHost);
  EXPECT_EQ(page[0], std::byte{0x5a});
  EXPECT_EQ(port.stats().dma_refused, 1u);
  ASSERT_TRUE(device->unmap_dma(0x10000, 4096).ok());
  write<uint32_t>(MemoryFunction::kDmaCommand, MemoryFunction::kToRam);
  EXPECT_EQ(read(MemoryFunction::kDmaStatus), MemoryFunction::kFailed | 1);
  ASSERT_TRUE(device->set_msix_eventfd(1, -1).ok());
  EXPECT_FALSE(function->config().msix_enabled());
}

TEST_F(DirectAttachTest, AtomicsOnMappedMemory) {
  plug_and_open();
  alignas(4096) static uint64_t page[512];
  page[1] = 40;
  ASSERT_TRUE(device->map_dma(0x10000, page, sizeof page, true, true).ok());
  write<uint64_t>(MemoryFunction::kDmaAddress, 0x10008);
  write<uint64_t>(MemoryFunction::kFetchAdd, 2);
  EXPECT_EQ(read<uint64_t>(MemoryFunction::kFetchAddOld), 40u);
  EXPECT_EQ(page[1], 42u);
  uint64_t old = 0;
  auto take = [&](Outcome outcome, std::span<const std::byte> data) {
    EXPECT_EQ(outcome, Outcome::kSuccess);
    old = 0;
    std::memcpy(&old, data.data(), data.size());
  };
  port.dma_atomic(function::AtomicOp::kCompareSwap, 0x10008, 8, 7, 42, take);
  EXPECT_EQ(old, 42u);
  port.dma_atomic(function::AtomicOp::kCompareSwap, 0x10008, 4, 9, 1, take);
  EXPECT_EQ(old, 7u);
  EXPECT_EQ(page[1], 7u);
  port.dma_atomic(function::AtomicOp::kSwap, 0x10008, 4, 5, 0, take);
  EXPECT_EQ(page[1], 5u);
  auto refused = [](Outcome outcome, std::span<const std::byte>) { EXPECT_EQ(outcome, Outcome::kUnsupportedRequest); };
  port.dma_atomic(function::AtomicOp::kSwap, 0x10004, 8, 5, 0, refused);   // misaligned
  port.dma_atomic(function::AtomicOp::kSwap, 0x10008, 16, 5, 0, refused);  // too wide
  port.dma_atomic(function::AtomicOp::kSwap, 0x20000, 8, 5, 0, refused);   // unmapped
}

TEST_F(DirectAttachTest, AnInterruptWithoutAnEventfdIsPending) {
  plug_and_open();
  base::UniqueFd one = make_eventfd(), two = make_eventfd();
  ASSERT_TRUE(device->set_msix_eventfd(0, one.get()).ok());  // turns MSI-X on
  write<uint32_t>(MemoryFunction::kDmaVector, 2);
  write<uint32_t>(MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  write<uint32_t>(MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_EQ(port.stats().interrupts_pending, 2u);
  ASSERT_TRUE(device->set_msix_eventfd(2, two.get()).ok());
  EXPECT_EQ(drain(two), 1u);
  ASSERT_TRUE(device->set_msix_eventfd(2, -1).ok());
  ASSERT_TRUE(device->set_msix_eventfd(2, two.get()).ok());
  EXPECT_EQ(drain(two), 0u);
  EXPECT_EQ(drain(one), 0u);
}

TEST_F(DirectAttachTest, ResetKeepsInterruptsAndCommand) {
  plug_and_open();
  base::UniqueFd fd = make_eventfd();
  ASSERT_TRUE(device->set_msix_eventfd(0, fd.get()).ok());
  write<uint32_t>(MemoryFunction::kScratch, 5);
  ASSERT_TRUE(device->reset().ok());
  EXPECT_EQ(read(MemoryFunction::kScratch), 0u);
  EXPECT_EQ(command() & 0x6, 0x6);
  write<uint32_t>(MemoryFunction::kDmaCommand, MemoryFunction::kRaise);
  EXPECT_EQ(drain(fd), 1u);
}

TEST_F(DirectAttachTest, AfterUnplugAllOnesAndTheHolderIsTold) {
  plug_and_open();
  alignas(4096) static std::byte page[4096];
  base::UniqueFd removal = make_eventfd();
  ASSERT_TRUE(device->set_removal_eventfd(removal.get()).ok());
  ASSERT_TRUE(device->map_dma(0x10000, page, sizeof page, true, true).ok());
  ASSERT_TRUE(port.unplug("test").ok());
  function.reset();  // not used any more
  EXPECT_EQ(drain(removal), 1u);
  EXPECT_EQ(port.status().state, PortState::kGone);
  EXPECT_NE(port.status().holder, "");
  EXPECT_EQ(read(0), 0xffffffffu);
  EXPECT_EQ(command(), 0xffff);
  write<uint32_t>(MemoryFunction::kScratch, 1);
  EXPECT_EQ(device->map_dma(0x20000, page, sizeof page, true, true).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(device->unmap_dma(0x10000, 4096).ok());
  EXPECT_TRUE(device->reset().ok());
  ASSERT_TRUE(port.unplug("again").ok());
  auto next = *MemoryFunction::create({});
  EXPECT_EQ(port.plug(*next).code(), absl::StatusCode::kFailedPrecondition);
  device.reset();
  EXPECT_EQ(port.status().state, PortState::kEmpty);
  EXPECT_TRUE(port.plug(*next).ok());
  ASSERT_TRUE(port.unplug("test").ok());
  EXPECT_EQ(port.status().state, PortState::kEmpty);  // nobody had it open
}

TEST_F(DirectAttachTest, RequestReleaseTellsAlsoWhoListensLater) {
  plug_and_open();
  ASSERT_TRUE(port.request_release().ok());
  base::UniqueFd removal = make_eventfd();
  ASSERT_TRUE(device->set_removal_eventfd(removal.get()).ok());
  EXPECT_EQ(drain(removal), 1u);
  EXPECT_EQ(read(0), MemoryFunction::kMagic);  // it still works
  ASSERT_TRUE(device->set_removal_eventfd(-1).ok());
}

TEST_F(DirectAttachTest, AReadWithoutAnAnswerEndsByItsDeadline) {
  Silent silent(*function);
  ASSERT_TRUE(port.plug(silent).ok());
  auto opened = port.open();
  ASSERT_TRUE(opened.ok());
  device = *std::move(opened);
  EXPECT_EQ(read(0), 0xffffffffu);
  EXPECT_EQ(port.stats().read_timeouts, 1u);
  silent.answer_all(Outcome::kSuccess);  // too late: must not touch what the reader has left behind
  device.reset();
  ASSERT_TRUE(port.unplug("test").ok());
}

TEST(DirectAttach, AReadGetsItsAnswerFromAnotherThread) {
  auto memory = *MemoryFunction::create({});
  Silent silent(*memory);
  DirectAttach port({.read_deadline = absl::Seconds(60)});
  ASSERT_TRUE(port.plug(silent).ok());
  auto device = port.open();
  ASSERT_TRUE(device.ok());
  for (const Outcome outcome : {Outcome::kSuccess, Outcome::kUnsupportedRequest}) {
    std::thread answerer([&] {
      EXPECT_TRUE(silent.wait_held());
      silent.answer_all(outcome);
    });
    uint32_t value = 0;
    EXPECT_TRUE((*device)->bar_read(0, 0, std::as_writable_bytes(std::span(&value, 1))).ok());
    EXPECT_EQ(value, outcome == Outcome::kSuccess ? 0x33333333u : 0xffffffffu);
    answerer.join();
  }
  EXPECT_EQ(port.stats().read_errors, 1u);
  EXPECT_EQ(port.stats().read_timeouts, 0u);
  device->reset();
  ASSERT_TRUE(port.unplug("test").ok());
}

TEST(DirectAttach, UnplugEndsReadersAtOnce) {
  auto memory = *MemoryFunction::create({});
  Silent silent(*memory);
  DirectAttach port({.read_deadline = absl::Minutes(10)});
  ASSERT_TRUE(port.plug(silent).ok());
  auto device = port.open();
  ASSERT_TRUE(device.ok());
  uint32_t value = 0;
  std::thread reader(
      [&] { EXPECT_TRUE((*device)->bar_read(0, 0, std::as_writable_bytes(std::span(&value, 1))).ok()); });
  ASSERT_TRUE(silent.wait_held());
  ASSERT_TRUE(port.unplug("test").ok());
  reader.join();
  EXPECT_EQ(value, 0xffffffffu);
  silent.answer_all(Outcome::kSuccess);
}

TEST(DirectAttach, ServesReadsThroughTheFunctionWhereItCan) {
  auto memory = *MemoryFunction::create({});
  Blocking blocking(*memory);
  DirectAttach port;
  ASSERT_TRUE(port.plug(blocking).ok());
  auto device = port.open();
  ASSERT_TRUE(device.ok());
  uint32_t value = 0;
  ASSERT_TRUE((*device)->bar_read(0, 0, std::as_writable_bytes(std::span(&value, 1))).ok());
  EXPECT_EQ(value, 0x44444444u);
  EXPECT_EQ(blocking.waits, 1);
  blocking.result = Outcome::kTimeout;
  ASSERT_TRUE((*device)->bar_read(0, 0, std::as_writable_bytes(std::span(&value, 1))).ok());
  EXPECT_EQ(value, 0xffffffffu);
  EXPECT_EQ(port.stats().read_timeouts, 1u);
  device->reset();
  ASSERT_TRUE(port.unplug("test").ok());
}

TEST(DirectAttach, ADeviceOutlivesItsPort) {
  auto memory = *MemoryFunction::create({});
  std::unique_ptr<DirectDevice> device;
  {
    DirectAttach port;
    ASSERT_TRUE(port.plug(*memory).ok());
    device = *port.open();
  }
  uint32_t value = 0;
  EXPECT_TRUE(device->bar_read(0, 0, std::as_writable_bytes(std::span(&value, 1))).ok());
  EXPECT_EQ(value, 0xffffffffu);
}

TEST(PortState, HasNames) {
  EXPECT_STREQ(name_of(PortState::kGone), "gone");
  EXPECT_STREQ(name_of(static_cast<PortState>(99)), "unknown");
}

}  // namespace
}  // namespace dxpu::attach
