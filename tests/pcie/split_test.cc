// Sweeps of length x offset over the splitters, against what the specification says about each piece.
#include "proxy/pcie/split.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/pcie/tlp_samples.h"

namespace dxpu::pcie {
namespace {

// Around the start of a page, the boundaries of 64 … 512 in it, and its end.
std::vector<uint64_t> sweep_offsets() {
  std::vector<uint64_t> offsets;
  for (uint64_t edge : {0, 64, 128, 256, 512, 2048, 4096}) {
    for (int near = -5; near <= 5; ++near) {
      const int64_t at = static_cast<int64_t>(edge) + near;
      if (at >= 0 && at < 4096) offsets.push_back(static_cast<uint64_t>(at));
    }
  }
  return offsets;
}

std::vector<uint32_t> sweep_lengths() {
  std::vector<uint32_t> lengths(12);
  std::iota(lengths.begin(), lengths.end(), 1);
  for (uint32_t edge : {64, 128, 192, 256, 512, 1024, 4096, 8192}) {
    for (uint32_t near = edge - 5; near <= edge + 5; ++near) lengths.push_back(near);
  }
  return lengths;
}

struct Piece {
  uint64_t address;
  uint32_t bytes;
  bool operator==(const Piece&) const = default;
};

std::vector<Piece> pieces_of(uint64_t address, uint64_t bytes, uint32_t limit) {
  std::vector<Piece> pieces;
  split_request(address, bytes, limit, [&](uint64_t at, uint32_t n) { pieces.push_back({at, n}); });
  return pieces;
}

TEST(SplitRequest, SweepOfLengthOffsetAndLimit) {
  constexpr uint64_t kPage = 0x123456000;
  for (const uint32_t limit : {128u, 256u, 512u, 1024u, 2048u, 4096u}) {
    for (const uint64_t offset : sweep_offsets()) {
      for (const uint32_t bytes : sweep_lengths()) {
        const uint64_t start = kPage + offset;
        uint64_t next = start;
        const auto pieces = pieces_of(start, bytes, limit);
        for (const Piece& piece : pieces) {
          ASSERT_EQ(piece.address, next);
          ASSERT_GT(piece.bytes, 0u);
          // Inside one block of `limit`: then also inside one page, and no longer than the limit.
          ASSERT_EQ(piece.address / limit, (piece.address + piece.bytes - 1) / limit)
              << "limit " << limit << " offset " << offset << " bytes " << bytes;
          ASSERT_TRUE(check(make_mem_read(piece.address, piece.bytes, 0, 0)).ok());
          next += piece.bytes;
        }
        ASSERT_EQ(next, start + bytes);
        // As few as possible: one for each block touched.
        ASSERT_EQ(pieces.size(), (start + bytes - 1) / limit - start / limit + 1);
      }
    }
  }
}

TEST(SplitRequest, Edges) {
  EXPECT_TRUE(pieces_of(0x1000, 0, 128).empty());
  EXPECT_EQ(pieces_of(0xffe, 4, 4096), (std::vector<Piece>{{0xffe, 2}, {0x1000, 2}}));
  // The last bytes of the address space; what would be behind them is left out.
  EXPECT_EQ(pieces_of(UINT64_MAX - 1, 2, 128), (std::vector<Piece>{{UINT64_MAX - 1, 2}}));
  EXPECT_EQ(pieces_of(UINT64_MAX - 1, 100, 128), (std::vector<Piece>{{UINT64_MAX - 1, 2}}));
  EXPECT_EQ(pieces_of(UINT64_MAX, UINT64_MAX, 128), (std::vector<Piece>{{UINT64_MAX, 1}}));
  // Limits nobody should give still end and stay within a page.
  EXPECT_EQ(pieces_of(0xfff, 2, 0), (std::vector<Piece>{{0xfff, 1}, {0x1000, 1}}));
  EXPECT_EQ(pieces_of(0xfff, 2, UINT32_MAX), (std::vector<Piece>{{0xfff, 1}, {0x1000, 1}}));
  EXPECT_EQ(pieces_of(0x1000, 3, 1).size(), 3u);
}

TEST(SplitCompletion, SweepOfLengthOffsetMpsAndRcb) {
  const std::vector<std::byte> memory = counting_bytes(4096, 3);
  for (const uint32_t rcb : {64u, 128u}) {
    for (const uint32_t mps : {128u, 256u, 512u, 4096u}) {
      for (const uint64_t offset : sweep_offsets()) {
        for (const uint32_t bytes : sweep_lengths()) {
          if (offset + bytes > 4096) continue;
          SCOPED_TRACE("rcb " + std::to_string(rcb) + " mps " + std::to_string(mps) + " offset " +
                       std::to_string(offset) + " bytes " + std::to_string(bytes));
          Tlp request = make_mem_read(0x8000 + offset, bytes, 0x155, 0x0108);
          request.traffic_class = 2;
          request.attributes = 5;
          const auto data = std::span(memory).subspan(offset, bytes);
          const std::vector<Tlp> completions = make_completions(request, data, 0x0200, mps, rcb);
          uint32_t done = 0;
          for (const Tlp& c : completions) {
            ASSERT_TRUE(check(c).ok()) << check(c) << to_string(c);
            ASSERT_EQ(c.type, TlpType::kCompletionData);
            ASSERT_EQ(c.requester, 0x0108);
            ASSERT_EQ(c.completer, 0x0200);
            ASSERT_EQ(c.tag, 0x155);
            ASSERT_EQ(c.traffic_class, 2);
            ASSERT_EQ(c.attributes, 5);
            ASSERT_EQ(c.byte_count, bytes - done);
            ASSERT_EQ(c.lower_address, (offset + done) % 128);
            ASSERT_LE(c.payload.size(), mps);
            const uint32_t lead = (offset + done) % 4;
            const uint32_t here = std::min<uint32_t>(bytes - done, static_cast<uint32_t>(c.payload.size()) - lead);
            ASSERT_TRUE(std::equal(data.begin() + done, data.begin() + done + here, c.payload.begin() + lead));
            done += here;
            if (done < bytes) {
              ASSERT_EQ((offset + done) % rcb, 0u);
            }
          }
          ASSERT_EQ(done, bytes);
          // No more pieces than blocks of MPS, plus one where the start is not on the boundary.
          ASSERT_LE(completions.size(), (bytes + mps - 1) / mps + 1);

          std::vector<std::byte> out(bytes);
          Reassembly reassembly(request, out);
          for (size_t i = 0; i < completions.size(); ++i) {
            const auto over = reassembly.add(completions[i], completions[i].payload);
            ASSERT_TRUE(over.ok()) << over.status();
            ASSERT_EQ(*over, i + 1 == completions.size());
          }
          ASSERT_EQ(reassembly.received(), bytes);
          ASSERT_TRUE(std::equal(out.begin(), out.end(), data.begin()));
        }
      }
    }
  }
}

TEST(SplitCompletion, GatherFormAgreesWithTheCopyingOne) {
  const std::vector<std::byte> memory = counting_bytes(4096, 9);
  for (const uint64_t offset : {0u, 1u, 62u, 4092u}) {
    for (const uint32_t bytes : {1u, 4u, 130u, 4096u}) {
      if (offset + bytes > 4096) continue;
      const Tlp request = make_mem_read(0x8000 + offset, bytes, 1, 0x0108);
      const std::vector<Tlp> copied = make_completions(request, std::span(memory).first(bytes), 0x0200, 256, 64);
      size_t i = 0;
      split_completions(request, 0x0200, 256, 64, [&](const CompletionPiece& piece) {
        ASSERT_LT(i, copied.size());
        Tlp tlp = piece.header;
        tlp.payload.resize(tlp.length_dw * 4u);
        std::copy_n(memory.begin() + piece.data_offset, piece.data_bytes, tlp.payload.begin() + piece.lead);
        EXPECT_EQ(tlp, copied[i++]);
      });
      EXPECT_EQ(i, copied.size());
    }
  }
}

// Known answers, counted by hand.
TEST(SplitCompletion, KnownPieces) {
  const Tlp request = make_mem_read(0x1042, 300, 7, 0);
  const std::vector<std::byte> data = counting_bytes(300);
  const auto shape = [](const std::vector<Tlp>& completions) {
    std::vector<std::vector<int>> rows;
    for (const Tlp& c : completions) rows.push_back({c.length_dw, c.byte_count, c.lower_address});
    return rows;
  };
  EXPECT_EQ(shape(make_completions(request, data, 0, 128, 64)),
            (std::vector<std::vector<int>>{{32, 300, 0x42}, {32, 174, 0x40}, {12, 46, 0x40}}));
  EXPECT_EQ(shape(make_completions(request, data, 0, 256, 128)),
            (std::vector<std::vector<int>>{{48, 300, 0x42}, {28, 110, 0x00}}));
  EXPECT_EQ(shape(make_completions(make_mem_read(0x2000, 4096, 7, 0), counting_bytes(4096), 0, 4096, 64)),
            (std::vector<std::vector<int>>{{1024, 4096, 0}}));
}

TEST(SplitCompletion, ZeroLengthReadGivesOneDwOfByteCountOne) {
  const Tlp request = make_mem_read(0x1046, 0, 7, 0x0108);
  const std::vector<Tlp> completions = make_completions(request, {}, 0x0200, 128, 64);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].type, TlpType::kCompletionData);
  EXPECT_EQ(completions[0].length_dw, 1);
  EXPECT_EQ(completions[0].byte_count, 1);
  EXPECT_EQ(completions[0].lower_address, 0x44);
  EXPECT_TRUE(check(completions[0]).ok()) << check(completions[0]);
}

