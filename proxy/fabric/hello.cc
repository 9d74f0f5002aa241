#include "proxy/fabric/hello.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"

namespace dxpu::fabric {
namespace {

constexpr char kReasonUrl[] = "type.dxpu/fabric.TerminateReason";
constexpr uint32_t kMinPayload = 128;
constexpr uint32_t kMaxOutstanding = 1024;  // a tag has 10 bits
constexpr uint32_t kMaxKeepAliveMs = 3600 * 1000;

bool size_ok(uint32_t value) {
  return value >= kMinPayload && value <= pcie::kMaxPayloadBytes && std::has_single_bit(value);
}

bool bad(FrameError& error, TerminateReason reason, size_t offset_in_header, std::string detail) {
  error = {reason, static_cast<uint32_t>(kEnvelopeBytes + offset_in_header), std::move(detail)};
  return false;
}

template <size_t N>
void put_string(const std::string& in, std::array<char, N>& out, Le<uint8_t>& bytes) {
  const size_t n = std::min(in.size(), N);
  out.fill('\0');
  std::copy_n(in.data(), n, out.data());
  bytes.set(static_cast<uint8_t>(n));
}

// Ids end up in logs and tables: printable ASCII only.
template <size_t N>
bool get_string(const std::array<char, N>& in, uint8_t bytes, std::string& out) {
  if (bytes > N) return false;
  out.assign(in.data(), bytes);
  return std::all_of(out.begin(), out.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

uint32_t to_ms(absl::Duration d) {
  return static_cast<uint32_t>(std::clamp<int64_t>(absl::ToInt64Milliseconds(d), 1, kMaxKeepAliveMs));
}

std::vector<std::byte> frame_of(FrameType type, const void* header, size_t header_bytes, size_t payload_bytes) {
  std::vector<std::byte> out(kEnvelopeBytes + header_bytes + payload_bytes);
  Envelope envelope;
  envelope.type = type;
  envelope.header_bytes = static_cast<uint16_t>(header_bytes);
  envelope.total_bytes = static_cast<uint32_t>(out.size());
  encode_envelope(envelope, std::span<std::byte, kEnvelopeBytes>(out.data(), kEnvelopeBytes));
  std::memcpy(out.data() + kEnvelopeBytes, header, header_bytes);
  return out;
}

}  // namespace

absl::Status check(const SessionOptions& options) {
  DXPU_RETURN_IF_ERROR(check(options.deadlines));
  const auto refuse = [](const char* name, uint32_t value, const char* rule) {
    return absl::InvalidArgumentError(absl::StrCat("session option ", name, " is ", value, ": ", rule));
  };
  if (!size_ok(options.max_payload)) {
    return refuse("max_payload", options.max_payload, "must be a power of two from 128 to 4096");
  }
  if (!size_ok(options.max_read_request)) {
    return refuse("max_read_request", options.max_read_request, "must be a power of two from 128 to 4096");
  }
  if (options.read_completion_boundary != 64 && options.read_completion_boundary != 128) {
    return refuse("read_completion_boundary", options.read_completion_boundary, "must be 64 or 128");
  }
  if (options.max_outstanding < 1 || options.max_outstanding > kMaxOutstanding) {
    return refuse("max_outstanding", options.max_outstanding, "must be from 1 to 1024");
  }
  if (options.clock == nullptr) return absl::InvalidArgumentError("session option clock is missing");
  return absl::OkStatus();
}

std::vector<std::byte> encode_hello_frame(const Ticket& ticket, const SessionOptions& options) {
  HelloWire wire{};
  wire.magic.set(kHelloMagic);
  wire.version_min.set(kVersionMin);
  wire.version_max.set(kVersionMax);
  wire.max_payload.set(options.max_payload);
  wire.max_read_request.set(options.max_read_request);
  wire.read_completion_boundary.set(options.read_completion_boundary);
  wire.max_outstanding.set(options.max_outstanding);
  wire.keep_alive_ms.set(to_ms(options.deadlines.keep_alive));
  wire.slot.set(ticket.slot);
  wire.generation.set(ticket.generation);
  wire.token = ticket.token;
  put_string(ticket.host_id, wire.host_id, wire.host_id_bytes);
  put_string(ticket.box_id, wire.box_id, wire.box_id_bytes);
  put_string(ticket.attachment_id, wire.attachment_id, wire.attachment_id_bytes);
  return frame_of(FrameType::kHello, &wire, sizeof(wire), 0);
}

bool decode_hello(std::span<const std::byte> header, Hello& out, FrameError& error) {
  constexpr TerminateReason kBad = TerminateReason::kProtocolError;
  if (header.size() != sizeof(HelloWire)) return bad(error, kBad, 0, "hello of a wrong size");
  HelloWire wire;
  std::memcpy(&wire, header.data(), sizeof(wire));
  if (wire.magic.get() != kHelloMagic)
    return bad(error, kBad, offsetof(HelloWire, magic), "not a dxpu fabric hello (magic)");
  const uint16_t low = wire.version_min.get(), high = wire.version_max.get();
  if (low > high) return bad(error, kBad, offsetof(HelloWire, version_min), "hello with an empty version range");
  if (low > kVersionMax || high < kVersionMin) {
    return bad(error, TerminateReason::kVersion, offsetof(HelloWire, version_min),
               absl::StrCat("no common version: the host speaks ", low, " to ", high, ", this box ", kVersionMin,
                            " to ", kVersionMax, "; upgrade the older side"));
  }
  out.version = std::min(high, kVersionMax);
  if (const uint64_t unknown = wire.features_mandatory.get() & ~kFeaturesKnown; unknown != 0) {
    return bad(error, TerminateReason::kVersion, offsetof(HelloWire, features_mandatory),
               absl::StrCat("mandatory features 0x", absl::Hex(unknown), " are not known here"));
  }
  out.features = (wire.features_optional.get() | wire.features_mandatory.get()) & kFeaturesKnown;
  out.max_payload = wire.max_payload.get();
  if (!size_ok(out.max_payload)) {
    return bad(error, kBad, offsetof(HelloWire, max_payload), absl::StrCat("max_payload ", out.max_payload));
  }
  out.max_read_request = wire.max_read_request.get();
  if (!size_ok(out.max_read_request)) {
    return bad(error, kBad, offsetof(HelloWire, max_read_request),
               absl::StrCat("max_read_request ", out.max_read_request));
  }
  out.read_completion_boundary = wire.read_completion_boundary.get();
  if (out.read_completion_boundary != 64 && out.read_completion_boundary != 128) {
    return bad(error, kBad, offsetof(HelloWire, read_completion_boundary),
               absl::StrCat("read_completion_boundary ", out.read_completion_boundary));
  }
  out.max_outstanding = wire.max_outstanding.get();
  if (out.max_outstanding < 1 || out.max_outstanding > kMaxOutstanding) {
    return bad(error, kBad, offsetof(HelloWire, max_outstanding),
               absl::StrCat("max_outstanding ", out.max_outstanding));
  }
  const uint32_t keep_alive = wire.keep_alive_ms.get();
  if (keep_alive < 1 || keep_alive > kMaxKeepAliveMs) {
    return bad(error, kBad, offsetof(HelloWire, keep_alive_ms), absl::StrCat("keep_alive_ms ", keep_alive));
  }
  out.keep_alive = absl::Milliseconds(keep_alive);
  if (wire.resume_epoch.get() != 0) {
    return bad(error, kBad, offsetof(HelloWire, resume_epoch), "resuming an epoch is not supported in version 1");
  }
  out.ticket.slot = wire.slot.get();
  out.ticket.generation = wire.generation.get();
  out.ticket.token = wire.token;
  if (!get_string(wire.host_id, wire.host_id_bytes.get(), out.ticket.host_id)) {
    return bad(error, kBad, offsetof(HelloWire, host_id), "host id too long or not printable");
  }
  if (!get_string(wire.box_id, wire.box_id_bytes.get(), out.ticket.box_id)) {
    return bad(error, kBad, offsetof(HelloWire, box_id), "box id too long or not printable");
  }
  if (!get_string(wire.attachment_id, wire.attachment_id_bytes.get(), out.ticket.attachment_id)) {
    return bad(error, kBad, offsetof(HelloWire, attachment_id), "attachment id too long or not printable");
  }
  return true;
}

HelloAck answer_hello(const Hello& hello, const SessionOptions& options, uint64_t epoch) {
  HelloAck ack;
  ack.version = hello.version;
  ack.features = hello.features & kFeaturesKnown;
  ack.max_payload = std::min(hello.max_payload, options.max_payload);
  ack.max_read_request = std::min(hello.max_read_request, options.max_read_request);
  ack.read_completion_boundary = std::min(hello.read_completion_boundary, options.read_completion_boundary);
  ack.max_outstanding = options.max_outstanding;
  ack.keep_alive = options.deadlines.keep_alive;
  ack.epoch = epoch;
  size_t filled = 0;
  while (filled < ack.session_key.size()) {
    const ssize_t n = getrandom(ack.session_key.data() + filled, ack.session_key.size() - filled, 0);
    if (n > 0) filled += static_cast<size_t>(n);
  }
  return ack;
}

Negotiated negotiate(const Hello& hello, const SessionOptions& options) {
  Negotiated out;
  out.version = hello.version;
  out.features = hello.features & kFeaturesKnown;
  out.max_payload = std::min(hello.max_payload, options.max_payload);
  out.max_read_request = std::min(hello.max_read_request, options.max_read_request);
  out.read_completion_boundary = std::min(hello.read_completion_boundary, options.read_completion_boundary);
  out.we_accept = options.max_outstanding;
  out.peer_accepts = hello.max_outstanding;
  return out;
}

std::vector<std::byte> encode_hello_ack_frame(const HelloAck& ack, const pcie::ConfigSpace& config) {
  HelloAckWire wire{};
  wire.magic.set(kHelloAckMagic);
  wire.version.set(ack.version);
  wire.features.set(ack.features);
  wire.max_payload.set(ack.max_payload);
  wire.max_read_request.set(ack.max_read_request);
  wire.read_completion_boundary.set(ack.read_completion_boundary);
  wire.max_outstanding.set(ack.max_outstanding);
  wire.keep_alive_ms.set(to_ms(ack.keep_alive));
  wire.epoch.set(ack.epoch);
  wire.session_key = ack.session_key;
  put_string(ack.model, wire.model, wire.model_bytes);
  std::vector<std::byte> out = frame_of(FrameType::kHelloAck, &wire, sizeof(wire), kHelloAckPayloadBytes);
  std::byte* at = out.data() + kEnvelopeBytes + sizeof(wire);
  for (auto part : {config.bytes(), config.write_mask(), config.w1c_mask()}) {
    std::memcpy(at, part.data(), part.size());
    at += part.size();
  }
  return out;
}

bool decode_hello_ack(std::span<const std::byte> header, std::span<const std::byte> payload,
                      const SessionOptions& offered, HelloAck& out, FrameError& error) {
  constexpr TerminateReason kBad = TerminateReason::kProtocolError;
  if (header.size() != sizeof(HelloAckWire) || payload.size() != kHelloAckPayloadBytes) {
    return bad(error, kBad, 0, "hello answer of a wrong size");
  }
  HelloAckWire wire;
  std::memcpy(&wire, header.data(), sizeof(wire));
  if (wire.magic.get() != kHelloAckMagic) {
    return bad(error, kBad, offsetof(HelloAckWire, magic), "not a dxpu fabric hello answer (magic)");
  }
  out.version = wire.version.get();
  if (out.version < kVersionMin || out.version > kVersionMax) {
    return bad(error, TerminateReason::kVersion, offsetof(HelloAckWire, version),
               absl::StrCat("the box chose version ", out.version, ", which was not offered"));
  }
  out.features = wire.features.get();
  if ((out.features & ~kFeaturesKnown) != 0) {
    return bad(error, TerminateReason::kVersion, offsetof(HelloAckWire, features),
               "the box chose features that were not offered");
  }
  out.max_payload = wire.max_payload.get();
  if (!size_ok(out.max_payload) || out.max_payload > offered.max_payload) {
    return bad(error, kBad, offsetof(HelloAckWire, max_payload), absl::StrCat("max_payload ", out.max_payload));
  }
  out.max_read_request = wire.max_read_request.get();
  if (!size_ok(out.max_read_request) || out.max_read_request > offered.max_read_request) {
    return bad(error, kBad, offsetof(HelloAckWire, max_read_request),
               absl::StrCat("max_read_request ", out.max_read_request));
  }
  out.read_completion_boundary = wire.read_completion_boundary.get();
  if ((out.read_completion_boundary != 64 && out.read_completion_boundary != 128) ||
      out.read_completion_boundary > offered.read_completion_boundary) {
    return bad(error, kBad, offsetof(HelloAckWire, read_completion_boundary),
               absl::StrCat("read_completion_boundary ", out.read_completion_boundary));
  }
  out.max_outstanding = wire.max_outstanding.get();
  if (out.max_outstanding < 1 || out.max_outstanding > kMaxOutstanding) {
    return bad(error, kBad, offsetof(HelloAckWire, max_outstanding),
               absl::StrCat("max_outstanding ", out.max_outstanding));
  }
  const uint32_t keep_alive = wire.keep_alive_ms.get();
  if (keep_alive < 1 || keep_alive > kMaxKeepAliveMs) {
    return bad(error, kBad, offsetof(HelloAckWire, keep_alive_ms), absl::StrCat("keep_alive_ms ", keep_alive));
  }
  out.keep_alive = absl::Milliseconds(keep_alive);
  out.epoch = wire.epoch.get();
  if (out.epoch == 0) return bad(error, kBad, offsetof(HelloAckWire, epoch), "epoch 0");
  out.session_key = wire.session_key;
  if (!get_string(wire.model, wire.model_bytes.get(), out.model)) {
    return bad(error, kBad, offsetof(HelloAckWire, model), "model too long or not printable");
  }
  for (size_t i = 0; i < out.image.size(); ++i) {
    const auto part = payload.subspan(i * pcie::kConfigSpaceBytes, pcie::kConfigSpaceBytes);
    out.image[i].assign(part.begin(), part.end());
  }
  return true;
}

std::vector<std::byte> encode_terminate_frame(TerminateReason reason, uint32_t offset, const std::string& detail) {
  TerminateWire wire{};
  wire.reason.set(static_cast<uint16_t>(reason));
  wire.offset.set(offset);
  const size_t bytes = std::min<size_t>(detail.size(), kMaxTerminateDetail);
  std::vector<std::byte> out = frame_of(FrameType::kTerminate, &wire, sizeof(wire), bytes);
  std::memcpy(out.data() + kEnvelopeBytes + sizeof(wire), detail.data(), bytes);
  return out;
}

Terminate decode_terminate(std::span<const std::byte> header, std::span<const std::byte> payload) {
  Terminate out;
  if (header.size() != sizeof(TerminateWire)) return out;
  TerminateWire wire;
  std::memcpy(&wire, header.data(), sizeof(wire));
  out.reason = static_cast<TerminateReason>(wire.reason.get());
  out.offset = wire.offset.get();
  for (std::byte b : payload.first(std::min<size_t>(payload.size(), kMaxTerminateDetail))) {
    const char c = static_cast<char>(b);
    out.detail.push_back(c >= 0x20 && c < 0x7f ? c : '?');
  }
  return out;
}

namespace {
absl::Status coded(TerminateReason reason, const std::string& text) {
  switch (reason) {
    case TerminateReason::kShutdown:
      return absl::CancelledError(text);
    case TerminateReason::kTicketUnknown:
      return absl::PermissionDeniedError(text);
    case TerminateReason::kVersion:
    case TerminateReason::kTicketStale:
    case TerminateReason::kBusy:
    case TerminateReason::kLeaseExpired:
      return absl::FailedPreconditionError(text);
    default:
      return absl::AbortedError(text);
  }
}
}  // namespace

absl::Status to_status(const Terminate& terminate) {
  std::string text = absl::StrCat("the peer ended the session: ", name_of(terminate.reason));
  if (terminate.offset != 0) absl::StrAppend(&text, " at byte ", terminate.offset);
  if (!terminate.detail.empty()) absl::StrAppend(&text, " (", terminate.detail, ")");
  absl::Status out = coded(terminate.reason, text);
  out.SetPayload(kReasonUrl, absl::Cord(std::to_string(static_cast<uint16_t>(terminate.reason))));
  return out;
}

TerminateReason reason_of(const absl::Status& status) {
  uint32_t number = 0;
  auto payload = status.GetPayload(kReasonUrl);
  if (!payload || !absl::SimpleAtoi(std::string(*payload), &number)) return TerminateReason::kNone;
  return static_cast<TerminateReason>(number);
}

absl::Status receive_hello_frame(Transport& transport, absl::Duration deadline, std::vector<std::byte>& bytes,
                                 Frame& frame, FrameError& error) {
  const absl::Time until = absl::Now() + deadline;
  bytes.resize(kEnvelopeBytes);
  size_t have = 0;
  bool envelope_done = false;
  while (true) {
    while (have < bytes.size()) {
      const absl::Duration left = until - absl::Now();
      if (left <= absl::ZeroDuration()) {
        return absl::DeadlineExceededError(absl::StrCat(transport.description(), ": only ", have,
                                                        " bytes of the peer's hello within ",
                                                        absl::FormatDuration(deadline)));
      }
      DXPU_ASSIGN_OR_RETURN(const size_t n, transport.receive(std::span(bytes).subspan(have), left));
      have += n;
    }
    if (envelope_done) break;
    // Lengths are proved before a byte more is allocated or waited for.
    if (!decode_envelope(std::span<const std::byte, kEnvelopeBytes>(bytes.data(), kEnvelopeBytes), Phase::kHello, 0,
                         frame.envelope, error)) {
      return absl::InvalidArgumentError(absl::StrCat(transport.description(), ": ", error.detail));
    }
    envelope_done = true;
    bytes.resize(frame.envelope.total_bytes);
  }
  frame.header = std::span<const std::byte>(bytes).subspan(kEnvelopeBytes, frame.envelope.header_bytes);
  frame.payload = std::span<const std::byte>(bytes).subspan(kEnvelopeBytes + frame.envelope.header_bytes);
  return absl::OkStatus();
}

}  // namespace dxpu::fabric
