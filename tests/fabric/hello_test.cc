// The hello exchange: what must be refused first, then what must survive a round trip.
#include <functional>

#include "tests/fabric/raw_peer.h"

namespace dxpu::fabric::testing {
namespace {

using Mutate = std::function<void(std::vector<std::byte>&)>;

template <typename T>
Mutate set(size_t offset, T value) {
  return [offset, value](std::vector<std::byte>& frame) {
    Le<T> wire;
    wire.set(value);
    std::memcpy(frame.data() + offset, &wire, sizeof(T));
  };
}
constexpr size_t kH = kEnvelopeBytes;

struct BadHello {
  const char* name;
  Mutate mutate;
  TerminateReason reason;
  uint32_t offset;
};

TEST(Hello, BadHellosAreRefusedWithReasonAndOffset) {
  const std::vector<BadHello> cases = {
      {"magic", set<uint64_t>(kH + 0, 0x1234), TerminateReason::kProtocolError, kH},
      {"newer only", [](auto& f) { set<uint16_t>(kH + 8, 2)(f), set<uint16_t>(kH + 10, 9)(f); },
       TerminateReason::kVersion, kH + 8},
      {"older only", [](auto& f) { set<uint16_t>(kH + 8, 0)(f), set<uint16_t>(kH + 10, 0)(f); },
       TerminateReason::kVersion, kH + 8},
      {"empty range", [](auto& f) { set<uint16_t>(kH + 8, 3)(f), set<uint16_t>(kH + 10, 1)(f); },
       TerminateReason::kProtocolError, kH + 8},
      {"mandatory feature", set<uint64_t>(kH + 24, 1ull << 40), TerminateReason::kVersion, kH + 24},
      {"payload 0", set<uint32_t>(kH + 32, 0), TerminateReason::kProtocolError, kH + 32},
      {"payload 3000", set<uint32_t>(kH + 32, 3000), TerminateReason::kProtocolError, kH + 32},
      {"payload 8192", set<uint32_t>(kH + 32, 8192), TerminateReason::kProtocolError, kH + 32},
      {"read request 64", set<uint32_t>(kH + 36, 64), TerminateReason::kProtocolError, kH + 36},
      {"rcb 32", set<uint32_t>(kH + 40, 32), TerminateReason::kProtocolError, kH + 40},
      {"outstanding 0", set<uint32_t>(kH + 44, 0), TerminateReason::kProtocolError, kH + 44},
      {"outstanding 1025", set<uint32_t>(kH + 44, 1025), TerminateReason::kProtocolError, kH + 44},
      {"keep-alive 0", set<uint32_t>(kH + 48, 0), TerminateReason::kProtocolError, kH + 48},
      {"resume", set<uint64_t>(kH + 64, 3), TerminateReason::kProtocolError, kH + 64},
      {"host id too long", set<uint8_t>(kH + 144, 65), TerminateReason::kProtocolError, kH + 152},
      {"host id unprintable", set<uint8_t>(kH + 152, 7), TerminateReason::kProtocolError, kH + 152},
      {"box id too long", set<uint8_t>(kH + 145, 255), TerminateReason::kProtocolError, kH + 216},
      {"attachment id too long", set<uint8_t>(kH + 146, 200), TerminateReason::kProtocolError, kH + 280},
      {"frame too long", set<uint32_t>(4, 1u << 30), TerminateReason::kProtocolError, 4},
      {"frame too short", set<uint32_t>(4, 40), TerminateReason::kProtocolError, 4},
      {"wrong type", set<uint8_t>(0, 3), TerminateReason::kProtocolError, 0},
      {"unknown type", set<uint8_t>(0, 200), TerminateReason::kProtocolError, 0},
  };
  for (const BadHello& c : cases) {
    SCOPED_TRACE(c.name);
    auto [host, box] = tcp_pair();
    RawPeer raw(std::move(host));
    std::vector<std::byte> frame = encode_hello_frame(ticket(), patient_options());
    c.mutate(frame);
    raw.send_bytes(frame);
    const absl::StatusOr<Hello> hello = read_hello(*box, kPatience);
    EXPECT_EQ(hello.status().code(), absl::StatusCode::kInvalidArgument) << hello.status();
    const Terminate got = raw.expect_terminate();
    EXPECT_EQ(got.reason, c.reason);
    EXPECT_EQ(got.offset, c.offset);
    EXPECT_FALSE(got.detail.empty());
  }
}

TEST(Hello, UnknownOptionalFeaturesAreIgnored) {
  auto [host, box] = tcp_pair();
  RawPeer raw(std::move(host));
  std::vector<std::byte> frame = encode_hello_frame(ticket(), patient_options());
  set<uint64_t>(kH + 16, ~uint64_t{0})(frame);
  set<uint16_t>(kH + 10, 77)(frame);  // also speaks versions of the future
  raw.send_bytes(frame);
  const absl::StatusOr<Hello> hello = read_hello(*box, kPatience);
  ASSERT_TRUE(hello.ok()) << hello.status();
  EXPECT_EQ(hello->version, kVersionMax);
  EXPECT_EQ(hello->features, 0u);
}

TEST(Hello, NotAByteMoreIsTaken) {
  auto [host, box] = tcp_pair();
  RawPeer raw(std::move(host));
  std::vector<std::byte> frame = encode_hello_frame(ticket(), patient_options());
  frame.push_back(std::byte{0x77});
  raw.send_bytes(frame);
  ASSERT_TRUE(read_hello(*box, kPatience).ok());
  std::byte next{};
  const absl::StatusOr<size_t> n = box->receive({&next, 1}, kPatience);
  ASSERT_TRUE(n.ok() && *n == 1);
  EXPECT_EQ(next, std::byte{0x77});
}

TEST(Hello, HalfAHelloEndsByItsDeadline) {
  auto [host, box] = tcp_pair();
  RawPeer raw(std::move(host));
  const std::vector<std::byte> frame = encode_hello_frame(ticket(), patient_options());
  raw.send_bytes(std::span(frame).first(100));
  const absl::StatusOr<Hello> hello = read_hello(*box, absl::Milliseconds(100));
  EXPECT_EQ(hello.status().code(), absl::StatusCode::kDeadlineExceeded) << hello.status();
  raw.transport().shutdown();
}

TEST(Hello, APeerThatHangsUpIsUnavailable) {
  auto [host, box] = tcp_pair();
  host->shutdown();
  EXPECT_EQ(read_hello(*box, kPatience).status().code(), absl::StatusCode::kUnavailable);
}

TEST(Hello, SerializedForAnotherProcess) {
  auto [host, box] = tcp_pair();
  RawPeer raw(std::move(host));
  SessionOptions options = patient_options();
  options.max_payload = 256;
  options.max_read_request = 1024;
  options.read_completion_boundary = 64;
  options.max_outstanding = 17;
  options.deadlines.keep_alive = absl::Milliseconds(123);
  raw.send_bytes(encode_hello_frame(ticket(), options));
  const absl::StatusOr<Hello> hello = read_hello(*box, kPatience);
  ASSERT_TRUE(hello.ok()) << hello.status();
  const absl::StatusOr<Hello> again = parse_hello(serialize(*hello));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->version, hello->version);
  EXPECT_EQ(again->max_payload, 256u);
  EXPECT_EQ(again->max_read_request, 1024u);
  EXPECT_EQ(again->read_completion_boundary, 64u);
  EXPECT_EQ(again->max_outstanding, 17u);
  EXPECT_EQ(again->keep_alive, absl::Milliseconds(123));
  EXPECT_EQ(again->ticket.host_id, "vm1");
  EXPECT_EQ(again->ticket.box_id, "b1");
  EXPECT_EQ(again->ticket.slot, 3u);
  EXPECT_EQ(again->ticket.attachment_id, "att-7");
  EXPECT_EQ(again->ticket.generation, 7u);
  EXPECT_EQ(again->ticket.token, ticket().token);
  std::string bytes = serialize(*hello);
  for (size_t n = 0; n < bytes.size(); n += 13) EXPECT_FALSE(parse_hello(bytes.substr(0, n)).ok());
  EXPECT_FALSE(parse_hello(bytes + "x").ok());
}

TEST(HelloAnswer, RefusalsBecomeStatuses) {
  const std::vector<std::pair<TerminateReason, absl::StatusCode>> cases = {
      {TerminateReason::kTicketUnknown, absl::StatusCode::kPermissionDenied},
      {TerminateReason::kTicketStale, absl::StatusCode::kFailedPrecondition},
      {TerminateReason::kBusy, absl::StatusCode::kFailedPrecondition},
      {TerminateReason::kVersion, absl::StatusCode::kFailedPrecondition},
      {TerminateReason::kShutdown, absl::StatusCode::kCancelled},
      {TerminateReason::kFunctionFailed, absl::StatusCode::kAborted},
  };
  for (const auto& [reason, code] : cases) {
    SCOPED_TRACE(name_of(reason));
    auto [host, box] = tcp_pair();
    ASSERT_TRUE(send_terminate(*box, reason, 0, "because of the test").ok());
    const auto remote = RemoteFunction::connect(std::move(host), ticket(), patient_options(), kPatience, nullptr);
    EXPECT_EQ(remote.status().code(), code) << remote.status();
    EXPECT_NE(std::string(remote.status().message()).find("because of the test"), std::string::npos);
  }
}

TEST(HelloAnswer, WhatWasNotOfferedIsRefused) {
  SessionOptions offered = patient_options();
  offered.max_payload = 512;
  offered.max_read_request = 512;
  offered.read_completion_boundary = 64;
  const std::vector<std::pair<const char*, Mutate>> cases = {
      {"magic", set<uint64_t>(kH, 5)},
      {"version", set<uint16_t>(kH + 8, 2)},
      {"features", set<uint64_t>(kH + 16, 1)},
      {"payload above offer", set<uint32_t>(kH + 24, 1024)},
      {"payload odd", set<uint32_t>(kH + 24, 100)},
      {"read request above offer", set<uint32_t>(kH + 28, 1024)},
      {"boundary above offer", set<uint32_t>(kH + 32, 128)},
      {"outstanding", set<uint32_t>(kH + 36, 5000)},
      {"keep-alive", set<uint32_t>(kH + 40, 0)},
      {"epoch", set<uint64_t>(kH + 48, 0)},
      {"image: header type", set<uint8_t>(kH + 168 + 0x0e, 0x01)},
      {"image: capability loop",
       [](auto& f) {
         const size_t at = kH + 168;
         f[at + 0x34] = std::byte{0x40};
         f[at + 0x40] = std::byte{0x01};
         f[at + 0x41] = std::byte{0x40};
       }},
  };
  TestFunction function;
  for (const auto& [name, mutate] : cases) {
    SCOPED_TRACE(name);
    auto [host, box] = tcp_pair();
    RawPeer raw(std::move(box));
    std::thread script([&] { raw.answer_hello_with(function.config(), offered, mutate); });
    const auto remote = RemoteFunction::connect(std::move(host), ticket(), offered, kPatience, nullptr);
    script.join();
    EXPECT_EQ(remote.status().code(), absl::StatusCode::kInvalidArgument) << remote.status();
    EXPECT_NE(raw.expect_terminate().reason, TerminateReason::kNone);
  }
}

TEST(HelloAnswer, SilenceAndHangingUp) {
  {
    auto [host, box] = tcp_pair();
    const auto remote =
        RemoteFunction::connect(std::move(host), ticket(), patient_options(), absl::Milliseconds(100), nullptr);
    EXPECT_EQ(remote.status().code(), absl::StatusCode::kDeadlineExceeded) << remote.status();
  }
  {
    auto [host, box] = tcp_pair();
    box->shutdown();
    const auto remote = RemoteFunction::connect(std::move(host), ticket(), patient_options(), kPatience, nullptr);
    EXPECT_EQ(remote.status().code(), absl::StatusCode::kUnavailable) << remote.status();
  }
  {  // A box that says hello and then nothing: no loss is reported, the call fails.
    auto [host, box] = tcp_pair();
    RawPeer raw(std::move(box));
    TestFunction function;
    std::thread script([&] { raw.answer_hello_with(function.config(), patient_options()); });
    std::atomic<int> losses{0};
    const auto remote = RemoteFunction::connect(std::move(host), ticket(), patient_options(), absl::Milliseconds(300),
                                                [&](absl::Status) { ++losses; });
    script.join();
    EXPECT_EQ(remote.status().code(), absl::StatusCode::kUnavailable) << remote.status();
    EXPECT_EQ(losses, 0);
  }
}

TEST(Options, TheRuleOfDeadlines) {
  EXPECT_TRUE(check(Deadlines()).ok());
  Deadlines d;
  d.read = absl::Seconds(3);
  EXPECT_EQ(check(d).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(check(d).message()).find("fast_io_fail"), std::string::npos);
  d = Deadlines();
  d.fast_io_fail = d.ctrl_loss;
  EXPECT_FALSE(check(d).ok());
  d = Deadlines();
  d.ctrl_loss = d.lease + absl::Seconds(1);
  EXPECT_FALSE(check(d).ok());
  d = Deadlines();
  d.read = absl::ZeroDuration();
  EXPECT_FALSE(check(d).ok());
  d = Deadlines();
  d.keep_alive = absl::Hours(1);
  EXPECT_FALSE(check(d).ok());
}

TEST(Endpoints, BadOnesAreNamed) {
  for (const char* bad : {"", "nowhere", "host:", ":7", "127.0.0.1:99999", "::1:80", "127.0.0.1:x"}) {
    EXPECT_EQ(tcp_connect(bad, absl::Seconds(1)).status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_FALSE(TcpListener::listen(bad).ok()) << bad;
  }
  auto listener = TcpListener::listen("127.0.0.1:0");
  ASSERT_TRUE(listener.ok());
  const auto nobody = (*listener)->accept(absl::Milliseconds(20));
  ASSERT_TRUE(nobody.ok());
  EXPECT_EQ(*nobody, nullptr);
  std::thread waiting([&] {
    const auto none = (*listener)->accept(kPatience);
    EXPECT_TRUE(none.ok() && *none == nullptr);
  });
  (*listener)->shutdown();
  waiting.join();
  const std::string endpoint = (*listener)->endpoint();
  listener->reset();
  EXPECT_EQ(tcp_connect(endpoint, absl::Seconds(1)).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace dxpu::fabric::testing