TEST(SplitCompletion, OtherNonPostedRequests) {
  for (const Golden& g : goldens()) {
    SCOPED_TRACE(g.name);
    const std::vector<std::byte> data = counting_bytes(range_of(g.tlp).bytes, 5);
    const auto completions = make_completions(g.tlp, data, 0x0200, 4096, 64);
    if (class_of(g.tlp.type) != TlpClass::kNonPosted) {
      EXPECT_TRUE(completions.empty());
      continue;
    }
    ASSERT_FALSE(completions.empty());
    for (const Tlp& c : completions) EXPECT_TRUE(check(c).ok()) << to_string(c) << check(c);
    const Tlp& c = completions.front();
    switch (g.tlp.type) {
      case TlpType::kIoWrite:
      case TlpType::kCfgWrite0:
      case TlpType::kCfgWrite1:
        EXPECT_EQ(c.type, TlpType::kCompletion);
        EXPECT_EQ(c.byte_count, 4);
        EXPECT_EQ(c.lower_address, 0);
        break;
      case TlpType::kIoRead:
      case TlpType::kCfgRead0:
      case TlpType::kCfgRead1:
        EXPECT_EQ(c.length_dw, 1);
        EXPECT_EQ(c.byte_count, 4);
        EXPECT_EQ(c.lower_address, 0);
        EXPECT_TRUE(std::equal(data.begin(), data.end(), c.payload.begin() + range_of(g.tlp).address % 4));
        break;
      case TlpType::kFetchAdd:
      case TlpType::kSwap:
      case TlpType::kCompareSwap:
        EXPECT_EQ(c.byte_count, data.size());
        EXPECT_EQ(c.lower_address, 0);
        EXPECT_EQ(c.payload, data);
        break;
      default:
        break;
    }
    std::vector<std::byte> out(data.size());
    Reassembly reassembly(g.tlp, out);
    for (size_t i = 0; i < completions.size(); ++i) {
      const auto over = reassembly.add(completions[i], completions[i].payload);
      ASSERT_TRUE(over.ok()) << over.status();
      EXPECT_EQ(*over, i + 1 == completions.size());
    }
    if (has_data(completions.front().type)) {
      EXPECT_EQ(out, data);
    }
  }
}

