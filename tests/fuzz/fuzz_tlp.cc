// Hostile bytes as a TLP, as a completion of a read, and as a configuration image.
//
// Input: one byte that chooses the target, then its bytes. What is accepted must hold together; a broken promise
// aborts.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "proxy/pcie/bar_map.h"
#include "proxy/pcie/config_space.h"
#include "proxy/pcie/split.h"
#include "proxy/pcie/tlp.h"

namespace {

using namespace dxpu::pcie;

void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

void fuzz_tlp(std::span<const std::byte> bytes) {
  size_t header_bytes = 0;
  const auto header = decode_header(bytes, &header_bytes);
  const auto tlp = decode(bytes);
  if (header.ok())
    require(header_bytes <= bytes.size() && header_bytes <= kMaxHeaderBytes, "the header lies inside the input");
  if (!tlp.ok()) return;
  require(header.ok(), "what decodes has a header that decodes");
  require(!to_string(*tlp).empty(), "every TLP has a text");
  const ByteRange range = range_of(*tlp);
  (void)contiguous(*tlp);
  std::vector<std::byte> again;
  const absl::Status encoded = encode(*tlp, again);
  require(encoded == check(*tlp), "encode says what check says");
  if (tlp->force_64bit_header) {
    require(!encoded.ok(), "a short address in a long header is refused");
    return;
  }
  require(encoded.ok(), "what decodes passes check");
  require(again.size() == bytes.size() && std::equal(again.begin(), again.end(), bytes.begin()),
          "encode reproduces the bytes");

  // The whole round: its completions are legal and put the same bytes together again.
  require(range.bytes <= kMaxPayloadBytes, "no request asks for more than 4096 bytes");
  std::vector<std::byte> data(range.bytes), out(range.bytes);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7);
  Reassembly reassembly(*tlp, out);
  bool over = class_of(tlp->type) != TlpClass::kNonPosted;
  bool answered_with_data = false;
  for (const Tlp& completion : make_completions(*tlp, data, 0x0100, 128u << (range.address % 6), 64)) {
    require(check(completion).ok(), "completions are legal");
    answered_with_data = has_data(completion.type);
    const auto added = reassembly.add(completion, completion.payload);
    require(added.ok(), "completions fit");
    over = *added;
  }
  require(over, "completions end the request");
  require(!answered_with_data || out == data, "the bytes arrive");

  // As a completion of somebody's read.
  std::vector<std::byte> other(100);
  Reassembly unasked(make_mem_read(0x1000u + tlp->lower_address, 100, 0, 0), other);
  (void)unasked.add(*tlp, tlp->payload);
}

// A good image with up to 64 patches {part and offset, value}, then writes: mutating 12 KiB blindly would find nothing.
void fuzz_image(std::span<const std::byte> bytes) {
  static const ConfigSpace good = [] {
    ConfigDescription d;
    d.vendor_id = 0x1d94;
    d.bars[0] = {.size = 64 << 10};
    d.bars[2] = {.size = uint64_t{1} << 33, .is_64bit = true, .prefetchable = true};
    d.msix = {.vectors = 65, .table_bar = 0, .table_offset = 0x2000, .pba_bar = 0, .pba_offset = 0x3000};
    d.serial_number = 1;
    d.vpd_product = "fuzz";
    return *ConfigSpace::build(d);
  }();
  std::vector<std::byte> parts[3] = {{good.bytes().begin(), good.bytes().end()},
                                     {good.write_mask().begin(), good.write_mask().end()},
                                     {good.w1c_mask().begin(), good.w1c_mask().end()}};
  const auto next = [&bytes]() -> unsigned {
    if (bytes.empty()) return 0;
    const unsigned value = std::to_integer<unsigned>(bytes[0]);
    bytes = bytes.subspan(1);
    return value;
  };
  const unsigned patches = next() % 65;
  for (unsigned i = 0; i < patches; ++i) {
    const unsigned where = next() << 8 | next();
    parts[(where >> 12) % 3][where & 0xfff] = static_cast<std::byte>(next());
  }
  auto space = ConfigSpace::from_image(parts[0], parts[1], parts[2], good.vpd());
  if (!space.ok()) return;
  for (unsigned writes = 0; writes < 256 && !bytes.empty(); ++writes) {
    const unsigned where = next() << 8 | next();
    space->write(where & 0xfff, 1u << (where >> 12) % 3, next() << 24 | next() << 16 | next() << 8 | next());
    (void)space->take_function_level_reset();
  }
  for (unsigned i = 0; i < kBarCount; ++i) {
    const uint64_t size = space->bar(i).size;
    require((size & (size - 1)) == 0, "a BAR is a power of two");
    require(size == 0 || space->bar_address(i) % size == 0, "a BAR is naturally aligned");
  }
  const MsixDescription msix = space->msix();
  require(msix.vectors == 0 || uint64_t{msix.table_offset} + msix.vectors * 16u <= space->bar(msix.table_bar).size,
          "the MSI-X table lies inside its BAR");
  for (unsigned id = 0; id < 256; ++id) (void)space->find_capability(static_cast<uint8_t>(id));
  (void)space->find_extended_capability(0xffff);
  (void)BarMap(*space).find(space->bar_address(0), 4096);
  (void)BarMap::assign(*space, space->bar_address(2));
  space->reset();
  require(!space->memory_enabled(), "reset clears the command");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  if ((data[0] & 1) == 0) {
    fuzz_tlp(bytes);
  } else {
    fuzz_image(bytes);
  }
  return 0;
}
