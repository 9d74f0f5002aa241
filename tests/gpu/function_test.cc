// The function as a PCI device: identity, registers, aperture, MSI-X, resets, scrub.

#include <filesystem>

#include "tests/gpu/gpu_fixture.h"

namespace dxpu::gpu {
namespace {

class GpuFunctionTest : public GpuFixture {};

TEST_F(GpuFunctionTest, SaysWhatItIs) {
  const pcie::ConfigSpace config = gpu->config();
  EXPECT_EQ(config.read(0x00, 4), uint32_t{DXGPU_DEVICE_ID} << 16 | DXGPU_VENDOR_ID);
  EXPECT_EQ(config.read(0x08, 4) >> 8, uint32_t{DXGPU_CLASS_CODE});
  EXPECT_EQ(config.read(0x2c, 4), uint32_t{DXGPU_SUBSYSTEM_SOFT} << 16 | DXGPU_VENDOR_ID);
  EXPECT_EQ(config.bar(0),
            (pcie::BarDescription{.size = DXGPU_REGISTER_BYTES, .is_64bit = false, .prefetchable = false}));
  EXPECT_EQ(config.bar(2), (pcie::BarDescription{.size = kMemory, .is_64bit = true, .prefetchable = true}));
  EXPECT_EQ(config.msix().vectors, DXGPU_VECTORS);
  EXPECT_TRUE(config.find_capability(0x10));           // PCI Express
  EXPECT_TRUE(config.find_capability(0x03));           // VPD
  EXPECT_TRUE(config.find_extended_capability(0x03));  // serial number
  EXPECT_EQ(gpu->identity().model, "dxpu-soft");
  EXPECT_EQ(read(DXGPU_REG_MAGIC), DXGPU_MAGIC);
  EXPECT_EQ(read(DXGPU_REG_VERSION), uint32_t{DXGPU_VERSION});
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_MEMORY_BYTES), kMemory);
  EXPECT_EQ(read(DXGPU_REG_CHANNELS), DXGPU_CHANNELS_MAX);
  EXPECT_EQ(read(DXGPU_REG_ENGINE), DXGPU_ENGINE_COPY);
  EXPECT_EQ(read(DXGPU_REG_OPCODES), 0xfeu);
  EXPECT_EQ(read(DXGPU_REG_STATUS), DXGPU_STATUS_READY);
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SERIAL), 1u);
  char model[DXGPU_MODEL_BYTES] = {};
  gpu->bar_read(0, DXGPU_REG_MODEL, sizeof model, [&](function::Outcome, std::span<const std::byte> data) {
    std::memcpy(model, data.data(), sizeof model);
  });
  EXPECT_STREQ(model, "dxpu-soft");
}

TEST_F(GpuFunctionTest, ResetValuesAreAsTheManualSays) {
  for (uint32_t offset = 0; offset < DXGPU_REGISTER_BYTES; offset += 4) {
    const bool identity = offset < DXGPU_REG_CONTROL || (offset >= DXGPU_REG_MODEL && offset < DXGPU_REG_MODEL + 64) ||
                          offset == DXGPU_REG_STATUS;
    if (identity) continue;
    uint32_t expected = 0;
    if (offset == DXGPU_REG_LAST_FAULT_CHANNEL) expected = DXGPU_NO_CHANNEL;
    const bool table = offset >= DXGPU_MSIX_TABLE && offset < DXGPU_MSIX_TABLE + DXGPU_VECTORS * 16;
    if (table && offset % 16 == 12) expected = 1;
    const bool channel = offset >= DXGPU_CHANNEL_BASE && offset < DXGPU_CHANNEL_BASE + DXGPU_CHANNELS_MAX * DXGPU_PAGE;
    if (channel && offset % DXGPU_PAGE == DXGPU_CH_FAULT_VECTOR) expected = DXGPU_NO_VECTOR;
    ASSERT_EQ(read(offset), expected) << std::hex << offset;
  }
}

