// The frame parser and what stands directly behind it: any bytes, in any portions, either phase. Besides not crashing,
// a frame that was accepted must be what its envelope says, and the portions must not matter.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "proxy/fabric/frame.h"
#include "proxy/fabric/hello.h"
#include "proxy/fabric/tlp_io.h"

namespace {

using dxpu::fabric::FrameParser;

struct Seen {
  std::vector<uint32_t> totals;
  bool bad = false;
  uint32_t offset = 0;
  bool operator==(const Seen&) const = default;
};

Seen parse(std::span<const std::byte> in, dxpu::fabric::Phase phase, uint32_t max_payload, size_t portion) {
  FrameParser parser(phase, max_payload, 1024);
  Seen seen;
  dxpu::fabric::Frame frame;
  dxpu::fabric::FrameError error;
  while (!in.empty() && !seen.bad) {
    const std::span<std::byte> room = parser.writable();
    if (room.empty()) std::abort();
    const size_t n = std::min({portion, room.size(), in.size()});
    std::copy_n(in.begin(), n, room.begin());
    parser.commit(n);
    in = in.subspan(n);
    while (true) {
      const FrameParser::Result result = parser.next(frame, error);
      if (result == FrameParser::Result::kMore) break;
      if (result == FrameParser::Result::kBad) {
        seen.bad = true;
        seen.offset = error.offset;
        break;
      }
      if (frame.header.size() != frame.envelope.header_bytes ||
          dxpu::fabric::kEnvelopeBytes + frame.header.size() + frame.payload.size() != frame.envelope.total_bytes) {
        std::abort();
      }
      seen.totals.push_back(frame.envelope.total_bytes);
      if (frame.envelope.type == dxpu::fabric::FrameType::kTlp) {
        dxpu::pcie::Tlp tlp;
        if (!dxpu::fabric::unpack(frame, tlp, error)) continue;
        if (dxpu::pcie::has_data(tlp.type) && frame.payload.size() != tlp.length_dw * 4u) std::abort();
        if (tlp.type == dxpu::pcie::TlpType::kMemWrite || tlp.type == dxpu::pcie::TlpType::kMemRead) {
          dxpu::fabric::for_each_run(tlp, [&](uint64_t, uint32_t offset, uint32_t bytes) {
            if (bytes == 0 || offset + bytes > tlp.length_dw * 4u) std::abort();
          });
        }
      } else if (frame.envelope.type == dxpu::fabric::FrameType::kTerminate) {
        if (dxpu::fabric::decode_terminate(frame.header, frame.payload).detail.size() >
            dxpu::fabric::kMaxTerminateDetail) {
          std::abort();
        }
      }
    }
  }
  return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto phase = (data[0] & 1) != 0 ? dxpu::fabric::Phase::kLive : dxpu::fabric::Phase::kHello;
  const uint32_t max_payload = 128u << (data[0] >> 1 & 7) % 6;
  const size_t portion = 1 + data[1];
  const std::span<const std::byte> in(reinterpret_cast<const std::byte*>(data) + 2, size - 2);
  const Seen portions = parse(in, phase, max_payload, portion);
  const Seen whole = parse(in, phase, max_payload, in.size() + 1);
  if (!(portions == whole)) std::abort();
  return 0;
}
