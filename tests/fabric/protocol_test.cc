// One real end against a peer that speaks by hand: bad frames, strange completions, byte enables, tags.
#include <random>

#include "tests/fabric/raw_peer.h"

namespace dxpu::fabric::testing {
namespace {

using function::MemoryFunction;
using function::Outcome;

template <typename T>
void patch(std::vector<std::byte>& frame, size_t offset, T value) {
  Le<T> wire;
  wire.set(value);
  std::memcpy(frame.data() + offset, &wire, sizeof(T));
}

pcie::Tlp mem_read(uint64_t address, uint32_t bytes, uint16_t tag = 1) {
  return pcie::make_mem_read(address, bytes, tag, kHostId);
}

pcie::Tlp data_answer(const pcie::Tlp& request, std::span<const std::byte> dws, uint16_t byte_count, uint8_t lower) {
  pcie::Tlp out;
  out.type = pcie::TlpType::kCompletionData;
  out.requester = request.requester;
  out.completer = kFunctionId;
  out.tag = request.tag;
  out.length_dw = static_cast<uint16_t>(dws.size() / 4);
  out.byte_count = byte_count;
  out.lower_address = lower;
  out.payload.assign(dws.begin(), dws.end());
  return out;
}

// ---- fatal: the stream is not trusted any more
// -------------------------------------------------------------------------

struct BadFrame {
  const char* name;
  std::function<void(BoxUnderTest&, std::vector<std::byte>&)> mutate;  // starts as a good 4-byte read of RAM
  uint32_t offset;
};

TEST(BadFrames, EndTheSessionWithTheOffset) {
  const std::vector<BadFrame> cases = {
      {"unknown type", [](auto&, auto& f) { patch<uint8_t>(f, 0, 77); }, 0},
      {"hello again", [](auto&, auto& f) { f = encode_hello_frame(ticket(), patient_options()); }, 0},
      {"flags", [](auto&, auto& f) { patch<uint8_t>(f, 1, 2); }, 1},
      {"header length", [](auto&, auto& f) { patch<uint16_t>(f, 2, 20); }, 2},
      {"total too long", [](auto&, auto& f) { patch<uint32_t>(f, 4, 1u << 24); }, 4},
      {"total too short", [](auto&, auto& f) { patch<uint32_t>(f, 4, 32); }, 4},
      {"payload of a read",
       [](auto&, auto& f) { patch<uint32_t>(f, 4, static_cast<uint32_t>(f.size() + 4)), f.resize(f.size() + 4); }, 4},
      {"stream", [](auto&, auto& f) { patch<uint32_t>(f, 8, 1); }, 8},
      {"sequence skipped", [](auto& b, auto& f) { patch<uint32_t>(f, 12, b.raw->sequence_ + 1); }, 12},
      {"sequence repeated", [](auto& b, auto& f) { patch<uint32_t>(f, 12, b.raw->sequence_ - 1); }, 12},
      {"sequence 0", [](auto&, auto& f) { patch<uint32_t>(f, 12, 0); }, 12},
      {"ack of the future", [](auto&, auto& f) { patch<uint32_t>(f, 16, 100000); }, 16},
      {"credits", [](auto&, auto& f) { patch<uint32_t>(f, 28, 1); }, 24},
      {"reserved TLP encoding", [](auto&, auto& f) { f[32] = std::byte{0x1f}; }, 32},
      {"foreign requester", [](auto&, auto& f) { f[36] = std::byte{0x55}; }, 36},
  };
  for (const BadFrame& c : cases) {
    SCOPED_TRACE(c.name);
    BoxUnderTest box;
    std::vector<std::byte> frame = box.raw->tlp_bytes(mem_read(BoxUnderTest::kRamAt, 4), 1);
    c.mutate(box, frame);
    box.raw->send_bytes(frame);
    const Terminate got = box.raw->expect_terminate();
    EXPECT_EQ(got.reason, TerminateReason::kProtocolError);
    EXPECT_EQ(got.offset, c.offset) << got.detail;
    EXPECT_EQ(box.wait_end().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(box.server->stats().malformed, 1u);
    EXPECT_FALSE(box.server->alive());
  }
}

TEST(BadFrames, AReadLongerThanAgreed) {
  SessionOptions options = patient_options();
  options.max_read_request = 256;
  BoxUnderTest box(options);
  box.raw->send_tlp(mem_read(BoxUnderTest::kRamAt, 512), 1);
  EXPECT_EQ(box.raw->expect_terminate().reason, TerminateReason::kProtocolError);
}

TEST(BadFrames, AWriteLongerThanAgreed) {
  SessionOptions options = patient_options();
  options.max_payload = 128;
  BoxUnderTest box(options);
  const std::vector<std::byte> data(256);
  box.raw->send_tlp(pcie::make_mem_write(BoxUnderTest::kRamAt, data, kHostId));
  const Terminate got = box.raw->expect_terminate();
  EXPECT_EQ(got.offset, 4u);
}

TEST(BadFrames, TruncatedAndThenNothing) {
  for (const size_t keep : {size_t{1}, size_t{31}, size_t{32}, size_t{43}}) {
    BoxUnderTest box;
    const std::vector<std::byte> frame = box.raw->tlp_bytes(mem_read(BoxUnderTest::kRamAt, 4), 1);
    box.raw->send_bytes(std::span(frame).first(keep));
    box.raw->transport().shutdown();
    EXPECT_EQ(box.wait_end().code(), absl::StatusCode::kUnavailable);
  }
}

// ---- per message: UR and nothing else
// ----------------------------------------------------------------------------------

TEST(Requests, UnsupportedOnesAreAnsweredAndTheSessionGoesOn) {
  BoxUnderTest box;
  const auto expect = [&](const pcie::Tlp& request, pcie::CplStatus status) {
    const RawFrame answer = box.ask(request, 5);
    EXPECT_EQ(answer.tlp().status, status) << pcie::to_string(request);
    EXPECT_EQ(answer.tlp().tag, request.tag);
    EXPECT_EQ(answer.tlp().completer, kFunctionId);
  };
  expect(mem_read(0x5000, 4, 17), pcie::CplStatus::kUnsupportedRequest);
  expect(mem_read(BoxUnderTest::kRamAt + TestFunction::kRam, 4), pcie::CplStatus::kUnsupportedRequest);
  pcie::Tlp io;
  io.type = pcie::TlpType::kIoRead;
  io.length_dw = 1;
  io.first_be = 0xf;
  io.address = 0x60;
  expect(io, pcie::CplStatus::kUnsupportedRequest);
  pcie::Tlp cfg1;
  cfg1.type = pcie::TlpType::kCfgRead1;
  cfg1.length_dw = 1;
  cfg1.first_be = 0xf;
  cfg1.target = 0x200;
  expect(cfg1, pcie::CplStatus::kUnsupportedRequest);
  pcie::Tlp add;
  add.type = pcie::TlpType::kFetchAdd;
  add.address = BoxUnderTest::kRamAt;
  add.length_dw = 1;
  add.payload.resize(4);
  expect(add, pcie::CplStatus::kUnsupportedRequest);
  // Posted ones are counted.
  const std::vector<std::byte> data(8);
  box.raw->send_tlp(pcie::make_mem_write(0x5000, data, kHostId));
  expect(mem_read(BoxUnderTest::kRamAt, 4), pcie::CplStatus::kSuccess);
  EXPECT_EQ(box.server->stats().requests_unsupported, 6u);
  EXPECT_TRUE(box.server->alive());
}

TEST(Requests, MemoryDecodingOffMeansNobodyIsThere) {
  BoxUnderTest box;
  box.config_write(0x04, 0x4);
  EXPECT_EQ(box.ask(mem_read(BoxUnderTest::kRamAt, 4), 3).tlp().status, pcie::CplStatus::kUnsupportedRequest);
  box.config_write(0x04, 0x6);
  EXPECT_EQ(box.ask(mem_read(BoxUnderTest::kRamAt, 4), 3).tlp().status, pcie::CplStatus::kSuccess);
}

TEST(Requests, ByteEnablesOfWritesAndReads) {
  BoxUnderTest box;
  std::vector<std::byte> zeros(16);
  box.raw->send_tlp(pcie::make_mem_write(BoxUnderTest::kRamAt, zeros, kHostId));
  pcie::Tlp write;
  write.type = pcie::TlpType::kMemWrite;
  write.requester = kHostId;
  write.address = BoxUnderTest::kRamAt;
  write.length_dw = 1;
  write.first_be = 0x5;  // bytes 0 and 2
  for (int i = 1; i <= 4; ++i) write.payload.push_back(static_cast<std::byte>(i));
  box.raw->send_tlp(write);
  write.address += 8;
  write.length_dw = 2;
  write.first_be = 0x9;
  write.last_be = 0x6;
  for (int i = 5; i <= 8; ++i) write.payload.push_back(static_cast<std::byte>(i));
  box.raw->send_tlp(write);
  const pcie::Tlp all = box.ask(mem_read(BoxUnderTest::kRamAt, 16), 1).tlp();
  const std::vector<int> expected = {1, 0, 3, 0, 0, 0, 0, 0, 1, 0, 0, 4, 0, 6, 7, 0};
  ASSERT_EQ(all.payload.size(), 16u);
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(static_cast<int>(all.payload[i]), expected[i]) << i;

  // A read with holes reads exactly its runs: a register with side effects between them stays alone.
  const int before = box.function.reads;
  pcie::Tlp holes = mem_read(BoxUnderTest::kRamAt + 8, 8, 2);
  holes.first_be = 0x9;
  holes.last_be = 0x6;
  const pcie::Tlp answer = box.ask(holes, 2).tlp();
  EXPECT_EQ(answer.status, pcie::CplStatus::kSuccess);
  EXPECT_EQ(box.function.reads, before + 3);
  EXPECT_EQ(static_cast<int>(answer.payload[3]), 4);
  EXPECT_EQ(static_cast<int>(answer.payload[5]), 6);

  // One odd byte: Lower Address and Byte Count are those of the byte.
  const pcie::Tlp byte = box.ask(mem_read(BoxUnderTest::kRamAt + 0x43, 1, 3), 3).tlp();
  EXPECT_EQ(byte.byte_count, 1);
  EXPECT_EQ(byte.lower_address, 0x43);
  // Zero-length: one DW of anything, nothing is read.
  const int reads = box.function.reads;
  const pcie::Tlp flush = box.ask(mem_read(BoxUnderTest::kRamAt, 0, 4), 4).tlp();
  EXPECT_EQ(flush.status, pcie::CplStatus::kSuccess);
  EXPECT_EQ(flush.byte_count, 1);
  EXPECT_EQ(flush.payload.size(), 4u);
  EXPECT_EQ(box.function.reads, reads);
}

TEST(Requests, LongReadsAreCutAtMpsAndRcb) {
  SessionOptions options = patient_options();
  options.max_payload = 256;
  options.read_completion_boundary = 64;
  BoxUnderTest box(options);
  std::vector<std::byte> data(1024);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 13);
  for (size_t i = 0; i < data.size(); i += 256) {
    box.raw->send_tlp(pcie::make_mem_write(BoxUnderTest::kRamAt + i, std::span(data).subspan(i, 256), kHostId));
  }
  const pcie::Tlp request = mem_read(BoxUnderTest::kRamAt + 5, 1000, 9);
  box.raw->send_tlp(request, 4);
  std::vector<std::byte> got(1000);
  pcie::Reassembly reassembly(request, got);
  bool over = false;
  while (!over) {
    const std::optional<RawFrame> piece = box.raw->next();
    ASSERT_TRUE(piece.has_value());
    EXPECT_LE(piece->payload.size(), 256u);
    const absl::StatusOr<bool> added = reassembly.add(piece->tlp(), piece->payload);
    ASSERT_TRUE(added.ok()) << added.status();
    over = *added;
  }
  EXPECT_TRUE(std::equal(got.begin(), got.end(), data.begin() + 5));
}

// ---- completions
// -------------------------------------------------------------------------------------------------------

TEST(Completions, NobodyAskedForThem) {
  HostUnderTest host;
  const std::vector<std::byte> dw(4);
  host.raw->send_tlp(data_answer(mem_read(0, 4, 999), dw, 4, 0), 1);  // no such tag
  host.raw->send_tlp(data_answer(mem_read(0, 4, 200), dw, 4, 0), 1);  // a tag never used
  pcie::Tlp foreign = data_answer(mem_read(0, 4, 0), dw, 4, 0);
  foreign.requester = 0x4242;  // somebody else's
  host.raw->send_tlp(foreign, 1);
  host.raw->send_tlp(data_answer(mem_read(0, 4, 0), dw, 4, 0), 70000);  // a generation of the future
  host.raw->send_tlp(data_answer(mem_read(0, 4, 0), dw, 4, 0), 1);  // tag 0 was used for the first configuration write
  ASSERT_TRUE(eventually([&] {
    const SessionStats s = host.remote->stats();
    return s.unexpected_completions == 4 && s.late_completions == 1;
  })) << host.remote->stats().unexpected_completions
      << " " << host.remote->stats().late_completions;
  EXPECT_TRUE(host.remote->alive());
}

TEST(Completions, LateOnesNeverMeetTheNextUserOfTheTag) {
  SessionOptions options = patient_options();
  options.deadlines.read = absl::Milliseconds(150);
  SessionOptions one_tag = patient_options();
  one_tag.max_outstanding = 1;
  HostUnderTest host(options, one_tag);
  Ended first;
  host.remote->bar_read(2, 0, 4, first.read_done());
  const std::optional<RawFrame> asked = host.raw->next();
  ASSERT_TRUE(asked.has_value());
  EXPECT_EQ(first.wait(), Outcome::kTimeout);
  // The tag is used again, then the old answer comes, then the right one.
  Ended second;
  host.remote->bar_read(2, 0, 4, second.read_done());
  const std::optional<RawFrame> again = host.raw->next();
  ASSERT_TRUE(again.has_value());
  ASSERT_EQ(again->tlp().tag, asked->tlp().tag) << "the peer allows one tag only";
  EXPECT_NE(again->envelope.transaction, asked->envelope.transaction);
  const std::vector<std::byte> old_data(4, std::byte{0x0d}), new_data(4, std::byte{0x4e});
  host.raw->send_tlp(data_answer(asked->tlp(), old_data, 4, 0), asked->envelope.transaction);
  host.raw->send_tlp(data_answer(again->tlp(), new_data, 4, 0), again->envelope.transaction);
  host.raw->send_tlp(data_answer(again->tlp(), old_data, 4, 0), again->envelope.transaction);  // and once more
  EXPECT_EQ(second.wait(), Outcome::kSuccess);
  EXPECT_EQ(second.u32(), 0x4e4e4e4eu);
  ASSERT_TRUE(eventually([&] { return host.remote->stats().late_completions == 2; }));
  EXPECT_EQ(host.remote->stats().completed_cto, 1u);
  EXPECT_TRUE(host.remote->alive());
}

TEST(Completions, ErrorInTheMiddleOfASplitRead) {
  SessionOptions options = patient_options();
  options.max_payload = 128;
  HostUnderTest host(options, options);
  Ended read;
  host.remote->bar_read(2, 0, 512, read.read_done());
  const std::optional<RawFrame> asked = host.raw->next();
  ASSERT_TRUE(asked.has_value());
  const pcie::Tlp request = asked->tlp();
  ASSERT_EQ(request.length_dw, 128);
  const std::vector<std::byte> piece(128, std::byte{1});
  host.raw->send_tlp(data_answer(request, piece, 512, 0), asked->envelope.transaction);
  pcie::Tlp abort = pcie::make_completion_status(request, pcie::CplStatus::kCompleterAbort, kFunctionId);
  host.raw->send_tlp(abort, asked->envelope.transaction);
  EXPECT_EQ(read.wait(), Outcome::kCompleterAbort);
  EXPECT_TRUE(read.data().empty());
  host.raw->send_tlp(data_answer(request, piece, 256, 0), asked->envelope.transaction);  // what was on its way
  ASSERT_TRUE(eventually([&] { return host.remote->stats().late_completions == 1; }));
  EXPECT_TRUE(host.remote->alive());
  EXPECT_EQ(host.remote->stats().completed_ca, 1u);
}

TEST(Completions, EveryStatusReachesTheRequester) {
  HostUnderTest host;
  const std::vector<std::pair<pcie::CplStatus, Outcome>> cases = {
      {pcie::CplStatus::kUnsupportedRequest, Outcome::kUnsupportedRequest},
      {pcie::CplStatus::kCompleterAbort, Outcome::kCompleterAbort}};
  for (const auto& [status, outcome] : cases) {
    Ended read;
    host.remote->bar_read(2, 64, 4, read.read_done());
    const std::optional<RawFrame> asked = host.raw->next();
    ASSERT_TRUE(asked.has_value());
    host.raw->send_tlp(pcie::make_completion_status(asked->tlp(), status, kFunctionId), asked->envelope.transaction);
    EXPECT_EQ(read.wait(), outcome);
  }
  Ended poisoned;
  host.remote->bar_read(2, 64, 4, poisoned.read_done());
  const std::optional<RawFrame> asked = host.raw->next();
  ASSERT_TRUE(asked.has_value());
  pcie::Tlp answer = data_answer(asked->tlp(), std::vector<std::byte>(4), 4, 64);
  answer.poisoned = true;
  host.raw->send_tlp(answer, asked->envelope.transaction);
  EXPECT_EQ(poisoned.wait(), Outcome::kPoisoned);
  EXPECT_EQ(host.remote->stats().completed_poisoned, 1u);
}

TEST(Completions, ThatContradictTheRequestAreFatal) {
  struct Case {
    const char* name;
    uint32_t asked;
    size_t bytes;
    uint16_t byte_count;
    uint8_t lower;
  };
  for (const Case& c : {Case{"more data than asked for", 8, 16, 16, 0}, Case{"byte count", 512, 128, 256, 0},
                        Case{"lower address", 8, 8, 8, 4}}) {
    SCOPED_TRACE(c.name);
    HostUnderTest host;
    Ended read;
    host.remote->bar_read(2, 0, c.asked, read.read_done());
    const std::optional<RawFrame> asked = host.raw->next();
    ASSERT_TRUE(asked.has_value());
    host.raw->send_tlp(data_answer(asked->tlp(), std::vector<std::byte>(c.bytes), c.byte_count, c.lower),
                       asked->envelope.transaction);
    EXPECT_EQ(host.raw->expect_terminate().reason, TerminateReason::kProtocolError);
    EXPECT_EQ(read.wait(), Outcome::kLinkDown);
    EXPECT_EQ(host.wait_loss().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Tags, WhatFindsNoneWaitsAndEndsWell) {
  SessionOptions host_options = patient_options();
  host_options.max_outstanding = 4;
  BoxUnderTest box(patient_options(), host_options);
  std::vector<std::byte> out(64 * 4096);
  std::vector<std::unique_ptr<Ended>> ended;
  for (size_t i = 0; i < 64; ++i) {
    ended.push_back(std::make_unique<Ended>());
    box.function.upstream.load()->dma_read(0x1000000 + i * 4096, std::span(out).subspan(i * 4096, 4096),
                                           ended.back()->done());
  }
  std::vector<RawFrame> asked;
  for (int i = 0; i < 4; ++i) {
    std::optional<RawFrame> frame = box.raw->next();
    ASSERT_TRUE(frame.has_value());
    asked.push_back(*frame);
  }
  EXPECT_FALSE(box.raw->next(absl::Milliseconds(100)).has_value()) << "more than the host accepts were in flight";
  size_t served = 0;
  std::vector<bool> seen(64);
  while (served < 64) {
    // The youngest first: completions of different tags may come in any order.
    const RawFrame frame = asked.back();
    asked.pop_back();
    const pcie::Tlp request = frame.tlp();
    const size_t index = (request.address - 0x1000000) / 4096;
    ASSERT_FALSE(seen.at(index));
    seen[index] = true;
    const std::vector<std::byte> page(4096, static_cast<std::byte>(index + 1));
    pcie::Tlp answer = data_answer(request, page, 4096, 0);
    answer.completer = kHostId;
    box.raw->send_tlp(answer, frame.envelope.transaction);
    ++served;
    if (served + asked.size() < 64) {
      std::optional<RawFrame> next = box.raw->next();
      ASSERT_TRUE(next.has_value());
      asked.push_back(*next);
    }
  }
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(ended[i]->wait(), Outcome::kSuccess);
    EXPECT_EQ(out[i * 4096 + 4095], static_cast<std::byte>(i + 1));
  }
}

TEST(Tags, APeerThatNeverAnswersEndsThemAllByTheirDeadline) {
  SessionOptions options = patient_options();
  options.deadlines.read = absl::Milliseconds(100);
  SessionOptions host_options = patient_options();
  host_options.max_outstanding = 2;
  BoxUnderTest box(options, host_options);
  std::vector<std::byte> out(6 * 64);
  std::vector<std::unique_ptr<Ended>> ended;
  for (size_t i = 0; i < 6; ++i) {
    ended.push_back(std::make_unique<Ended>());
    box.function.upstream.load()->dma_read(0x1000 + i * 64, std::span(out).subspan(i * 64, 64), ended.back()->done());
  }
  std::atomic<bool> stop{false};
  std::thread peer([&] {  // answers pings and nothing else
    while (!stop) box.raw->next(absl::Milliseconds(20));
  });
  for (auto& e : ended) EXPECT_EQ(e->wait(), Outcome::kTimeout);
  EXPECT_TRUE(box.server->alive()) << "a peer that answers pings is not down";
  stop = true;
  peer.join();
  const SessionStats s = box.server->stats();
  EXPECT_EQ(s.non_posted_issued, s.completed_success + s.completed_cto);
}

TEST(Padding, OfUnalignedAnswersIsZero) {
  HostUnderTest host;
  host.memory.fill(3);
  // Buffers are used again: leave something in them first.
  host.raw->send_tlp(pcie::make_mem_read(HostMemory::kBase, 4096, 0, kFunctionId), 1);
  ASSERT_TRUE(host.raw->next().has_value());
  host.raw->send_tlp(pcie::make_mem_read(HostMemory::kBase + 4099, 18, 1, kFunctionId), 2);
  const std::optional<RawFrame> answer = host.raw->next();
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->payload.size(), 24u);
  for (const size_t i : {0, 1, 2, 21, 22, 23}) EXPECT_EQ(answer->payload[i], std::byte{0}) << i;
  EXPECT_EQ(answer->payload[3], *host.memory.at(4099));
}

TEST(Messages, AnswersNobodyWaitsForAndMsiOddities) {
  HostUnderTest host;
  Packet packet;
  const ResetWire wire{};
  pack_control(FrameType::kReset, kFlagAnswer, 99, std::as_bytes(std::span(&wire, 1)), packet);
  std::vector<std::byte> reset(packet.head.begin(), packet.head.begin() + packet.head_bytes);
  patch<uint32_t>(reset, 12, ++host.raw->sequence_);
  host.raw->send_bytes(reset);
  const std::vector<std::byte> eight(8);
  host.raw->send_tlp(pcie::make_mem_write(kMsiAddress, eight, kFunctionId));  // not an interrupt
  const uint32_t vector = 5;
  host.raw->send_tlp(pcie::make_mem_write(kMsiAddress + 0x1000, std::as_bytes(std::span(&vector, 1)), kFunctionId));
  ASSERT_TRUE(eventually([&] { return host.memory.interrupts().size() == 1; }));
  EXPECT_EQ(host.memory.interrupts()[0].vector, 5u);
  EXPECT_EQ(host.remote->stats().requests_unsupported, 1u);
}

// ---- 10,000 mutated frames
// ---------------------------------------------------------------------------------------------

TEST(Mutations, NoFrameCrashesOrHangsTheBox) {
  std::mt19937 random(20261201);
  int frames = 0, sessions = 0;
  while (frames < 10000) {
    BoxUnderTest box;
    ++sessions;
    // Several frames a session: most mutations of addresses and data are legal, the first illegal one ends it.
    for (int i = 0; i < 200 && frames < 10000 && box.server->alive(); ++i, ++frames) {
      std::vector<std::byte> data(1 + random() % 64);
      std::vector<std::byte> frame;
      switch (random() % 4) {
        case 0:
          frame = box.raw->tlp_bytes(mem_read(BoxUnderTest::kRamAt + random() % 4000, 1 + random() % 60,
                                              static_cast<uint16_t>(random() % 256)),
                                     random());
          break;
        case 1:
          frame = box.raw->tlp_bytes(pcie::make_mem_write(BoxUnderTest::kRamAt + random() % 4000, data, kHostId), 0);
          break;
        case 2: {
          const size_t length = 4 + random() % 16 * 4;
          frame = box.raw->tlp_bytes(data_answer(mem_read(0, 4, static_cast<uint16_t>(random() % 1024)),
                                                 std::vector<std::byte>(length), static_cast<uint16_t>(length), 0),
                                     random() % 20);
        } break;
        default:
          frame = encode_terminate_frame(TerminateReason::kBusy, random(), "x");
          if (random() % 4 != 0)
            patch<uint8_t>(frame, 0, static_cast<uint8_t>(FrameType::kPing)), frame.resize(40),
                patch<uint32_t>(frame, 4, 40);
      }
      const int changes = static_cast<int>(random() % 3);
      for (int k = 0; k < changes; ++k) {
        // Mostly headers: that is where meaning lies.
        const size_t limit = random() % 4 == 0 ? frame.size() : std::min<size_t>(frame.size(), 48);
        frame[random() % limit] = static_cast<std::byte>(random());
      }
      if (random() % 50 == 0) frame.resize(random() % frame.size() + 1);
      box.raw->send_bytes(frame);
      if (i % 16 == 0) box.raw->next(absl::ZeroDuration());
    }
    box.raw->transport().shutdown();
    EXPECT_FALSE(box.wait_end().ok());
  }
  RecordProperty("sessions", sessions);
}

TEST(Mutations, NoFrameCrashesOrHangsTheHost) {
  std::mt19937 random(7);
  int frames = 0;
  while (frames < 3000) {
    HostUnderTest host;
    std::vector<std::unique_ptr<Ended>> ended;
    for (int i = 0; i < 100 && frames < 3000 && host.remote->alive(); ++i, ++frames) {
      // A real request is outstanding, so that completions have something to meet.
      ended.push_back(std::make_unique<Ended>());
      host.remote->bar_read(2, random() % 4096, 1 + random() % 4096, ended.back()->read_done());
      const std::optional<RawFrame> asked = host.raw->next();
      if (!asked || asked->envelope.type != FrameType::kTlp) break;
      const bool is_read = asked->header[0] == std::byte{0x00} || asked->header[0] == std::byte{0x20};
      if (!is_read) continue;  // the answer to a read of ours
      std::vector<std::byte> frame;
      const pcie::Tlp request = asked->tlp();
      switch (random() % 4) {
        case 0:
        case 1: {
          const pcie::ByteRange range = pcie::range_of(request);
          frame = host.raw->tlp_bytes(data_answer(request, std::vector<std::byte>(request.length_dw * 4u),
                                                  static_cast<uint16_t>(range.bytes), range.address & 0x7f),
                                      asked->envelope.transaction);
          break;
        }
        case 2:
          frame = host.raw->tlp_bytes(
              pcie::make_completion_status(request, pcie::CplStatus::kUnsupportedRequest, kFunctionId),
              asked->envelope.transaction);
          break;
        default:
          frame = host.raw->tlp_bytes(
              pcie::make_mem_read(HostMemory::kBase + random() % 4096 / 64 * 64, 64, random() % 256, kFunctionId),
              random());
      }
      for (unsigned k = random() % 3; k != 0; --k)
        frame[random() % std::min<size_t>(frame.size(), 48)] = static_cast<std::byte>(random());
      host.raw->send_bytes(frame);
    }
    host.raw->transport().shutdown();
    host.wait_loss().IgnoreError();
    for (auto& e : ended) {
      e->wait();
      EXPECT_EQ(e->times(), 1);
    }
  }
}

}  // namespace
}  // namespace dxpu::fabric::testing