TEST_F(GpuFunctionTest, RegistersTakeWholeWordsOnly) {
  write<uint64_t>(DXGPU_REG_SCRATCH, 0x1122334455667788);
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SCRATCH), 0x1122334455667788u);
  EXPECT_EQ(read<uint8_t>(DXGPU_REG_SCRATCH + 7), 0x11);
  EXPECT_EQ(read<uint16_t>(DXGPU_REG_SCRATCH + 3), 0x4455);  // any alignment
  const uint64_t before = counter(DXGPU_COUNTER_DROPPED_WRITES);
  write<uint8_t>(DXGPU_REG_SCRATCH, 0);
  write<uint16_t>(DXGPU_REG_SCRATCH + 2, 0);
  write<uint32_t>(DXGPU_REG_SCRATCH + 1, 0);  // two parts
  write<uint32_t>(DXGPU_REG_MAGIC, 0);
  write<uint32_t>(0x1000, 0);  // nothing there
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SCRATCH), 0x1122334455667788u);
  EXPECT_EQ(counter(DXGPU_COUNTER_DROPPED_WRITES), before + 6);
  // One write may cover several registers.
  const uint32_t words[3] = {1, 2, 3};
  gpu->bar_write(0, DXGPU_REG_SCRATCH - 4, std::as_bytes(std::span(words)));
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SCRATCH), 0x0000000300000002u);
}

TEST_F(GpuFunctionTest, RefusesWhatIsOutside) {
  struct Case {
    unsigned bar;
    uint64_t offset;
    uint32_t length;
  };
  for (const Case c :
       {Case{0, DXGPU_REGISTER_BYTES, 1}, Case{0, DXGPU_REGISTER_BYTES - 2, 4}, Case{1, 0, 4}, Case{7, 0, 4},
        Case{2, kMemory - 1, 2}, Case{2, ~uint64_t{0}, 1}, Case{2, 0, 0}, Case{2, 0, 4097}}) {
    bool answered = false;
    gpu->bar_read(c.bar, c.offset, c.length, [&](function::Outcome outcome, std::span<const std::byte>) {
      answered = true;
      EXPECT_EQ(outcome, function::Outcome::kUnsupportedRequest);
    });
    EXPECT_TRUE(answered);
  }
  const uint64_t before = counter(DXGPU_COUNTER_DROPPED_WRITES);
  write<uint32_t>(kMemory - 2, 1, DXGPU_BAR_MEMORY);
  write<uint32_t>(~uint64_t{0} - 1, 1, DXGPU_BAR_MEMORY);
  write<uint32_t>(0, 1, 3);
  EXPECT_EQ(counter(DXGPU_COUNTER_DROPPED_WRITES), before + 3);
}

TEST_F(GpuFunctionTest, TheApertureIsTheMemory) {
  open_push(0);
  push(0, fill_command(4096, 16, 0x0807060504030201));
  doorbell(0);
  ASSERT_TRUE(finished(0));
  EXPECT_EQ(read<uint64_t>(4097, DXGPU_BAR_MEMORY), 0x0108070605040302u);
  write<uint32_t>(kMemory - 4, 7, DXGPU_BAR_MEMORY);
  EXPECT_EQ(read<uint32_t>(kMemory - 4, DXGPU_BAR_MEMORY), 7u);
}

TEST_F(GpuFunctionTest, NoInterruptWhileMsixOrMasteringIsOff) {
  open_push(0);
  Command interrupt = make_command(DXGPU_OP_FENCE, DXGPU_FENCE_INTERRUPT);
  interrupt.fence.vector = 3;
  msix(0);
  push(0, interrupt);
  doorbell(0);
  ASSERT_TRUE(eventually([&] { return counter(DXGPU_COUNTER_INTERRUPTS_SUPPRESSED) == 1; }));
  msix(0x8000);
  config_write(0x04, 2, 0x2);
  push(0, interrupt);
  doorbell(0);
  ASSERT_TRUE(eventually([&] { return counter(DXGPU_COUNTER_INTERRUPTS_SUPPRESSED) == 2; }));
  config_write(0x04, 2, 0x6);
  EXPECT_EQ(host.count("vector", 3), 0u);
  push(0, interrupt);
  doorbell(0);
  EXPECT_TRUE(eventually([&] { return host.count("vector", 3) == 1; }));
}

