#include "proxy/pcie/tlp.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proxy/base/status.h"
#include "proxy/pcie/tlp_layout.h"

namespace dxpu::pcie {
namespace {

constexpr uint8_t kNoType = 0xff;
// From {data, Type[4:0]} to TlpType.
constexpr std::array<uint8_t, 64> make_type_index() {
  std::array<uint8_t, 64> index{};
  index.fill(kNoType);
  for (size_t type = 0; type < kTypeCount; ++type) {
    const TypeRow& row = kTypeRows[type];
    const unsigned variants = row.shape == Shape::kMessage ? 8 : 1;
    for (unsigned low = 0; low < variants; ++low) {
      index[(row.data ? 32u : 0u) + row.code + low] = static_cast<uint8_t>(type);
    }
  }
  return index;
}
constexpr std::array<uint8_t, 64> kTypeIndex = make_type_index();

void put16(std::byte* at, uint16_t value) {
  at[0] = static_cast<std::byte>(value >> 8);
  at[1] = static_cast<std::byte>(value);
}

void put32(std::byte* at, uint32_t value) {
  put16(at, static_cast<uint16_t>(value >> 16));
  put16(at + 2, static_cast<uint16_t>(value));
}

uint16_t get16(const std::byte* at) {
  return static_cast<uint16_t>(std::to_integer<unsigned>(at[0]) << 8 | std::to_integer<unsigned>(at[1]));
}

uint32_t get32(const std::byte* at) { return uint32_t{get16(at)} << 16 | get16(at + 2); }

absl::Status malformed(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat("TLP: ", what)); }

// Address of a memory, atomic or IO request; the low two bits stay zero.
void put_address(const Tlp& tlp, bool four, std::byte* at) {
  if (four) {
    put32(at, static_cast<uint32_t>(tlp.address >> 32));
    at += 4;
  }
  put32(at, static_cast<uint32_t>(tlp.address));
}

// The double words behind the first one, by shape. `tlp` has passed check_header().
void put_body(const Tlp& tlp, const TypeRow& row, bool four, std::byte* out) {
  if (row.shape == Shape::kCompletion) {
    put16(out + 4, tlp.completer);
    // 4096 is written as 0: only 12 bits go out.
    put16(out + 6, static_cast<uint16_t>(static_cast<unsigned>(tlp.status) << 13 | (tlp.byte_count & 0xfff)));
    put16(out + 8, tlp.requester);
    out[10] = static_cast<std::byte>(tlp.tag);
    out[11] = static_cast<std::byte>(tlp.lower_address);
    return;
  }
  put16(out + 4, tlp.requester);
  out[6] = static_cast<std::byte>(tlp.tag);
  out[7] = static_cast<std::byte>(tlp.last_be << 4 | tlp.first_be);
  switch (row.shape) {
    case Shape::kMemory:
    case Shape::kAtomic:
    case Shape::kIo:
      put_address(tlp, four, out + 8);
      break;
    case Shape::kConfig:
      put16(out + 8, tlp.target);
      put16(out + 10, tlp.config_register);
      break;
    case Shape::kMessage:
      out[7] = static_cast<std::byte>(tlp.message_code);
      put32(out + 8, static_cast<uint32_t>(tlp.message_data >> 32));
      put32(out + 12, static_cast<uint32_t>(tlp.message_data));
      break;
    case Shape::kCompletion:
      break;
  }
}

absl::Status get_completion(const std::byte* in, Tlp& tlp) {
  tlp.completer = get16(in + 4);
  const uint16_t word = get16(in + 6);
  tlp.status = static_cast<CplStatus>(word >> 13);
  tlp.byte_count_modified = (word >> 12 & 1) != 0;
  tlp.byte_count = word & 0xfff;
  if (tlp.byte_count == 0) tlp.byte_count = 4096;
  tlp.requester = get16(in + 8);
  tlp.tag |= std::to_integer<uint16_t>(in[10]);
  tlp.lower_address = std::to_integer<uint8_t>(in[11]);
  if (tlp.lower_address > 0x7f) return malformed("the reserved bit above Lower Address is set");
  return absl::OkStatus();
}

absl::Status get_request(const std::byte* in, const TypeRow& row, bool four, Tlp& tlp) {
  tlp.requester = get16(in + 4);
  tlp.tag |= std::to_integer<uint16_t>(in[6]);
  const unsigned byte7 = std::to_integer<unsigned>(in[7]);
  switch (row.shape) {
    case Shape::kMemory:
    case Shape::kAtomic:
    case Shape::kIo:
      tlp.first_be = byte7 & 0xf;
      tlp.last_be = static_cast<uint8_t>(byte7 >> 4);
      tlp.address = four ? uint64_t{get32(in + 8)} << 32 | get32(in + 12) : get32(in + 8);
      tlp.force_64bit_header = four && tlp.address <= UINT32_MAX;
      if (tlp.address % 4 != 0) return malformed("the reserved (or PH) bits below the address are set");
      break;
    case Shape::kConfig:
      tlp.first_be = byte7 & 0xf;
      tlp.last_be = static_cast<uint8_t>(byte7 >> 4);
      tlp.target = get16(in + 8);
      tlp.config_register = get16(in + 10);
      if ((tlp.config_register & 0xf003) != 0) return malformed("reserved bits around the register number are set");
      break;
    case Shape::kMessage:
      tlp.message_code = static_cast<uint8_t>(byte7);
      tlp.message_routing = std::to_integer<uint8_t>(in[0]) & 7;
      tlp.message_data = uint64_t{get32(in + 8)} << 32 | get32(in + 12);
      break;
    case Shape::kCompletion:
      break;
  }
  return absl::OkStatus();
}

std::string bdf(uint16_t id) { return absl::StrFormat("%02x:%02x.%x", id >> 8, id >> 3 & 0x1f, id & 7); }

}  // namespace

