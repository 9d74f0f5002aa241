// A function that needs no GPU: RAM, registers whose reads have side effects, one DMA command. For tests of whatever
// carries functions (fabric, attach points, kernel module).
//
// BAR0 (4 KiB, 32-bit): registers, little-endian, 32-bit aligned accesses of any multiple of 4 bytes.
//   0x000 MAGIC   RO  0x4d585044 ("DPXM")
//   0x004 COUNTER RO  the number of times this register was read before; the read itself counts
//   0x008 WRITES  RO  BAR writes seen so far, this BAR and the RAM together
//   0x010…0x02f SCRATCH0…7 RW
//   0x040 DMA_ADDRESS RW 64 bits: host address
//   0x048 DMA_OFFSET  RW offset in the RAM
//   0x04c DMA_BYTES   RW
//   0x050 DMA_COMMAND WO 1: host to RAM, 2: RAM to host, 3: raise the vector only. Bit 8: raise DMA_VECTOR afterwards.
//                        Ignored while DMA_STATUS is 1.
//   0x054 DMA_STATUS  RO 0 idle, 1 busy, 2 done, 0x100 | outcome: failed
//   0x058 DMA_VECTOR  RW
//   0x060 FETCH_ADD   WO 64 bits: adds the value to the 8 bytes at DMA_ADDRESS; the old value appears in 0x068 (RO)
//   0x800 MSI-X table, 0xc00 PBA
// BAR2 (64-bit prefetchable): the RAM.
//
// Bus master off: DMA fails as UR without being tried. MSI-X off: nothing is raised. reset() keeps the RAM, scrub()
// wipes it. Thread-safe.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "proxy/function/function.h"
#include "proxy/function/upstream_slot.h"

namespace dxpu::function {

struct MemoryFunctionOptions {
  uint64_t ram_bytes = 64 * 1024;  // power of two
  uint16_t vectors = 4;            // 1 … 64
  uint64_t serial_number = 1;
};

class MemoryFunction : public Function {
 public:
  static constexpr uint32_t kMagic = 0x4d585044;
  static constexpr uint64_t kMagicOffset = 0x000, kCounter = 0x004, kWrites = 0x008, kScratch = 0x010,
                            kDmaAddress = 0x040, kDmaOffset = 0x048, kDmaBytes = 0x04c, kDmaCommand = 0x050,
                            kDmaStatus = 0x054, kDmaVector = 0x058, kFetchAdd = 0x060, kFetchAddOld = 0x068,
                            kMsixTable = 0x800, kMsixPba = 0xc00;
  static constexpr uint64_t kRegisterBytes = 4096;
  static constexpr uint32_t kToRam = 1, kToHost = 2, kRaise = 3, kThenRaise = 0x100;
  static constexpr uint32_t kIdle = 0, kBusy = 1, kDone = 2, kFailed = 0x100;
  static constexpr unsigned kRegisterBar = 0, kRamBar = 2;

  static absl::StatusOr<std::unique_ptr<MemoryFunction>> create(const MemoryFunctionOptions& options);

  Identity identity() const override;
  pcie::ConfigSpace config() const override;
  void config_write(uint32_t offset, unsigned size, uint32_t value, function::Done done) override;
  void config_read(uint32_t offset, unsigned size, ReadDone done) override;
  void bar_read(unsigned bar, uint64_t offset, uint32_t length, ReadDone done) override;
  void bar_write(unsigned bar, uint64_t offset, std::span<const std::byte> data) override;
  void connect(Upstream* upstream) override;
  void reset(function::Done done) override;
  absl::Status scrub() override;

  // BAR writes outside a BAR.
  uint64_t dropped_writes() const;

 private:
  // What a DMA in flight may touch; it can outlive this object.
  struct State;
  struct Registers {
    uint32_t counter = 0, writes = 0;
    std::array<uint32_t, 8> scratch{};
    uint64_t dma_address = 0;
    uint32_t dma_offset = 0, dma_bytes = 0, dma_status = kIdle, dma_vector = 0;
    uint64_t fetch_add_old = 0;
    uint32_t fetch_add_low = 0;
    std::vector<std::byte> msix;  // table and PBA, from kMsixTable on
  };

  MemoryFunction(const MemoryFunctionOptions& options, pcie::ConfigSpace config);
  uint32_t read_register(uint64_t offset);
  // A command to run once the lock is gone, 0 when none.
  uint32_t write_register(uint64_t offset, uint32_t value);
  void run_dma(uint32_t command);
  void run_fetch_add(uint64_t operand);

  const MemoryFunctionOptions options_;
  std::shared_ptr<State> state_;
};

}  // namespace dxpu::function