TEST_F(GpuFunctionTest, AMaskedFunctionKeepsInterruptsPending) {
  open_push(0);
  msix(0xc000);
  Command interrupt = make_command(DXGPU_OP_FENCE, DXGPU_FENCE_INTERRUPT);
  interrupt.fence.vector = 64;
  push(0, interrupt);
  interrupt.fence.vector = 1;
  push(0, interrupt);
  push(0, interrupt);
  doorbell(0);
  ASSERT_TRUE(
      eventually([&] { return read<uint64_t>(DXGPU_MSIX_PBA) == 2 && read<uint64_t>(DXGPU_MSIX_PBA + 8) == 1; }));
  ASSERT_TRUE(finished(0));
  EXPECT_TRUE(host.events().empty());
  msix(0x8000);
  EXPECT_EQ(host.count("vector", 1), 1u);  // pending is a bit, not a count
  EXPECT_EQ(host.count("vector", 64), 1u);
  EXPECT_EQ(read<uint64_t>(DXGPU_MSIX_PBA), 0u);
}

TEST_F(GpuFunctionTest, TheMsixTableIsMemory) {
  write<uint64_t>(DXGPU_MSIX_TABLE + 16, 0xfee00000);
  write<uint8_t>(DXGPU_MSIX_TABLE + 28, 0);
  EXPECT_EQ(read<uint64_t>(DXGPU_MSIX_TABLE + 16), 0xfee00000u);
  EXPECT_EQ(read(DXGPU_MSIX_TABLE + 28), 0u);
}

TEST_F(GpuFunctionTest, FunctionLevelResetKeepsMemoryOnly) {
  write<uint64_t>(0x100, 0x55, DXGPU_BAR_MEMORY);
  write<uint64_t>(DXGPU_REG_SCRATCH, 1);
  open_ring(5);
  const auto express = gpu->config().find_capability(0x10);
  ASSERT_TRUE(express);
  config_write(*express + 8, 2, 0x8000);
  EXPECT_FALSE(gpu->config().bus_master_enabled());
  EXPECT_FALSE(gpu->config().msix_enabled());
  ASSERT_TRUE(eventually([&] { return read(DXGPU_REG_STATUS) == DXGPU_STATUS_READY; }));
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SCRATCH), 0u);
  EXPECT_EQ(read(control(5, DXGPU_CH_STATE)), DXGPU_STATE_DISABLED);
  EXPECT_EQ(read<uint64_t>(control(5, DXGPU_CH_RING_BASE)), 0u);
  EXPECT_EQ(read<uint64_t>(0x100, DXGPU_BAR_MEMORY), 0x55u);
}

TEST_F(GpuFunctionTest, TheControlRegisterResetsButLeavesConfigurationSpace) {
  write<uint64_t>(DXGPU_REG_SCRATCH, 1);
  open_push(1);
  write<uint32_t>(DXGPU_REG_CONTROL, DXGPU_CONTROL_RESET);
  ASSERT_TRUE(eventually([&] { return read(DXGPU_REG_STATUS) == DXGPU_STATUS_READY; }));
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SCRATCH), 0u);
  EXPECT_EQ(read(control(1, DXGPU_CH_STATE)), DXGPU_STATE_DISABLED);
  EXPECT_TRUE(gpu->config().bus_master_enabled());
}