TlpClass class_of(TlpType type) { return known(type) ? row_of(type).tlp_class : TlpClass::kPosted; }
const char* name_of(TlpType type) { return known(type) ? row_of(type).name : "unknown"; }
bool has_data(TlpType type) { return known(type) && row_of(type).data; }

absl::StatusOr<size_t> encode_header(const Tlp& tlp, std::span<std::byte, kMaxHeaderBytes> out) {
  DXPU_RETURN_IF_ERROR(check_header(tlp));
  const TypeRow& row = row_of(tlp.type);
  const bool four = four_dw(tlp, row);
  // 1024 is written as 0: only ten bits go out.
  out[0] = static_cast<std::byte>((row.data ? 0x40 : 0) | (four ? 0x20 : 0) | row.code | tlp.message_routing);
  out[1] = static_cast<std::byte>((tlp.tag >> 9 & 1) << 7 | tlp.traffic_class << 4 | (tlp.tag >> 8 & 1) << 3 |
                                  (tlp.attributes >> 2 & 1) << 2);
  out[2] = static_cast<std::byte>((tlp.poisoned ? 0x40 : 0) | (tlp.attributes & 3) << 4 | (tlp.length_dw >> 8 & 3));
  out[3] = static_cast<std::byte>(tlp.length_dw);
  put_body(tlp, row, four, out.data());
  return four ? 16 : 12;
}

absl::Status encode(const Tlp& tlp, std::vector<std::byte>& out) {
  DXPU_RETURN_IF_ERROR(check(tlp));
  std::array<std::byte, kMaxHeaderBytes> header;
  DXPU_ASSIGN_OR_RETURN(const size_t header_bytes, encode_header(tlp, header));
  out.insert(out.end(), header.begin(), header.begin() + header_bytes);
  out.insert(out.end(), tlp.payload.begin(), tlp.payload.end());
  return absl::OkStatus();
}

