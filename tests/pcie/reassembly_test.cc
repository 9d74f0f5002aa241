// What a completer must not do: each is refused, and neither the buffer nor the progress is touched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "proxy/pcie/split.h"
#include "tests/pcie/tlp_samples.h"

namespace dxpu::pcie {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kBytes = 300;
constexpr uint64_t kAddress = 0x1042;

class ReassemblyTest : public ::testing::Test {
 protected:
  // Pieces of 32, 32 and 12 DW: 126, 128 and 46 bytes.
  const Tlp request_ = make_mem_read(kAddress, kBytes, 7, 0x0108);
  const std::vector<std::byte> data_ = counting_bytes(kBytes);
  const std::vector<Tlp> pieces_ = make_completions(request_, data_, 0x0200, 128, 64);
  std::vector<std::byte> out_ = std::vector<std::byte>(kBytes, std::byte{0xee});
  Reassembly reassembly_{request_, out_};

  absl::StatusOr<bool> add(const Tlp& tlp) { return reassembly_.add(tlp, tlp.payload); }

  void expect_refused(const Tlp& tlp, const std::string& names) {
    const std::vector<std::byte> before = out_;
    const uint32_t received = reassembly_.received();
    const auto over = add(tlp);
    ASSERT_FALSE(over.ok()) << to_string(tlp);
    EXPECT_EQ(over.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(over.status().message()), HasSubstr(names));
    EXPECT_EQ(out_, before);
    EXPECT_EQ(reassembly_.received(), received);
    EXPECT_EQ(reassembly_.status(), CplStatus::kSuccess);
    EXPECT_FALSE(reassembly_.poisoned());
  }

