// Frames: the envelope as a value, and a resumable parser.
//
// What this is: the framing layer. It proves that a frame's lengths are within bounds and agree with its type before a
// byte of payload is waited for. What it is not: sequence checks, TLP rules, tags. Pure; no input has undefined
// behaviour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proxy/fabric/wire.h"

namespace dxpu::fabric {

struct Envelope {
  FrameType type = FrameType::kTlp;
  uint8_t flags = 0;
  uint16_t header_bytes = 0;
  uint32_t total_bytes = 0;
  uint32_t stream = 0;
  uint32_t sequence = 0;
  uint32_t ack = 0;
  uint32_t transaction = 0;
  bool operator==(const Envelope&) const = default;
};

// Why a stream can no longer be trusted.
struct FrameError {
  TerminateReason reason = TerminateReason::kProtocolError;
  uint32_t offset = 0;  // of the offending byte, counted from the start of the frame
  std::string detail;
};

enum class Phase : uint8_t {
  kHello,  // Hello, HelloAck, Terminate
  kLive,   // everything but Hello and HelloAck
};

void encode_envelope(const Envelope& envelope, std::span<std::byte, kEnvelopeBytes> out);
// False: `error` says why. `max_payload` bounds the payload of a Tlp frame.
bool decode_envelope(std::span<const std::byte, kEnvelopeBytes> in, Phase phase, uint32_t max_payload, Envelope& out,
                     FrameError& error);

// A whole frame inside the parser's buffer; valid until the next call of the parser.
struct Frame {
  Envelope envelope;
  std::span<const std::byte> header;
  std::span<const std::byte> payload;
};

// Fed by byte counts: receive into writable(), say commit(n), take frames until kMore.
class FrameParser {
 public:
  enum class Result { kFrame, kMore, kBad };

  FrameParser(Phase phase, uint32_t max_payload, size_t buffer_bytes);

  // Never empty once next() has returned kMore.
  std::span<std::byte> writable();
  void commit(size_t bytes);
  Result next(Frame& frame, FrameError& error);

 private:
  Phase phase_;
  uint32_t max_payload_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace dxpu::fabric