TEST_F(GpuFunctionTest, ResetInTheMiddleOfACopyEndsWhenItsReadsHave) {
  host.hold();
  open_push(0);
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 1 << 20));
  push(0, fence_command(1, kBase + (2 << 20), 3));
  doorbell(0);
  ASSERT_TRUE(host.wait_held(1 << 20));
  std::atomic<bool> over{false};
  gpu->reset([&](function::Outcome outcome) { over = outcome == function::Outcome::kSuccess; });
  // Registers answer meanwhile, and take nothing.
  EXPECT_EQ(read(DXGPU_REG_STATUS), DXGPU_STATUS_RESETTING);
  write<uint64_t>(DXGPU_REG_SCRATCH, 9);
  EXPECT_FALSE(over);
  host.release();
  EXPECT_TRUE(eventually([&] { return over.load(); }));
  EXPECT_EQ(read<uint64_t>(DXGPU_REG_SCRATCH), 0u);
  EXPECT_TRUE(host.events().empty());  // neither fence nor interrupt
  config_write(0x04, 2, 0x6);
  host.memory[0] = std::byte{0x77};
  open_push(0);  // and it works again
  push(0, copy_command(DXGPU_OP_COPY_IN, 0, kBase, 4096));
  doorbell(0);
  ASSERT_TRUE(finished(0));
  EXPECT_EQ(read<uint8_t>(0, DXGPU_BAR_MEMORY), 0x77);
}

TEST_F(GpuFunctionTest, DisconnectedItFailsItsReads) {
  open_ring(0);
  put(0, make_command(DXGPU_OP_NOP));
  gpu->connect(nullptr);
  doorbell(0);
  ASSERT_TRUE(in_state(0, DXGPU_STATE_ERROR));
  EXPECT_EQ(fault_code(0), DXGPU_FAULT_DMA_READ);
}

TEST_F(GpuFunctionTest, WipedIsProvedNotAssumed) {
  gpu->connect(nullptr);
  ASSERT_TRUE(gpu->scrub().ok());
  EXPECT_TRUE(gpu->self_test_wiped().ok()) << gpu->self_test_wiped();
  write<uint8_t>(kMemory - 1, 1, DXGPU_BAR_MEMORY);
  EXPECT_EQ(gpu->self_test_wiped().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(gpu->scrub().ok());
  EXPECT_TRUE(gpu->self_test_wiped().ok());
  write<uint32_t>(DXGPU_REG_SCRATCH, 1);
  const absl::Status dirty = gpu->self_test_wiped();
  EXPECT_EQ(dirty.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(dirty.message().find("register byte 0x58"), std::string::npos) << dirty;
  ASSERT_TRUE(gpu->scrub().ok());
  config_write(0x04, 2, 0x6);
  EXPECT_NE(gpu->self_test_wiped().message().find("configuration byte 0x4"), std::string::npos);
  ASSERT_TRUE(gpu->scrub().ok());
  EXPECT_TRUE(gpu->self_test_wiped().ok());
}

TEST_F(GpuFunctionTest, AFileIsScrubbedForTheNextProcess) {
  char name[] = "/tmp/dxpu-gpu-test-XXXXXX";
  ASSERT_NE(::mkdtemp(name), nullptr);
  const GpuOptions options{.memory_bytes = kMemory, .vram_file = std::string(name) + "/vram"};
  make(options);
  write<uint64_t>(0x3000, ~uint64_t{0}, DXGPU_BAR_MEMORY);
  gpu->connect(nullptr);
  gpu.reset();  // as a killed worker: no scrub
  auto next = GpuFunction::create(options);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*next)->self_test_wiped().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE((*next)->scrub().ok());
  next->reset();
  next = GpuFunction::create(options);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE((*next)->self_test_wiped().ok());
  next->reset();
  std::filesystem::remove_all(name);
}

TEST(GpuOptionsTest, AreChecked) {
  EXPECT_EQ(GpuFunction::create({.model = ""}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GpuFunction::create({.model = std::string(64, 'x')}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GpuFunction::create({.model = "a\nb"}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GpuFunction::create({.memory_bytes = 3 << 20}).status().code(), absl::StatusCode::kInvalidArgument);
  const auto engine = GpuFunction::create({.engine = "cuda"});
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(engine.status().message().find("\"copy\""), std::string::npos);
  GpuOptions window;
  window.copy.window_bytes = 1;
  EXPECT_EQ(GpuFunction::create(window).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dxpu::gpu