  // The request must still end well after all that was refused.
  void finish_from(size_t first) {
    for (size_t i = first; i < pieces_.size(); ++i) {
      const auto over = add(pieces_[i]);
      ASSERT_TRUE(over.ok()) << over.status();
      EXPECT_EQ(*over, i + 1 == pieces_.size());
    }
    EXPECT_EQ(out_, data_);
  }
};

TEST_F(ReassemblyTest, WrongPiecesAreRefusedAtEveryPosition) {
  struct Wrong {
    const char* names;
    std::function<void(Tlp&)> change;
  };
  const std::vector<Wrong> wrongs = {
      {"Byte Count", [](Tlp& t) { ++t.byte_count; }},
      {"Byte Count", [](Tlp& t) { --t.byte_count; }},
      {"Byte Count", [](Tlp& t) { t.byte_count = 4096; }},
      {"Lower Address", [](Tlp& t) { t.lower_address ^= 1; }},
      {"Lower Address", [](Tlp& t) { t.lower_address ^= 0x40; }},
      {"payload size", [](Tlp& t) { t.payload.pop_back(); }},
      {"payload size", [](Tlp& t) { t.payload.resize(t.payload.size() + 4); }},
      {"Length", [](Tlp& t) { t.length_dw = 0, t.payload.clear(); }},
      {"boundary", [](Tlp& t) { --t.length_dw, t.payload.resize(t.payload.size() - 4); }},
      {"too much data", [](Tlp& t) { t.length_dw = 76 + 1, t.payload.resize(77 * 4); }},
      {"too much data", [](Tlp& t) { t.length_dw = 1024, t.payload.resize(4096); }},
      {"success without the data", [](Tlp& t) { t.type = TlpType::kCompletion, t.length_dw = 0, t.payload.clear(); }},
      {"is none", [](Tlp& t) { t.type = TlpType::kMemWrite; }},
  };
  for (size_t position = 0; position < pieces_.size(); ++position) {
    for (size_t i = 0; i < wrongs.size(); ++i) {
      SCOPED_TRACE("piece " + std::to_string(position) + " wrong " + std::to_string(i));
      Tlp tlp = pieces_[position];
      wrongs[i].change(tlp);
      std::string names = wrongs[i].names;
      if (names == "boundary") names = "Read Completion Boundary";
      expect_refused(tlp, names);
    }
    const auto over = add(pieces_[position]);
    ASSERT_TRUE(over.ok()) << over.status();
    EXPECT_EQ(*over, position + 1 == pieces_.size());
  }
  EXPECT_EQ(out_, data_);
}

TEST_F(ReassemblyTest, DuplicatePieceIsRefused) {
  ASSERT_TRUE(add(pieces_[0]).ok());
  expect_refused(pieces_[0], "Byte Count");
  finish_from(1);
}

TEST_F(ReassemblyTest, PiecesOutOfOrderAreRefused) {
  expect_refused(pieces_[1], "Byte Count");
  expect_refused(pieces_[2], "Byte Count");
  finish_from(0);
}

TEST_F(ReassemblyTest, NothingIsTakenWhenItIsOver) {
  finish_from(0);
  expect_refused(pieces_.back(), "over");
  expect_refused(make_completion_status(request_, CplStatus::kUnsupportedRequest, 0x0200), "over");
}

TEST_F(ReassemblyTest, ErrorInTheMiddleEndsIt) {
  ASSERT_TRUE(add(pieces_[0]).ok());
  const auto over = add(make_completion_status(request_, CplStatus::kCompleterAbort, 0x0200));
  ASSERT_TRUE(over.ok()) << over.status();
  EXPECT_TRUE(*over);
  EXPECT_EQ(reassembly_.status(), CplStatus::kCompleterAbort);
  EXPECT_EQ(reassembly_.received(), 126u);
  EXPECT_FALSE(add(pieces_[1]).ok());
}

TEST_F(ReassemblyTest, ErrorStatusCountsWhateverElseIsWrong) {
  Tlp tlp = make_completion_status(request_, CplStatus::kUnsupportedRequest, 0x0200);
  tlp.byte_count = 1;
  tlp.lower_address = 0x55;
  const auto over = add(tlp);
  ASSERT_TRUE(over.ok()) << over.status();
  EXPECT_TRUE(*over);
  EXPECT_EQ(reassembly_.status(), CplStatus::kUnsupportedRequest);
  EXPECT_EQ(out_, std::vector<std::byte>(kBytes, std::byte{0xee}));
}

TEST_F(ReassemblyTest, PoisonOfAnyPieceSticks) {
  ASSERT_TRUE(add(pieces_[0]).ok());
  EXPECT_FALSE(reassembly_.poisoned());
  Tlp poisoned = pieces_[1];
  poisoned.poisoned = true;
  ASSERT_TRUE(add(poisoned).ok());
  finish_from(2);
  EXPECT_TRUE(reassembly_.poisoned());
}

TEST_F(ReassemblyTest, PiecesCutDifferentlyAreTakenAsWell) {
  // Any completer may choose its own cuts, and change its mind.
  Tlp first = pieces_[0];
  first.length_dw = 16;  // to 0x1080
  first.payload.resize(64);
  ASSERT_TRUE(add(first).ok());
  EXPECT_EQ(reassembly_.received(), 62u);
  const Tlp rest =
      make_completions(make_mem_read(0x1080, kBytes - 62, 7, 0x0108), std::span(data_).subspan(62), 0x0200, 4096, 64)
          .front();
  const auto over = add(rest);
  ASSERT_TRUE(over.ok()) << over.status();
  EXPECT_TRUE(*over);
  EXPECT_EQ(out_, data_);
}

TEST(Reassembly, ABufferThatIsTooSmallIsNeverOverrun) {
  const Tlp request = make_mem_read(0x1000, 64, 7, 0x0108);
  const Tlp piece = make_completions(request, counting_bytes(64), 0x0200, 128, 64).front();
  std::vector<std::byte> out(63);
  Reassembly reassembly(request, out);
  EXPECT_FALSE(reassembly.add(piece, piece.payload).ok());
  Reassembly none(request, {});
  EXPECT_FALSE(none.add(piece, piece.payload).ok());
}

TEST(Reassembly, ZeroLengthRead) {
  const Tlp request = make_mem_read(0x1044, 0, 7, 0x0108);
  Tlp piece = make_completions(request, {}, 0x0200, 128, 64).front();
  {
    Reassembly reassembly(request, {});
    const auto over = reassembly.add(piece, piece.payload);
    ASSERT_TRUE(over.ok()) << over.status();
    EXPECT_TRUE(*over);
    EXPECT_EQ(reassembly.received(), 0u);
  }
  Reassembly reassembly(request, {});
  piece.byte_count = 4;
  EXPECT_FALSE(reassembly.add(piece, piece.payload).ok());
  piece.byte_count = 1;
  piece.length_dw = 2;
  piece.payload.resize(8);
  EXPECT_FALSE(reassembly.add(piece, piece.payload).ok());
}

TEST(Reassembly, FullSizeRead) {
  // Length 0 and Byte Count 0 on the wire, through the codec.
  const Tlp request = make_mem_read(0x100000000, 4096, 7, 0x0108);
  const std::vector<std::byte> data = counting_bytes(4096);
  std::vector<std::byte> out(4096);
  Reassembly reassembly(request, out);
  bool over = false;
  for (const Tlp& c : make_completions(request, data, 0x0200, 4096, 64)) {
    std::vector<std::byte> wire;
    ASSERT_TRUE(encode(c, wire).ok());
    EXPECT_EQ(std::to_integer<int>(wire[3]), 0);
    EXPECT_EQ(std::to_integer<int>(wire[7]), 0);
    const auto back = decode(wire);
    ASSERT_TRUE(back.ok()) << back.status();
    const auto result = reassembly.add(*back, back->payload);
    ASSERT_TRUE(result.ok()) << result.status();
    over = *result;
  }
  EXPECT_TRUE(over);
  EXPECT_EQ(out, data);
}

TEST(Reassembly, WritesTakeACompletionWithoutDataOnly) {
  Tlp request;
  request.type = TlpType::kCfgWrite0;
  request.length_dw = 1;
  request.first_be = 0xf;
  request.payload.resize(4);
  Tlp data = make_completions(make_mem_read(0, 4, 0, 0), counting_bytes(4), 0, 128, 64).front();
  Reassembly reassembly(request, {});
  EXPECT_FALSE(reassembly.add(data, data.payload).ok());
  Tlp good = make_completion_status(request, CplStatus::kSuccess, 0);
  Tlp bad = good;
  bad.byte_count = 5;
  EXPECT_FALSE(reassembly.add(bad, {}).ok());
  EXPECT_FALSE(reassembly.add(good, counting_bytes(4)).ok());
  const auto over = reassembly.add(good, {});
  ASSERT_TRUE(over.ok()) << over.status();
  EXPECT_TRUE(*over);
}

TEST(Reassembly, ConfigReadTakesTheBytesItAskedFor) {
  Tlp request;
  request.type = TlpType::kCfgRead0;
  request.length_dw = 1;
  request.first_be = 0x6;
  Tlp answer = make_completion_status(request, CplStatus::kSuccess, 0);
  answer.type = TlpType::kCompletionData;
  answer.length_dw = 1;
  answer.payload = from_hex("11223344");
  std::vector<std::byte> out(2);
  Reassembly reassembly(request, out);
  const auto over = reassembly.add(answer, answer.payload);
  ASSERT_TRUE(over.ok()) << over.status();
  EXPECT_EQ(out, from_hex("2233"));
}

}  // namespace
}  // namespace dxpu::pcie
