// Framing alone: golden bytes, every length off by one, one byte at a time.
#include "proxy/fabric/frame.h"

#include <gtest/gtest.h>

#include "proxy/fabric/tlp_io.h"
#include "proxy/pcie/split.h"

namespace dxpu::fabric {
namespace {

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (int v : values) out.push_back(static_cast<std::byte>(v));
  return out;
}

std::vector<std::byte> frame_of(FrameType type, uint16_t header, uint32_t total, uint8_t flags = 0, uint32_t stream = 0,
                                uint32_t sequence = 0) {
  std::vector<std::byte> out(std::max<size_t>(kEnvelopeBytes, total));
  Envelope e;
  e.type = type;
  e.flags = flags;
  e.header_bytes = header;
  e.total_bytes = total;
  e.stream = stream;
  e.sequence = sequence;
  encode_envelope(e, std::span<std::byte, kEnvelopeBytes>(out.data(), kEnvelopeBytes));
  return out;
}

bool accepted(std::span<const std::byte> in, Phase phase, uint32_t mps, FrameError* error = nullptr) {
  Envelope out;
  FrameError local;
  return decode_envelope(in.first<kEnvelopeBytes>(), phase, mps, out, error != nullptr ? *error : local);
}

// docs/wire.md shows these bytes.
TEST(Frame, GoldenRegisterRead) {
  Packet packet;
  const pcie::Tlp read = pcie::make_mem_read(0x10000004, 4, 0x2a, kHostId);
  ASSERT_TRUE(pack(read, 0x01020304, {}, packet).ok());
  const std::vector<std::byte> got(packet.head.begin(), packet.head.begin() + packet.head_bytes);
  EXPECT_EQ(got,
            bytes({0x03, 0x00, 0x0c, 0x00, 0x2c, 0x00, 0x00, 0x00,  // Tlp, header 12, total 44
                   0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // stream, sequence
                   0x00, 0x00, 0x00, 0x00, 0x04, 0x03, 0x02, 0x01,  // ack, transaction
                   0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // credits
                   0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x2a, 0x0f,  // MRd 3 DW, 1 DW; requester 0, tag, byte enables
                   0x10, 0x00, 0x00, 0x04}));                       // address
}

TEST(Frame, LengthsPerTypeAndPhase) {
  struct Case {
    FrameType type;
    uint16_t header;
    uint32_t total;
    Phase phase;
    bool ok;
  };
  const uint32_t mps = 256;
  const std::vector<Case> cases = {
      {FrameType::kHello, 344, 376, Phase::kHello, true},
      {FrameType::kHello, 344, 375, Phase::kHello, false},
      {FrameType::kHello, 344, 377, Phase::kHello, false},
      {FrameType::kHello, 343, 375, Phase::kHello, false},
      {FrameType::kHello, 344, 376, Phase::kLive, false},
      {FrameType::kHelloAck, 168, 12488, Phase::kHello, true},
      {FrameType::kHelloAck, 168, 12487, Phase::kHello, false},
      {FrameType::kHelloAck, 168, 12488, Phase::kLive, false},
      {FrameType::kTlp, 12, 44, Phase::kLive, true},
      {FrameType::kTlp, 16, 48 + mps, Phase::kLive, true},
      {FrameType::kTlp, 16, 49 + mps, Phase::kLive, false},
      {FrameType::kTlp, 12, 43, Phase::kLive, false},
      {FrameType::kTlp, 13, 45, Phase::kLive, false},
      {FrameType::kTlp, 0, 32, Phase::kLive, false},
      {FrameType::kTlp, 12, 0xffffffff, Phase::kLive, false},
      {FrameType::kTlp, 12, 0, Phase::kLive, false},
      {FrameType::kTlp, 12, 44, Phase::kHello, false},
      {FrameType::kPing, 8, 40, Phase::kLive, true},
      {FrameType::kPing, 8, 41, Phase::kLive, false},
      {FrameType::kPong, 8, 39, Phase::kLive, false},
      {FrameType::kReset, 8, 40, Phase::kLive, true},
      {FrameType::kTerminate, 8, 40, Phase::kLive, true},
      {FrameType::kTerminate, 8, 40, Phase::kHello, true},
      {FrameType::kTerminate, 8, 296, Phase::kLive, true},
      {FrameType::kTerminate, 8, 297, Phase::kLive, false},
      {static_cast<FrameType>(0), 8, 40, Phase::kLive, false},
      {static_cast<FrameType>(8), 8, 40, Phase::kLive, false},
      {static_cast<FrameType>(255), 8, 40, Phase::kLive, false},
  };
  for (const Case& c : cases) {
    const std::vector<std::byte> in = frame_of(c.type, c.header, std::min<uint32_t>(c.total, 1 << 16));
    std::vector<std::byte> patched = in;
    Le<uint32_t> total;
    total.set(c.total);
    std::memcpy(patched.data() + 4, &total, 4);
    EXPECT_EQ(accepted(patched, c.phase, mps), c.ok)
        << name_of(c.type) << " header " << c.header << " total " << c.total;
  }
}

TEST(Frame, OffsetsNameTheField) {
  FrameError error;
  EXPECT_FALSE(accepted(frame_of(static_cast<FrameType>(99), 8, 40), Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 0u);
  EXPECT_FALSE(accepted(frame_of(FrameType::kTlp, 12, 44, 0x80), Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 1u);
  EXPECT_FALSE(accepted(frame_of(FrameType::kTlp, 99, 144), Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 2u);
  EXPECT_FALSE(accepted(frame_of(FrameType::kTlp, 12, 4444), Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 4u);
  EXPECT_FALSE(accepted(frame_of(FrameType::kTlp, 12, 44, 0, 7), Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 8u);
  EXPECT_FALSE(accepted(frame_of(FrameType::kPing, 8, 40, 0, 0, 5), Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 12u);
  std::vector<std::byte> credit = frame_of(FrameType::kTlp, 12, 44);
  credit[25] = std::byte{1};
  EXPECT_FALSE(accepted(credit, Phase::kLive, 256, &error));
  EXPECT_EQ(error.offset, 24u);
}

TEST(Frame, ParserGivesTheSameFramesWhateverThePortions) {
  std::vector<std::byte> stream;
  std::vector<uint32_t> totals;
  for (int i = 0; i < 60; ++i) {
    const uint32_t payload = static_cast<uint32_t>(i * 37 % 257);
    std::vector<std::byte> frame = frame_of(FrameType::kTlp, i % 2 ? 12 : 16, (i % 2 ? 44 : 48) + payload);
    for (size_t b = kEnvelopeBytes; b < frame.size(); ++b)
      frame[b] = static_cast<std::byte>(b + static_cast<size_t>(i));
    totals.push_back(static_cast<uint32_t>(frame.size()));
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (const size_t portion : {size_t{1}, size_t{7}, size_t{31}, size_t{33}, size_t{1000}, stream.size()}) {
    FrameParser parser(Phase::kLive, 256, 1024);
    std::vector<uint32_t> got;
    std::vector<std::byte> again;
    Frame frame;
    FrameError error;
    for (size_t at = 0; at < stream.size();) {
      const std::span<std::byte> room = parser.writable();
      ASSERT_FALSE(room.empty());
      const size_t n = std::min({portion, room.size(), stream.size() - at});
      std::copy_n(stream.begin() + static_cast<std::ptrdiff_t>(at), n, room.begin());
      parser.commit(n);
      at += n;
      FrameParser::Result result;
      while ((result = parser.next(frame, error)) == FrameParser::Result::kFrame) {
        got.push_back(frame.envelope.total_bytes);
        EXPECT_EQ(frame.header.size(), frame.envelope.header_bytes);
        again.insert(again.end(), frame.header.begin(), frame.header.end());
        again.insert(again.end(), frame.payload.begin(), frame.payload.end());
      }
      ASSERT_EQ(result, FrameParser::Result::kMore);
    }
    EXPECT_EQ(got, totals) << "portions of " << portion;
    std::vector<std::byte> bodies;
    size_t at = 0;
    for (uint32_t total : totals) {
      bodies.insert(bodies.end(), stream.begin() + static_cast<std::ptrdiff_t>(at + kEnvelopeBytes),
                    stream.begin() + static_cast<std::ptrdiff_t>(at + total));
      at += total;
    }
    EXPECT_EQ(again, bodies);
  }
}

TEST(Frame, ParserWaitsAtEveryTruncation) {
  const std::vector<std::byte> whole = frame_of(FrameType::kTlp, 16, 48 + 128);
  for (size_t n = 0; n < whole.size(); ++n) {
    FrameParser parser(Phase::kLive, 256, 1024);
    std::copy_n(whole.begin(), n, parser.writable().begin());
    parser.commit(n);
    Frame frame;
    FrameError error;
    EXPECT_EQ(parser.next(frame, error), FrameParser::Result::kMore) << n;
  }
}

TEST(Frame, TheLargestFrameFits) {
  FrameParser parser(Phase::kLive, 4096, 1);
  std::vector<std::byte> whole = frame_of(FrameType::kTlp, 16, 48 + 4096);
  Frame frame;
  FrameError error;
  size_t at = 0;
  while (at < whole.size()) {
    const std::span<std::byte> room = parser.writable();
    const size_t n = std::min<size_t>({room.size(), 100, whole.size() - at});
    ASSERT_GT(n, 0u);
    std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(at), n, room.begin());
    parser.commit(n);
    at += n;
    if (at < whole.size()) {
      ASSERT_EQ(parser.next(frame, error), FrameParser::Result::kMore);
    }
  }
  EXPECT_EQ(parser.next(frame, error), FrameParser::Result::kFrame);
  EXPECT_EQ(frame.payload.size(), 4096u);
}

TEST(TlpIo, WhatExistsTwiceMustAgree) {
  Packet packet;
  std::vector<std::byte> data(64);
  pcie::Tlp write = pcie::make_mem_write(0x1000, data, kHostId);
  ASSERT_TRUE(pack(write, 0, write.payload, packet).ok());
  Frame frame;
  frame.header = std::span<const std::byte>(packet.head).subspan(kEnvelopeBytes, 12);
  frame.payload = write.payload;
  frame.envelope.header_bytes = 12;
  pcie::Tlp out;
  FrameError error;
  EXPECT_TRUE(unpack(frame, out, error)) << error.detail;
  frame.payload = std::span<const std::byte>(write.payload).first(60);
  EXPECT_FALSE(unpack(frame, out, error));
  EXPECT_EQ(error.offset, 4u);
  frame.payload = {};
  EXPECT_FALSE(unpack(frame, out, error));
  frame.payload = write.payload;
  std::vector<std::byte> longer(packet.head.begin() + kEnvelopeBytes, packet.head.begin() + kEnvelopeBytes + 16);
  frame.header = longer;
  EXPECT_FALSE(unpack(frame, out, error));
}

// The cutter must agree with what any requester checks.
TEST(TlpIo, CompletionsFitTheirRequests) {
  std::vector<std::byte> memory(2 * 4096 + 8);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 31 + i / 256);
  for (const uint32_t mps : {128u, 256u, 4096u}) {
    for (const uint32_t rcb : {64u, 128u}) {
      for (const uint32_t offset : {0u, 1u, 3u, 4u, 63u, 64u, 65u, 127u, 130u, 1000u, 4095u}) {
        for (const uint32_t length : {0u, 1u, 2u, 4u, 5u, 63u, 64u, 65u, 128u, 129u, 1023u, 4096u}) {
          if (offset % 4096 + length > 4096) continue;
          const pcie::Tlp request = pcie::make_mem_read(0x7000 + offset, length, 5, kFunctionId);
          std::vector<std::byte> got(std::max(length, 1u));
          pcie::Reassembly reassembly(request, got);
          bool over = false;
          const uint32_t dw = offset & ~3u;
          for_each_completion(
              request, kHostId, mps, rcb, [&](const pcie::Tlp& completion, uint32_t at, uint32_t bytes) {
                ASSERT_LE(bytes, mps);
                ASSERT_FALSE(over);
                const absl::StatusOr<bool> result =
                    reassembly.add(completion, std::span<const std::byte>(memory).subspan(dw + at, bytes));
                ASSERT_TRUE(result.ok()) << result.status() << " mps " << mps << " rcb " << rcb << " " << offset << "+"
                                         << length;
                over = *result;
              });
          ASSERT_TRUE(over);
          if (length != 0) {
            ASSERT_TRUE(std::equal(got.begin(), got.end(), memory.begin() + offset)) << offset << "+" << length;
          }
        }
      }
    }
  }
}

TEST(TlpIo, RunsOfByteEnables) {
  pcie::Tlp request;
  request.type = pcie::TlpType::kMemWrite;
  request.address = 0x100;
  request.length_dw = 1;
  const auto runs = [&](uint8_t first, uint8_t last, uint16_t dws) {
    request.first_be = first;
    request.last_be = last;
    request.length_dw = dws;
    std::vector<std::pair<uint32_t, uint32_t>> out;
    for_each_run(request, [&](uint64_t address, uint32_t offset, uint32_t bytes) {
      EXPECT_EQ(address, 0x100 + offset);
      out.emplace_back(offset, bytes);
    });
    return out;
  };
  using Runs = std::vector<std::pair<uint32_t, uint32_t>>;
  EXPECT_EQ(runs(0x0, 0, 1), Runs{});
  EXPECT_EQ(runs(0xf, 0, 1), (Runs{{0, 4}}));
  EXPECT_EQ(runs(0x6, 0, 1), (Runs{{1, 2}}));
  EXPECT_EQ(runs(0x5, 0, 1), (Runs{{0, 1}, {2, 1}}));
  EXPECT_EQ(runs(0xe, 0x7, 2), (Runs{{1, 6}}));
  EXPECT_EQ(runs(0x9, 0x6, 2), (Runs{{0, 1}, {3, 1}, {5, 2}}));
  EXPECT_EQ(runs(0x8, 0x1, 4), (Runs{{3, 10}}));
}

}  // namespace
}  // namespace dxpu::fabric
