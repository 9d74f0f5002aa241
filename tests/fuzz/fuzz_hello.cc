// Hello and HelloAck bodies: any bytes. What is accepted must survive serialize and parse, and obey the limits that the
// rest of the session relies on.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "proxy/fabric/hello.h"
#include "proxy/pcie/config_space.h"

namespace {

using namespace dxpu::fabric;

void hello(std::span<const std::byte> in) {
  // The magic and the version are given for free, or nothing else would ever be reached.
  std::vector<std::byte> bytes(sizeof(HelloWire));
  std::copy_n(in.begin(), std::min(in.size(), bytes.size()), bytes.begin());
  HelloWire wire;
  std::memcpy(&wire, bytes.data(), sizeof(wire));
  wire.magic.set(kHelloMagic);
  std::memcpy(bytes.data(), &wire, sizeof(wire));
  Hello out;
  FrameError error;
  if (!decode_hello(bytes, out, error)) {
    if (error.detail.empty() || error.offset < kEnvelopeBytes || error.offset >= kEnvelopeBytes + sizeof(HelloWire))
      std::abort();
    return;
  }
  if (out.max_payload > 4096 || out.max_outstanding > 1024 || out.ticket.host_id.size() > kMaxIdBytes) std::abort();
  const absl::StatusOr<Hello> again = parse_hello(serialize(out));
  if (!again.ok() || again->ticket.attachment_id != out.ticket.attachment_id ||
      again->ticket.token != out.ticket.token || again->max_outstanding != out.max_outstanding ||
      again->keep_alive != out.keep_alive) {
    std::abort();
  }
}

void hello_ack(std::span<const std::byte> in) {
  std::vector<std::byte> header(sizeof(HelloAckWire)), payload(kHelloAckPayloadBytes);
  std::copy_n(in.begin(), std::min(in.size(), header.size()), header.begin());
  if (in.size() > header.size()) {
    // The image's parts repeat the rest of the input, so that short inputs reach the masks too.
    const std::span<const std::byte> rest = in.subspan(header.size());
    for (size_t i = 0; i < payload.size(); ++i) payload[i] = rest[i % rest.size()];
  }
  HelloAckWire wire;
  std::memcpy(&wire, header.data(), sizeof(wire));
  wire.magic.set(kHelloAckMagic);
  wire.version.set(kVersionMax);
  wire.features.set(0);
  std::memcpy(header.data(), &wire, sizeof(wire));
  HelloAck out;
  FrameError error;
  const SessionOptions offered;
  if (decode_hello_ack(header, payload, offered, out, error) &&
      (out.max_payload > offered.max_payload || out.epoch == 0)) {
    std::abort();
  }
  for (std::vector<std::byte>& part : out.image) part.resize(dxpu::pcie::kConfigSpaceBytes);
  std::copy(payload.begin(), payload.begin() + dxpu::pcie::kConfigSpaceBytes, out.image[0].begin());
  const auto image = dxpu::pcie::ConfigSpace::from_image(out.image[0], out.image[1], out.image[2]);
  if (image.ok() && image->bytes().size() != dxpu::pcie::kConfigSpaceBytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::span<const std::byte> in(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  if ((data[0] & 1) != 0) {
    hello(in);
  } else {
    hello_ack(in);
  }
  return 0;
}
