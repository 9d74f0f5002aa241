#include "proxy/fabric/frame.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dxpu::fabric {
namespace {

struct TypeRule {
  Phase phase;
  bool both_phases;
  uint16_t header_min, header_max;  // only these two values are legal
  uint32_t payload_min, payload_max;
  bool sequenced;
  uint8_t flags;
};

// The one table that knows which lengths, flags and numbers a type may have.
bool rule_of(uint8_t type, uint32_t max_payload, TypeRule& rule) {
  switch (static_cast<FrameType>(type)) {
    case FrameType::kHello:
      rule = {Phase::kHello, false, sizeof(HelloWire), sizeof(HelloWire), 0, 0, false, 0};
      return true;
    case FrameType::kHelloAck:
      rule = {Phase::kHello,
              false,
              sizeof(HelloAckWire),
              sizeof(HelloAckWire),
              kHelloAckPayloadBytes,
              kHelloAckPayloadBytes,
              false,
              0};
      return true;
    case FrameType::kTlp:
      rule = {Phase::kLive, false, 12, 16, 0, max_payload, true, 0};
      return true;
    case FrameType::kPing:
    case FrameType::kPong:
      rule = {Phase::kLive, false, sizeof(PingWire), sizeof(PingWire), 0, 0, false, 0};
      return true;
    case FrameType::kReset:
      rule = {Phase::kLive, false, sizeof(ResetWire), sizeof(ResetWire), 0, 0, true, kFlagAnswer};
      return true;
    case FrameType::kTerminate:
      rule = {Phase::kLive, true, sizeof(TerminateWire), sizeof(TerminateWire), 0, kMaxTerminateDetail, false, 0};
      return true;
  }
  return false;
}

bool bad(FrameError& error, size_t offset, std::string detail) {
  error = {TerminateReason::kProtocolError, static_cast<uint32_t>(offset), std::move(detail)};
  return false;
}

}  // namespace

const char* name_of(FrameType type) {
  switch (type) {
    case FrameType::kHello:
      return "Hello";
    case FrameType::kHelloAck:
      return "HelloAck";
    case FrameType::kTlp:
      return "Tlp";
    case FrameType::kPing:
      return "Ping";
    case FrameType::kPong:
      return "Pong";
    case FrameType::kReset:
      return "Reset";
    case FrameType::kTerminate:
      return "Terminate";
  }
  return "unknown";
}

void encode_envelope(const Envelope& envelope, std::span<std::byte, kEnvelopeBytes> out) {
  EnvelopeWire wire{};
  wire.type.set(static_cast<uint8_t>(envelope.type));
  wire.flags.set(envelope.flags);
  wire.header_bytes.set(envelope.header_bytes);
  wire.total_bytes.set(envelope.total_bytes);
  wire.stream.set(envelope.stream);
  wire.sequence.set(envelope.sequence);
  wire.ack.set(envelope.ack);
  wire.transaction.set(envelope.transaction);
  std::memcpy(out.data(), &wire, sizeof(wire));
}

bool decode_envelope(std::span<const std::byte, kEnvelopeBytes> in, Phase phase, uint32_t max_payload, Envelope& out,
                     FrameError& error) {
  EnvelopeWire wire;
  std::memcpy(&wire, in.data(), sizeof(wire));
  TypeRule rule{};
  if (!rule_of(wire.type.get(), max_payload, rule)) {
    return bad(error, offsetof(EnvelopeWire, type), absl::StrCat("unknown frame type ", wire.type.get()));
  }
  out.type = static_cast<FrameType>(wire.type.get());
  const char* name = name_of(out.type);
  if (rule.phase != phase && !rule.both_phases) {
    return bad(error, offsetof(EnvelopeWire, type),
               absl::StrCat(name, phase == Phase::kHello ? " before the hello is over" : " after the hello"));
  }
  out.flags = wire.flags.get();
  if ((out.flags & ~rule.flags) != 0) {
    return bad(error, offsetof(EnvelopeWire, flags), absl::StrCat(name, " with unknown flags ", out.flags));
  }
  out.header_bytes = wire.header_bytes.get();
  if (out.header_bytes != rule.header_min && out.header_bytes != rule.header_max) {
    return bad(error, offsetof(EnvelopeWire, header_bytes),
               absl::StrCat(name, " with a header of ", out.header_bytes, " bytes"));
  }
  out.total_bytes = wire.total_bytes.get();
  const uint32_t fixed = kEnvelopeBytes + out.header_bytes;
  if (out.total_bytes < fixed + rule.payload_min || out.total_bytes > fixed + rule.payload_max) {
    return bad(error, offsetof(EnvelopeWire, total_bytes),
               absl::StrCat(name, " of ", out.total_bytes, " bytes, allowed are ", fixed + rule.payload_min, " to ",
                            fixed + rule.payload_max));
  }
  out.stream = wire.stream.get();
  if (out.stream != 0) return bad(error, offsetof(EnvelopeWire, stream), absl::StrCat("unknown stream ", out.stream));
  out.sequence = wire.sequence.get();
  if (!rule.sequenced && out.sequence != 0) {
    return bad(error, offsetof(EnvelopeWire, sequence), absl::StrCat(name, " with a sequence number"));
  }
  out.ack = wire.ack.get();
  out.transaction = wire.transaction.get();
  if (wire.credit_posted.get() != 0 || wire.credit_non_posted.get() != 0) {
    return bad(error, offsetof(EnvelopeWire, credit_posted), "credits were not negotiated");
  }
  return true;
}

FrameParser::FrameParser(Phase phase, uint32_t max_payload, size_t buffer_bytes)
    : phase_(phase), max_payload_(std::min(max_payload, pcie::kMaxPayloadBytes)) {
  // The largest frame of the phase has to fit, or kMore could leave writable() empty.
  const size_t largest = phase == Phase::kHello
                             ? kEnvelopeBytes + sizeof(HelloAckWire) + kHelloAckPayloadBytes
                             : kEnvelopeBytes + pcie::kMaxHeaderBytes + std::max(max_payload_, kMaxTerminateDetail);
  buffer_.resize(std::max(buffer_bytes, largest));
}

std::span<std::byte> FrameParser::writable() { return std::span(buffer_).subspan(end_); }

void FrameParser::commit(size_t bytes) { end_ += std::min(bytes, buffer_.size() - end_); }

FrameParser::Result FrameParser::next(Frame& frame, FrameError& error) {
  const size_t have = end_ - begin_;
  size_t need = kEnvelopeBytes;
  if (have >= kEnvelopeBytes) {
    const std::byte* start = buffer_.data() + begin_;
    if (!decode_envelope(std::span<const std::byte, kEnvelopeBytes>(start, kEnvelopeBytes), phase_, max_payload_,
                         frame.envelope, error)) {
      return Result::kBad;
    }
    need = frame.envelope.total_bytes;
    if (have >= need) {
      frame.header = {start + kEnvelopeBytes, frame.envelope.header_bytes};
      frame.payload = {start + kEnvelopeBytes + frame.envelope.header_bytes,
                       need - kEnvelopeBytes - frame.envelope.header_bytes};
      begin_ += need;
      return Result::kFrame;
    }
  }
  // Only what is left of one frame is moved, and only when the rest of the buffer is short of room for the next
  // receive.
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ != 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, have);
    begin_ = 0;
    end_ = have;
  }
  return Result::kMore;
}

}  // namespace dxpu::fabric
