// The hello exchange: Hello, HelloAck and Terminate frames to and from values. Pure except for the two receive helpers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proxy/fabric/frame.h"
#include "proxy/fabric/session.h"
#include "proxy/fabric/transport/transport.h"
#include "proxy/pcie/config_space.h"

namespace dxpu::fabric {

// What both ends agreed on.
struct Negotiated {
  uint16_t version = kVersionMax;
  uint64_t features = 0;
  uint32_t max_payload = 0;
  uint32_t max_read_request = 0;
  uint32_t read_completion_boundary = 0;
  uint32_t we_accept = 0;     // non-posted requests the peer may have in flight towards us
  uint32_t peer_accepts = 0;  // … and we towards the peer
};

// The box's answer, decoded.
struct HelloAck {
  uint16_t version = 0;
  uint64_t features = 0;
  uint32_t max_payload = 0;
  uint32_t max_read_request = 0;
  uint32_t read_completion_boundary = 0;
  uint32_t max_outstanding = 0;
  absl::Duration keep_alive;
  uint64_t epoch = 0;
  std::array<std::byte, 32> session_key{};
  std::string model;
  std::array<std::vector<std::byte>, 3> image;  // configuration bytes, write mask, write-one-to-clear mask
};

struct Terminate {
  TerminateReason reason = TerminateReason::kNone;
  uint32_t offset = 0;
  std::string detail;  // printable
};

// INVALID_ARGUMENT names the option. Also what a peer's hello has to satisfy.
absl::Status check(const SessionOptions& options);

std::vector<std::byte> encode_hello_frame(const Ticket& ticket, const SessionOptions& options);
// `header` is a Hello frame's header. False: `error` says why, `offset` counted from the start of the frame.
bool decode_hello(std::span<const std::byte> header, Hello& out, FrameError& error);

// The values of the answer to `hello` (everything but the configuration image).
HelloAck answer_hello(const Hello& hello, const SessionOptions& options, uint64_t epoch);
Negotiated negotiate(const Hello& hello, const SessionOptions& options);
std::vector<std::byte> encode_hello_ack_frame(const HelloAck& ack, const pcie::ConfigSpace& config);
// Also checks the answer against what we offered.
bool decode_hello_ack(std::span<const std::byte> header, std::span<const std::byte> payload,
                      const SessionOptions& offered, HelloAck& out, FrameError& error);

std::vector<std::byte> encode_terminate_frame(TerminateReason reason, uint32_t offset, const std::string& detail);
Terminate decode_terminate(std::span<const std::byte> header, std::span<const std::byte> payload);
// The peer's reason as a Status: "<who> ended the session: <reason> (<detail>)".
absl::Status to_status(const Terminate& terminate);

// Takes exactly one frame of the hello phase off the transport. INVALID_ARGUMENT with `error` filled: malformed.
// DEADLINE_EXCEEDED, UNAVAILABLE.
absl::Status receive_hello_frame(Transport& transport, absl::Duration deadline, std::vector<std::byte>& bytes,
                                 Frame& frame, FrameError& error);

}  // namespace dxpu::fabric
