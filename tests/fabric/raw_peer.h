// The other end of a session, spoken by hand: tests say byte by byte what a peer does.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "proxy/fabric/frame.h"
#include "proxy/fabric/hello.h"
#include "proxy/fabric/tlp_io.h"
#include "proxy/pcie/split.h"
#include "tests/fabric/harness.h"

namespace dxpu::fabric::testing {

struct RawFrame {
  Envelope envelope;
  std::vector<std::byte> header, payload;
  pcie::Tlp tlp() const {
    pcie::Tlp out;
    FrameError error;
    const Frame frame{envelope, header, payload};
    EXPECT_TRUE(unpack(frame, out, error)) << error.detail;
    out.payload = payload;
    return out;
  }
  Terminate terminate() const { return decode_terminate(header, payload); }
};

class RawPeer {
 public:
  explicit RawPeer(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  Transport& transport() { return *transport_; }
  void send_bytes(std::span<const std::byte> bytes) {
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    // A peer that has hung up already is what some tests are about.
    transport_->send({&part, 1}, kPatience).IgnoreError();
  }

  // A TLP frame as bytes, numbered as the next one.
  std::vector<std::byte> tlp_bytes(const pcie::Tlp& tlp, uint32_t transaction) {
    Packet packet;
    EXPECT_TRUE(pack(tlp, transaction, tlp.payload, packet).ok()) << pcie::to_string(tlp);
    std::vector<std::byte> out(packet.head.begin(), packet.head.begin() + packet.head_bytes);
    out.insert(out.end(), packet.payload, packet.payload + packet.payload_bytes);
    Le<uint32_t> sequence;
    sequence.set(++sequence_);
    std::memcpy(out.data() + offsetof(EnvelopeWire, sequence), &sequence, 4);
    return out;
  }
  void send_tlp(const pcie::Tlp& tlp, uint32_t transaction = 0) { send_bytes(tlp_bytes(tlp, transaction)); }

  // The next frame but Ping and Pong; nothing when the peer hung up or the patience is over. Answers pings when told
  // to.
  std::optional<RawFrame> next(absl::Duration patience = kPatience) {
    const absl::Time until = absl::Now() + patience;
    while (true) {
      std::optional<RawFrame> frame = read_frame(until);
      if (!frame) return frame;
      if (frame->envelope.type == FrameType::kPing) {
        ++pings_;
        if (answer_pings_) {
          Packet packet;
          pack_control(FrameType::kPong, 0, 0, frame->header, packet);
          send_bytes(std::span(packet.head).first(packet.head_bytes));
        }
        continue;
      }
      if (frame->envelope.type == FrameType::kPong) continue;
      return frame;
    }
  }
  // The Terminate that has to come, whatever comes before it.
  Terminate expect_terminate() {
    while (true) {
      std::optional<RawFrame> frame = next();
      if (!frame) {
        ADD_FAILURE() << "hung up without a Terminate";
        return {};
      }
      if (frame->envelope.type == FrameType::kTerminate) return frame->terminate();
    }
  }

  // ---- as a box
  void answer_hello_with(const pcie::ConfigSpace& config, const SessionOptions& options,
                         const std::function<void(std::vector<std::byte>&)>& mutate = nullptr) {
    std::vector<std::byte> bytes;
    Frame frame;
    FrameError error;
    ASSERT_TRUE(receive_hello_frame(*transport_, kPatience, bytes, frame, error).ok());
    Hello hello;
    ASSERT_TRUE(decode_hello(frame.header, hello, error)) << error.detail;
    std::vector<std::byte> ack = encode_hello_ack_frame(answer_hello(hello, options, 9), config);
    if (mutate) mutate(ack);
    send_bytes(ack);
  }
  // Answers configuration writes until the command register has been written.
  void serve_programming() {
    while (true) {
      std::optional<RawFrame> frame = next();
      ASSERT_TRUE(frame.has_value());
      const pcie::Tlp request = frame->tlp();
      ASSERT_EQ(request.type, pcie::TlpType::kCfgWrite0);
      send_tlp(pcie::make_completion_status(request, pcie::CplStatus::kSuccess, kFunctionId),
               frame->envelope.transaction);
      if (request.config_register == 4) return;
    }
  }

  uint32_t sequence_ = 0;
  bool answer_pings_ = true;
  std::atomic<int> pings_{0};

 private:
  std::optional<RawFrame> read_frame(absl::Time until) {
    RawFrame out;
    std::vector<std::byte> envelope(kEnvelopeBytes);
    FrameError error;
    if (!read(envelope, until)) return std::nullopt;
    if (!decode_envelope(std::span<const std::byte, kEnvelopeBytes>(envelope.data(), kEnvelopeBytes), Phase::kLive,
                         4096, out.envelope, error)) {
      ADD_FAILURE() << "bad frame: " << error.detail;
      return std::nullopt;
    }
    out.header.resize(out.envelope.header_bytes);
    out.payload.resize(out.envelope.total_bytes - kEnvelopeBytes - out.header.size());
    if (!read(out.header, until) || !read(out.payload, until)) return std::nullopt;
    return out;
  }
  bool read(std::span<std::byte> out, absl::Time until) {
    while (!out.empty()) {
      const absl::Duration left = until - absl::Now();
      if (left <= absl::ZeroDuration()) return false;
      const absl::StatusOr<size_t> n = transport_->receive(out, left);
      if (!n.ok()) return false;
      out = out.subspan(*n);
    }
    return true;
  }
  std::unique_ptr<Transport> transport_;
};

// A real host end against a box spoken by hand.
struct HostUnderTest {
  explicit HostUnderTest(SessionOptions options = patient_options(), SessionOptions box_options = patient_options())
      : memory(1 << 20) {
    auto [host, box] = tcp_pair();
    raw = std::make_unique<RawPeer>(std::move(box));
    std::thread script([&] {
      raw->answer_hello_with(function.config(), box_options);
      raw->serve_programming();
    });
    auto connected =
        RemoteFunction::connect(std::move(host), ticket(), options, kPatience, [this](absl::Status status) {
          std::lock_guard lock(mutex);
          loss = status;
          ++losses;
        });
    script.join();
    EXPECT_TRUE(connected.ok()) << connected.status();
    if (connected.ok()) remote = *std::move(connected);
    if (remote) remote->connect(&memory);
  }
  absl::Status wait_loss() {
    EXPECT_TRUE(eventually([&] { return losses == 1; }));
    std::lock_guard lock(mutex);
    return loss;
  }
  HostMemory memory;
  TestFunction function;
  std::mutex mutex;
  absl::Status loss;
  std::atomic<int> losses{0};
  std::unique_ptr<RawPeer> raw;
  std::unique_ptr<RemoteFunction> remote;
};

// A real box end against a host spoken by hand. BAR2 (RAM) is programmed to kRamAt, BAR0 to kRegistersAt.
struct BoxUnderTest {
  static constexpr uint64_t kRegistersAt = 0x20000000, kRamAt = 0x200000000;
  explicit BoxUnderTest(SessionOptions options = patient_options(), SessionOptions host_options = patient_options()) {
    auto [host, box] = tcp_pair();
    raw = std::make_unique<RawPeer>(std::move(host));
    raw->send_bytes(encode_hello_frame(ticket(), host_options));
    auto hello = read_hello(*box, kPatience);
    EXPECT_TRUE(hello.ok()) << hello.status();
    FunctionServer::Callbacks callbacks;
    callbacks.on_end = [this](absl::Status status) {
      std::lock_guard lock(mutex);
      end = status;
      ++ended;
    };
    auto served = FunctionServer::serve(function, std::move(box), *hello, 9, options, std::move(callbacks));
    EXPECT_TRUE(served.ok()) << served.status();
    server = *std::move(served);
    std::vector<std::byte> bytes;
    Frame frame;
    FrameError error;
    HelloAck ack;
    EXPECT_TRUE(receive_hello_frame(raw->transport(), kPatience, bytes, frame, error).ok());
    EXPECT_TRUE(decode_hello_ack(frame.header, frame.payload, host_options, ack, error)) << error.detail;
    config_write(0x10, kRegistersAt);
    config_write(0x18, static_cast<uint32_t>(kRamAt));
    config_write(0x1c, static_cast<uint32_t>(kRamAt >> 32));
    config_write(0x04, 0x6);
  }
  void config_write(uint16_t reg, uint32_t value) {
    pcie::Tlp tlp;
    tlp.type = pcie::TlpType::kCfgWrite0;
    tlp.requester = kHostId;
    tlp.target = kFunctionId;
    tlp.length_dw = 1;
    tlp.first_be = 0xf;
    tlp.config_register = reg;
    tlp.payload.resize(4);
    std::memcpy(tlp.payload.data(), &value, 4);
    const RawFrame answer = ask(tlp, 1);
    EXPECT_EQ(answer.tlp().status, pcie::CplStatus::kSuccess);
  }
  // Sends a request and takes the frame that answers it.
  RawFrame ask(const pcie::Tlp& tlp, uint32_t transaction) {
    raw->send_tlp(tlp, transaction);
    std::optional<RawFrame> answer = raw->next();
    EXPECT_TRUE(answer.has_value()) << "no answer to " << pcie::to_string(tlp);
    if (!answer) return {};
    EXPECT_EQ(answer->envelope.transaction, transaction);
    return *answer;
  }
  absl::Status wait_end() {
    EXPECT_TRUE(eventually([&] { return ended == 1; }));
    std::lock_guard lock(mutex);
    return end;
  }
  TestFunction function;
  std::mutex mutex;
  absl::Status end;
  std::atomic<int> ended{0};
  std::unique_ptr<RawPeer> raw;
  std::unique_ptr<FunctionServer> server;
};

}  // namespace dxpu::fabric::testing