absl::StatusOr<Tlp> decode_header(std::span<const std::byte> bytes, size_t* header_bytes) {
  if (bytes.size() < 12)
    return malformed(absl::StrCat("truncated, ", bytes.size(), " bytes of a header of at least 12"));
  const std::byte* in = bytes.data();
  const unsigned byte0 = std::to_integer<unsigned>(in[0]);
  const unsigned byte1 = std::to_integer<unsigned>(in[1]);
  const unsigned byte2 = std::to_integer<unsigned>(in[2]);
  if (byte0 >> 5 == 4) return malformed("prefixes are not supported");
  if (byte0 >> 5 > 4) return malformed(absl::StrCat("Fmt ", byte0 >> 5, " is reserved"));
  const bool four = (byte0 & 0x20) != 0;
  const uint8_t index = kTypeIndex[(byte0 & 0x40) >> 1 | (byte0 & 0x1f)];
  if (index == kNoType) {
    return malformed(
        absl::StrCat("Fmt ", byte0 >> 5, " Type 0x", absl::Hex(byte0 & 0x1f), " is reserved or not supported"));
  }
  const TypeRow& row = kTypeRows[index];
  const bool sized_by_address = row.shape == Shape::kMemory || row.shape == Shape::kAtomic;
  if (!sized_by_address && four != (row.shape == Shape::kMessage)) {
    return malformed(absl::StrCat(row.name, " with a header of ", four ? 4 : 3, " DW"));
  }
  if (four && bytes.size() < 16)
    return malformed(absl::StrCat("truncated, ", bytes.size(), " bytes of a header of 16"));
  if ((byte1 & 2) != 0) return malformed("reserved bit (LN) is set");
  if ((byte1 & 1) != 0) return malformed("processing hints (TH) are not supported");
  if ((byte2 & 0x80) != 0) return malformed("a digest (TD, ECRC) is not supported");
  if ((byte2 & 0x0c) != 0) return malformed("an address type (AT) other than 0 is not supported");

  Tlp tlp;
  tlp.type = static_cast<TlpType>(index);
  tlp.traffic_class = byte1 >> 4 & 7;
  tlp.attributes = static_cast<uint8_t>((byte1 >> 2 & 1) << 2 | (byte2 >> 4 & 3));
  tlp.poisoned = (byte2 & 0x40) != 0;
  tlp.tag = static_cast<uint16_t>((byte1 >> 7) << 9 | (byte1 >> 3 & 1) << 8);
  tlp.length_dw = static_cast<uint16_t>((byte2 & 3) << 8 | std::to_integer<unsigned>(in[3]));
  const bool length_reserved = !row.data && (row.shape == Shape::kMessage || row.shape == Shape::kCompletion);
  if (length_reserved && tlp.length_dw != 0)
    return malformed(absl::StrCat(row.name, " with a Length, which is reserved there"));
  if (!length_reserved && tlp.length_dw == 0) tlp.length_dw = 1024;
  DXPU_RETURN_IF_ERROR(row.shape == Shape::kCompletion ? get_completion(in, tlp) : get_request(in, row, four, tlp));

  // Everything else that is wrong is found by the one set of rules; the short address in a long header is left for
  // check(), because the specification leaves it to the receiver.
  const bool force = tlp.force_64bit_header;
  tlp.force_64bit_header = false;
  DXPU_RETURN_IF_ERROR(check_header(tlp));
  tlp.force_64bit_header = force;
  if (header_bytes != nullptr) *header_bytes = four ? 16 : 12;
  return tlp;
}

absl::StatusOr<Tlp> decode(std::span<const std::byte> bytes) {
  size_t header_bytes = 0;
  absl::StatusOr<Tlp> tlp = decode_header(bytes, &header_bytes);
  if (!tlp.ok()) return tlp;
  const size_t payload_bytes = has_data(tlp->type) ? tlp->length_dw * size_t{4} : 0;
  if (bytes.size() != header_bytes + payload_bytes) {
    return malformed(absl::StrCat(name_of(tlp->type), " of ", bytes.size(), " bytes, its header says ",
                                  header_bytes + payload_bytes));
  }
  tlp->payload.assign(bytes.begin() + header_bytes, bytes.end());
  return tlp;
}

std::string to_string(const Tlp& t) {
  if (!known(t.type)) return absl::StrCat("unknown TLP type ", static_cast<unsigned>(t.type));
  const TypeRow& row = row_of(t.type);
  std::string text = row.name;
  if (row.shape == Shape::kMemory || row.shape == Shape::kAtomic) absl::StrAppend(&text, four_dw(t, row) ? "64" : "32");
  absl::StrAppend(&text, " req ", bdf(t.requester), absl::StrFormat(" tag 0x%x", t.tag));
  const unsigned bytes = t.length_dw * 4u;
  switch (row.shape) {
    case Shape::kMemory:
    case Shape::kIo:
      absl::StrAppendFormat(&text, " addr 0x%x len %uB fbe %x lbe %x", t.address, bytes, t.first_be, t.last_be);
      break;
    case Shape::kAtomic:
      absl::StrAppendFormat(&text, " addr 0x%x len %uB", t.address, bytes);
      break;
    case Shape::kConfig:
      absl::StrAppend(&text, " target ", bdf(t.target));
      absl::StrAppendFormat(&text, " reg 0x%x len %uB fbe %x lbe %x", t.config_register, bytes, t.first_be, t.last_be);
      break;
    case Shape::kMessage:
      absl::StrAppendFormat(&text, " code 0x%02x routing %u data 0x%016x", t.message_code, t.message_routing,
                            t.message_data);
      if (row.data) absl::StrAppendFormat(&text, " len %uB", bytes);
      break;
    case Shape::kCompletion: {
      constexpr std::array<const char*, 8> kStatusNames = {"SC", "UR", "CRS", "3?", "CA", "5?", "6?", "7?"};
      absl::StrAppend(&text, " cpl ", bdf(t.completer), " ", kStatusNames[static_cast<unsigned>(t.status) & 7]);
      absl::StrAppendFormat(&text, " bc %u lower 0x%02x", t.byte_count, t.lower_address);
      if (row.data) absl::StrAppendFormat(&text, " len %uB", bytes);
      break;
    }
  }
  if (t.traffic_class != 0) absl::StrAppend(&text, " tc ", t.traffic_class);
  if (t.attributes != 0) absl::StrAppend(&text, " attr ", t.attributes);
  if (t.poisoned) absl::StrAppend(&text, " poisoned");
  return text;
}

