#include "proxy/fabric/tlp_io.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"

namespace dxpu::fabric {
namespace {

constexpr size_t kInlinePayload = Packet::kHeadBytes - kEnvelopeBytes - pcie::kMaxHeaderBytes;
static_assert(kInlinePayload == 16, "two CAS operands of 8 bytes");

bool byte_enabled(const pcie::Tlp& request, uint32_t byte) {
  const uint32_t dw = byte / 4, bit = 1u << (byte % 4);
  if (dw == 0) return (request.first_be & bit) != 0;
  if (dw + 1u == request.length_dw) return (request.last_be & bit) != 0;
  return true;
}

}  // namespace

pcie::CplStatus status_of(function::Outcome outcome) {
  switch (outcome) {
    case function::Outcome::kSuccess:
      return pcie::CplStatus::kSuccess;
    case function::Outcome::kUnsupportedRequest:
      return pcie::CplStatus::kUnsupportedRequest;
    case function::Outcome::kConfigRetry:
      return pcie::CplStatus::kConfigRetry;
    default:
      return pcie::CplStatus::kCompleterAbort;
  }
}

function::Outcome outcome_of(pcie::CplStatus status) {
  switch (status) {
    case pcie::CplStatus::kSuccess:
      return function::Outcome::kSuccess;
    case pcie::CplStatus::kUnsupportedRequest:
      return function::Outcome::kUnsupportedRequest;
    case pcie::CplStatus::kConfigRetry:
      return function::Outcome::kConfigRetry;
    default:
      return function::Outcome::kCompleterAbort;
  }
}

absl::Status pack(const pcie::Tlp& tlp, uint32_t transaction, std::span<const std::byte> payload, Packet& packet) {
  std::byte* header = packet.head.data() + kEnvelopeBytes;
  absl::StatusOr<size_t> header_bytes =
      pcie::encode_header(tlp, std::span<std::byte, pcie::kMaxHeaderBytes>(header, pcie::kMaxHeaderBytes));
  if (!header_bytes.ok()) return header_bytes.status();
  const size_t expected = pcie::has_data(tlp.type) ? tlp.length_dw * size_t{4} : 0;
  if (payload.size() != expected) {
    return absl::InternalError(absl::StrCat("payload of ", payload.size(), " bytes for ", pcie::to_string(tlp)));
  }
  Envelope envelope;
  envelope.type = FrameType::kTlp;
  envelope.header_bytes = static_cast<uint16_t>(*header_bytes);
  envelope.total_bytes = static_cast<uint32_t>(kEnvelopeBytes + *header_bytes + payload.size());
  envelope.transaction = transaction;
  encode_envelope(envelope, std::span(packet.head).first<kEnvelopeBytes>());
  packet.head_bytes = static_cast<uint32_t>(kEnvelopeBytes + *header_bytes);
  packet.payload = nullptr;
  packet.payload_bytes = 0;
  if (payload.size() <= kInlinePayload) {
    if (!payload.empty()) std::memcpy(packet.head.data() + packet.head_bytes, payload.data(), payload.size());
    packet.head_bytes += static_cast<uint32_t>(payload.size());
  } else {
    packet.payload = payload.data();
    packet.payload_bytes = static_cast<uint32_t>(payload.size());
  }
  return absl::OkStatus();
}

void pack_control(FrameType type, uint8_t flags, uint32_t transaction, std::span<const std::byte> header,
                  Packet& packet) {
  Envelope envelope;
  envelope.type = type;
  envelope.flags = flags;
  envelope.header_bytes = static_cast<uint16_t>(header.size());
  envelope.total_bytes = static_cast<uint32_t>(kEnvelopeBytes + header.size());
  envelope.transaction = transaction;
  encode_envelope(envelope, std::span(packet.head).first<kEnvelopeBytes>());
  std::memcpy(packet.head.data() + kEnvelopeBytes, header.data(), header.size());
  packet.head_bytes = envelope.total_bytes;
}

bool unpack(const Frame& frame, pcie::Tlp& out, FrameError& error) {
  size_t header_bytes = 0;
  absl::StatusOr<pcie::Tlp> tlp = pcie::decode_header(frame.header, &header_bytes);
  if (!tlp.ok()) {
    error = {TerminateReason::kProtocolError, kEnvelopeBytes, absl::StrCat("malformed TLP: ", tlp.status().message())};
    return false;
  }
  if (header_bytes != frame.header.size()) {
    error = {TerminateReason::kProtocolError, offsetof(EnvelopeWire, header_bytes),
             absl::StrCat("TLP header of ", header_bytes, " bytes in a header of ", frame.header.size())};
    return false;
  }
  const size_t expected = pcie::has_data(tlp->type) ? tlp->length_dw * size_t{4} : 0;
  if (frame.payload.size() != expected) {
    error = {TerminateReason::kProtocolError, offsetof(EnvelopeWire, total_bytes),
             absl::StrCat("TLP says ", expected, " bytes of payload, the frame has ", frame.payload.size())};
    return false;
  }
  out = *std::move(tlp);
  return true;
}

void for_each_completion(const pcie::Tlp& request, pcie::RequesterId completer, uint32_t mps, uint32_t rcb,
                         absl::FunctionRef<void(const pcie::Tlp& completion, uint32_t offset, uint32_t bytes)> piece) {
  pcie::Tlp completion;
  completion.type = pcie::TlpType::kCompletionData;
  completion.requester = request.requester;
  completion.tag = request.tag;
  completion.completer = completer;
  completion.traffic_class = request.traffic_class;
  completion.attributes = request.attributes;

  const pcie::ByteRange range = pcie::range_of(request);
  const uint64_t dw_start = range.address & ~uint64_t{3};
  uint64_t at = range.address;
  uint32_t left = std::max<uint32_t>(range.bytes, 1);  // a zero-length read is answered with one DW and Byte Count 1
  while (left != 0) {
    uint64_t end = at + left;
    // As much as one completion may carry, counted from the DW that holds its first byte; cut short pieces at RCB.
    const uint64_t limit = (at & ~uint64_t{3}) + mps;
    if (end > limit) end = limit & ~uint64_t{rcb - 1};
    const uint64_t first_dw = at & ~uint64_t{3}, last_dw = (end + 3) & ~uint64_t{3};
    completion.length_dw = static_cast<uint16_t>((last_dw - first_dw) / 4);
    completion.byte_count = static_cast<uint16_t>(left);
    completion.lower_address = static_cast<uint8_t>(at & 0x7f);
    piece(completion, static_cast<uint32_t>(first_dw - dw_start), static_cast<uint32_t>(last_dw - first_dw));
    left -= static_cast<uint32_t>(end - at);
    at = end;
  }
}

void for_each_run(const pcie::Tlp& request,
                  absl::FunctionRef<void(uint64_t address, uint32_t offset, uint32_t bytes)> run) {
  if (pcie::contiguous(request)) {
    const pcie::ByteRange range = pcie::range_of(request);
    if (range.bytes == 0 || request.first_be == 0) return;
    run(range.address, static_cast<uint32_t>(range.address & 3), range.bytes);
    return;
  }
  const uint32_t total = request.length_dw * 4u;
  for (uint32_t at = 0; at < total;) {
    if (!byte_enabled(request, at)) {
      ++at;
      continue;
    }
    uint32_t end = at + 1;
    while (end < total && byte_enabled(request, end)) ++end;
    run(request.address + at, at, end - at);
    at = end;
  }
}

}  // namespace dxpu::fabric
