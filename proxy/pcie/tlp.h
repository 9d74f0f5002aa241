// A transaction layer packet as a value, and its wire form.
//
// What this is: encode, decode and check() of the TLP types dxpu carries, by the rules of the PCI Express Base
// Specification (chapter 2, "Transaction Layer Specification"). What it is not: I/O, flow control, tag allocation.
// Everything here is pure and thread-compatible; no input, however malformed, has undefined behaviour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dxpu::pcie {

// Largest payload and largest read the specification knows: 1024 DW.
inline constexpr uint32_t kMaxPayloadBytes = 4096;
// 4 DW header.
inline constexpr uint32_t kMaxHeaderBytes = 16;
inline constexpr uint32_t kMaxTlpBytes = kMaxHeaderBytes + kMaxPayloadBytes;
// No memory request crosses this.
inline constexpr uint64_t kPageBoundary = 4096;

// The class decides which credits a TLP takes and whether it is answered. One table (class_of) knows it.
enum class TlpClass : uint8_t { kPosted, kNonPosted, kCompletion };

enum class TlpType : uint8_t {
  kMemRead,         // MRd
  kMemWrite,        // MWr
  kIoRead,          // IORd
  kIoWrite,         // IOWr
  kCfgRead0,        // CfgRd0
  kCfgWrite0,       // CfgWr0
  kCfgRead1,        // CfgRd1
  kCfgWrite1,       // CfgWr1
  kMessage,         // Msg
  kMessageData,     // MsgD
  kCompletion,      // Cpl
  kCompletionData,  // CplD
  kFetchAdd,
  kSwap,
  kCompareSwap,  // CAS
};

TlpClass class_of(TlpType type);
const char* name_of(TlpType type);

enum class CplStatus : uint8_t {
  kSuccess = 0,             // SC
  kUnsupportedRequest = 1,  // UR
  kConfigRetry = 2,         // CRS / RRS
  kCompleterAbort = 4,      // CA
};

// Bus, device, function as on the wire: bus[15:8] device[7:3] function[2:0].
using RequesterId = uint16_t;

// Fields that a type does not have are zero; check() says so.
struct Tlp {
  TlpType type = TlpType::kMemRead;

  // --- every type
  uint8_t traffic_class = 0;  // 3 bits
  uint8_t attributes = 0;     // bit 0 no snoop, bit 1 relaxed ordering, bit 2 id-based ordering; carried, not acted on
  bool poisoned = false;      // EP
  RequesterId requester = 0;
  uint16_t tag = 0;  // 10 bits

  // --- requests
  uint64_t address = 0;    // memory, IO, atomics: DW aligned (the byte enables say which bytes)
  uint16_t length_dw = 0;  // 1 … 1024; of the payload, or of what is asked for. Cpl without data: 0
  uint8_t first_be = 0;    // 4 bits; reserved (0) in atomics
  uint8_t last_be = 0;     // 4 bits; 0 when length_dw is 1
  // decode sets it when a 4 DW header carried an address below 4 GiB (an error by the spec)
  bool force_64bit_header = false;

  // --- configuration requests
  uint16_t target = 0;           // bus, device, function
  uint16_t config_register = 0;  // byte offset, DW aligned, < 4096

  // --- messages
  uint8_t message_code = 0;
  uint8_t message_routing = 0;  // 3 bits
  uint64_t message_data = 0;    // bytes 8 … 15 of the header

  // --- completions
  RequesterId completer = 0;
  CplStatus status = CplStatus::kSuccess;
  bool byte_count_modified = false;  // BCM: PCI-X bridges only; check() refuses it
  uint16_t byte_count = 0;           // bytes left of the request, this piece included: 1 … 4096 (wire 0 = 4096)
  uint8_t lower_address = 0;         // 7 bits

  // Exactly length_dw * 4 bytes for types with data, else empty. In memory order: byte 0 is the byte at the lowest
  // address.
  std::vector<std::byte> payload{};

  bool operator==(const Tlp&) const = default;
};

bool has_data(TlpType type);

// Checks every rule of the specification that can be checked on one TLP: lengths, payload size, byte enables, 4 KiB
// crossing, alignment, reserved encodings, BCM, field widths. INVALID_ARGUMENT names the field.
absl::Status check(const Tlp& tlp);
// The same without the payload's size: for a header whose payload lies elsewhere.
absl::Status check_header(const Tlp& tlp);

// Appends header (3 or 4 DW, wire byte order) and payload to `out`. check() first; its error is returned and `out` is
// untouched then.
absl::Status encode(const Tlp& tlp, std::vector<std::byte>& out);
// Header only, for senders that gather the payload from elsewhere: writes to `out`, returns 12 or 16. `tlp.payload` is
// not looked at; the caller vouches that length_dw * 4 bytes follow.
absl::StatusOr<size_t> encode_header(const Tlp& tlp, std::span<std::byte, kMaxHeaderBytes> out);

// Both decoders apply every rule of check() but one: an address below 4 GiB in a 4 DW header comes through with
// force_64bit_header set, and check() refuses it. Reserved bits must be zero, so what is accepted encodes to the same
// bytes.
//
// Decodes one whole TLP; `bytes` must end where the TLP ends. INVALID_ARGUMENT: malformed.
absl::StatusOr<Tlp> decode(std::span<const std::byte> bytes);
// Header only, for receivers that place the payload elsewhere: `bytes` starts with the header; returns the TLP without
// payload, and through `header_bytes` how long the header was. The payload-size rules are left to the caller.
absl::StatusOr<Tlp> decode_header(std::span<const std::byte> bytes, size_t* header_bytes);

// One line for people: "MRd64 req 01:00.0 tag 0x12 addr 0x1000 len 16B fbe f lbe f".
std::string to_string(const Tlp& tlp);

// ---- building requests from byte ranges ---------------------------------------------------------------------------

// A byte range as one request TLP carries it. Only for ranges that do not cross 4 KiB and span at most 1024 DW.
// A zero-length read is asked for with bytes == 0 (one DW, no byte enabled).
Tlp make_mem_read(uint64_t address, uint32_t bytes, uint16_t tag, RequesterId requester);
// `data` need not be DW aligned: the byte enables say which bytes count, the others are zero in the payload.
Tlp make_mem_write(uint64_t address, std::span<const std::byte> data, RequesterId requester);
// The first enabled byte's address and the number of bytes from the first to the last enabled one.
struct ByteRange {
  uint64_t address = 0;
  uint32_t bytes = 0;
};
ByteRange range_of(const Tlp& request);
// True when the enabled bytes of a memory request are one run without holes.
bool contiguous(const Tlp& request);
// First and last byte enables of a range that starts `address` % 4 into its first DW.
struct ByteEnables {
  uint8_t first = 0;
  uint8_t last = 0;
  uint16_t length_dw = 0;
};
ByteEnables byte_enables(uint64_t address, uint32_t bytes);

}  // namespace dxpu::pcie