ByteEnables byte_enables(uint64_t address, uint32_t bytes) {
  const unsigned skip = address % 4;
  if (bytes == 0) return {.first = 0, .last = 0, .length_dw = 1};
  const uint64_t end = skip + uint64_t{bytes};
  const uint64_t dws = (end + 3) / 4;
  ByteEnables enables;
  // Too long for any TLP: stays too long, so that check() says so.
  enables.length_dw = static_cast<uint16_t>(dws > UINT16_MAX ? UINT16_MAX : dws);
  const uint8_t from = static_cast<uint8_t>(0xf << skip & 0xf);
  const uint8_t to = static_cast<uint8_t>(0xf >> ((4 - end % 4) % 4));
  enables.first = dws == 1 ? from & to : from;
  enables.last = dws == 1 ? 0 : to;
  return enables;
}

Tlp make_mem_read(uint64_t address, uint32_t bytes, uint16_t tag, RequesterId requester) {
  const ByteEnables enables = byte_enables(address, bytes);
  Tlp tlp;
  tlp.type = TlpType::kMemRead;
  tlp.requester = requester;
  tlp.tag = tag;
  tlp.address = address & ~uint64_t{3};
  tlp.length_dw = enables.length_dw;
  tlp.first_be = enables.first;
  tlp.last_be = enables.last;
  return tlp;
}

Tlp make_mem_write(uint64_t address, std::span<const std::byte> data, RequesterId requester) {
  const uint32_t bytes = data.size() > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(data.size());
  Tlp tlp = make_mem_read(address, bytes, 0, requester);
  tlp.type = TlpType::kMemWrite;
  const size_t skip = address % 4;
  if (skip == 0 && data.size() % 4 == 0 && !data.empty()) {
    tlp.payload.assign(data.begin(), data.end());
  } else {
    tlp.payload.resize((skip + (data.empty() ? 1 : data.size()) + 3) / 4 * 4);
    if (!data.empty()) std::memcpy(tlp.payload.data() + skip, data.data(), data.size());
  }
  return tlp;
}

ByteRange range_of(const Tlp& request) {
  if (!known(request.type)) return {};
  const TypeRow& row = row_of(request.type);
  switch (row.shape) {
    case Shape::kMessage:
    case Shape::kCompletion:
      return {};
    case Shape::kAtomic:
      return {.address = request.address,
              .bytes = request.length_dw * 4u / (request.type == TlpType::kCompareSwap ? 2 : 1)};
    case Shape::kMemory:
    case Shape::kIo:
    case Shape::kConfig:
      break;
  }
  const uint64_t base = row.shape == Shape::kConfig ? request.config_register : request.address;
  const unsigned first = request.first_be & 0xfu;
  const unsigned last = request.length_dw > 1 ? request.last_be & 0xfu : first;
  if (first == 0 || last == 0 || request.length_dw == 0) return {.address = base, .bytes = 0};
  const uint32_t skip = static_cast<uint32_t>(std::countr_zero(first));
  const uint32_t end = (request.length_dw - 1u) * 4 + static_cast<uint32_t>(std::bit_width(last));
  return {.address = base + skip, .bytes = end - skip};
}

bool contiguous(const Tlp& request) {
  const unsigned first = request.first_be & 0xfu;
  const unsigned last = request.last_be & 0xfu;
  if (request.length_dw <= 1) {
    if (first == 0) return true;
    const unsigned run = first >> std::countr_zero(first);
    return (run & (run + 1)) == 0;
  }
  return ((first | first << 1) & 0xf) == first && (last & (last + 1)) == 0;
}

}  // namespace dxpu::pcie
