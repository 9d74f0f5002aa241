// Random and mutated TLPs: no crash, and what is accepted means exactly its bytes.
#include <gtest/gtest.h>

#include "proxy/pcie/split.h"
#include "tests/pcie/tlp_samples.h"

namespace dxpu::pcie {
namespace {

constexpr int kRounds = 10000;

// Takes hostile bytes through everything that looks at a TLP. Returns whether they were a legal one.
bool digest(const std::vector<std::byte>& wire) {
  const auto tlp = decode(wire);
  size_t header_bytes = 0;
  const auto header = decode_header(wire, &header_bytes);
  if (!tlp.ok()) return false;
  EXPECT_TRUE(header.ok()) << header.status();
  EXPECT_FALSE(to_string(*tlp).empty());
  const ByteRange range = range_of(*tlp);
  contiguous(*tlp);
  std::vector<std::byte> again;
  const absl::Status status = encode(*tlp, again);
  if (tlp->force_64bit_header) {
    EXPECT_FALSE(status.ok()) << to_string(*tlp);
    return false;
  }
  EXPECT_TRUE(status.ok()) << to_string(*tlp) << ": " << status;
  EXPECT_EQ(again, wire) << to_string(*tlp);
  const std::vector<std::byte> data(range.bytes);
  for (const Tlp& completion : make_completions(*tlp, data, 0x0100, 256, 64)) {
    EXPECT_TRUE(check(completion).ok()) << to_string(*tlp) << " -> " << to_string(completion) << ": "
                                        << check(completion);
  }
  // As a completion of some read: refused or taken, never out of bounds.
  std::vector<std::byte> out(100);
  Reassembly reassembly(make_mem_read(0x1002, 100, 0, 0), out);
  (void)reassembly.add(*tlp, tlp->payload);
  return true;
}

TEST(TlpRandom, LegalOnesRoundTrip) {
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < kRounds; ++i) {
    const Tlp tlp = random_tlp(random);
    std::vector<std::byte> wire;
    const absl::Status status = encode(tlp, wire);
    ASSERT_TRUE(status.ok()) << to_string(tlp) << ": " << status;
    const auto back = decode(wire);
    ASSERT_TRUE(back.ok()) << to_string(tlp) << ": " << back.status();
    ASSERT_EQ(*back, tlp) << to_string(*back) << "\n" << to_string(tlp);
    ASSERT_TRUE(digest(wire));
  }
}

TEST(TlpRandom, RandomBytes) {
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < kRounds; ++i) {
    std::vector<std::byte> wire(random() % 64);
    for (std::byte& b : wire) b = static_cast<std::byte>(random());
    digest(wire);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(TlpRandom, MutatedTlps) {
  std::mt19937_64 random(test_seed());
  int accepted = 0;
  for (int i = 0; i < kRounds; ++i) {
    std::vector<std::byte> wire;
    ASSERT_TRUE(encode(random_tlp(random), wire).ok());
    for (uint64_t changes = 1 + random() % 3; changes > 0 && !wire.empty(); --changes) {
      // Mostly in the header, where it matters.
      const size_t at = random() % (random() % 4 == 0 ? wire.size() : std::min<size_t>(wire.size(), 16));
      switch (random() % 5) {
        case 0:
          wire[at] = static_cast<std::byte>(random());
          break;
        case 1:
        case 2:
          wire[at] ^= static_cast<std::byte>(1u << random() % 8);
          break;
        case 3:
          wire.resize(wire.size() - std::min<size_t>(wire.size(), random() % 9));
          break;
        case 4:
          wire.insert(wire.begin() + at, random() % 9, std::byte{0});
          break;
      }
    }
    accepted += digest(wire) ? 1 : 0;
    ASSERT_FALSE(HasFailure());
  }
  // Both paths must have been walked.
  EXPECT_GT(accepted, kRounds / 100);
  EXPECT_LT(accepted, kRounds * 9 / 10);
}

}  // namespace
}  // namespace dxpu::pcie