TEST(SplitCompletion, DataOfAnotherSizeEndsAsCompleterAbort) {
  const Tlp request = make_mem_read(0x1000, 16, 7, 0x0108);
  for (const size_t bytes : {0u, 15u, 17u}) {
    const auto completions = make_completions(request, counting_bytes(bytes), 0x0200, 128, 64);
    ASSERT_EQ(completions.size(), 1u);
    EXPECT_EQ(completions[0].type, TlpType::kCompletion);
    EXPECT_EQ(completions[0].status, CplStatus::kCompleterAbort);
  }
}

TEST(SplitCompletion, OddMpsAndRcbStillGiveLegalPieces) {
  const Tlp request = make_mem_read(0x1004, 1000, 7, 0x0108);
  for (const uint32_t rcb : {0u, 1u, 63u, 100u, 4096u}) {
    for (const uint32_t mps : {0u, 1u, 100u, 129u, UINT32_MAX}) {
      uint32_t bytes = 0;
      for (const Tlp& c : make_completions(request, counting_bytes(1000), 0x0200, mps, rcb)) {
        EXPECT_TRUE(check(c).ok()) << to_string(c) << check(c);
        bytes += static_cast<uint32_t>(c.payload.size());
      }
      EXPECT_EQ(bytes, 1000u) << mps << " " << rcb;
    }
  }
}

TEST(SplitCompletion, StatusEndsAnyNonPostedRequest) {
  for (const Golden& g : goldens()) {
    if (class_of(g.tlp.type) != TlpClass::kNonPosted) continue;
    for (const CplStatus status :
         {CplStatus::kUnsupportedRequest, CplStatus::kConfigRetry, CplStatus::kCompleterAbort}) {
      const Tlp c = make_completion_status(g.tlp, status, 0x0200);
      EXPECT_TRUE(check(c).ok()) << g.name << ": " << check(c);
      EXPECT_EQ(c.tag, g.tlp.tag);
      EXPECT_EQ(c.requester, g.tlp.requester);
      EXPECT_EQ(c.status, status);
      std::vector<std::byte> out(range_of(g.tlp).bytes);
      Reassembly reassembly(g.tlp, out);
      const auto over = reassembly.add(c, {});
      ASSERT_TRUE(over.ok()) << over.status();
      EXPECT_TRUE(*over);
      EXPECT_EQ(reassembly.status(), status);
    }
  }
}

}  // namespace
}  // namespace dxpu::pcie
