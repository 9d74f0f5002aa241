// The data path encodes and decodes headers per TLP: it must not allocate for that.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/pcie/tlp_samples.h"

namespace {
std::atomic<int> allocations{0};
}

// Not inlined: GCC would see free() meet new and warn of a mismatch that is none.
[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace dxpu::pcie {
namespace {

TEST(TlpAllocation, HeadersOfEveryTypeAllocateNothing) {
  for (const Golden& g : goldens()) {
    std::array<std::byte, kMaxHeaderBytes> out{};
    size_t header_bytes = 0;
    const int before = allocations;
    const bool encoded = encode_header(g.tlp, out).ok();
    const bool decoded = decode_header(g.wire, &header_bytes).ok();
    const int used = allocations - before;
    EXPECT_TRUE(encoded && decoded) << g.name;
    EXPECT_EQ(used, 0) << g.name;
  }
}

TEST(TlpAllocation, AWriteAllocatesItsPayloadOnce) {
  const std::vector<std::byte> data = counting_bytes(4096);
  const int before = allocations;
  const Tlp tlp = make_mem_write(0x100001000, data, 0);
  EXPECT_EQ(allocations - before, 1);
  std::vector<std::byte> out;
  out.reserve(kMaxTlpBytes);
  const int before_encode = allocations;
  const bool encoded = encode(tlp, out).ok();
  EXPECT_EQ(allocations - before_encode, 0);
  EXPECT_TRUE(encoded);
  EXPECT_EQ(out.size(), kMaxTlpBytes);
}

}  // namespace
}  // namespace dxpu::pcie
