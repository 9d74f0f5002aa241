// The bytes of the fabric: every structure that crosses a transport, and nothing else. docs/wire.md is the text to it.
//
// All integers outside TLP headers are little-endian; TLP headers travel in PCIe byte order. Structures are made of
// byte arrays, so they have alignment 1, no padding, and can be copied to and from any buffer on any machine.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "proxy/fabric/session.h"
#include "proxy/pcie/config_space.h"
#include "proxy/pcie/tlp.h"

namespace dxpu::fabric {

// A little-endian integer as it lies in a frame.
template <typename T>
class Le {
 public:
  T get() const {
    T value;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    return swap_if_big(value);
  }
  void set(T value) {
    value = swap_if_big(value);
    std::memcpy(bytes_.data(), &value, sizeof(T));
  }

 private:
  static T swap_if_big(T value) {
    if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) return value;
    T out = 0;
    for (size_t i = 0; i < sizeof(T); ++i) out = static_cast<T>(out << 8) | static_cast<T>((value >> (8 * i)) & 0xff);
    return out;
  }
  std::array<uint8_t, sizeof(T)> bytes_;
};

inline constexpr uint64_t kHelloMagic = 0x3142414655505844;     // "DXPUFAB1"
inline constexpr uint64_t kHelloAckMagic = 0x314b434155505844;  // "DXPUACK1"
inline constexpr uint16_t kVersionMin = 1;
inline constexpr uint16_t kVersionMax = 1;
// Features this implementation knows; bits outside are ignored when optional, refused when mandatory. None exist yet.
inline constexpr uint64_t kFeaturesKnown = 0;

enum class FrameType : uint8_t {
  kHello = 1,
  kHelloAck = 2,
  kTlp = 3,
  kPing = 4,
  kPong = 5,
  kReset = 6,
  kTerminate = 7,
};
const char* name_of(FrameType type);

// Envelope flags. Any other bit is a protocol error in version 1.
inline constexpr uint8_t kFlagAnswer = 0x01;  // Reset only: this is the answer

struct EnvelopeWire {
  Le<uint8_t> type;
  Le<uint8_t> flags;
  Le<uint16_t> header_bytes;       // type-specific header that follows
  Le<uint32_t> total_bytes;        // envelope, header and payload
  Le<uint32_t> stream;             // function; 0 in version 1
  Le<uint32_t> sequence;           // Tlp, Reset: 1, 2, 3, … per direction; others 0
  Le<uint32_t> ack;                // highest sequence taken from the peer
  Le<uint32_t> transaction;        // generation of the tag; completions and answers repeat the request's
  Le<uint32_t> credit_posted;      // 0 in version 1
  Le<uint32_t> credit_non_posted;  // 0 in version 1
};
static_assert(sizeof(EnvelopeWire) == 32 && alignof(EnvelopeWire) == 1);
static_assert(offsetof(EnvelopeWire, total_bytes) == 4 && offsetof(EnvelopeWire, stream) == 8);
static_assert(offsetof(EnvelopeWire, sequence) == 12 && offsetof(EnvelopeWire, ack) == 16);
static_assert(offsetof(EnvelopeWire, transaction) == 20 && offsetof(EnvelopeWire, credit_posted) == 24);
inline constexpr size_t kEnvelopeBytes = sizeof(EnvelopeWire);

struct HelloWire {
  Le<uint64_t> magic;
  Le<uint16_t> version_min;
  Le<uint16_t> version_max;
  Le<uint32_t> reserved0;
  Le<uint64_t> features_optional;
  Le<uint64_t> features_mandatory;
  Le<uint32_t> max_payload;
  Le<uint32_t> max_read_request;
  Le<uint32_t> read_completion_boundary;
  Le<uint32_t> max_outstanding;
  Le<uint32_t> keep_alive_ms;
  Le<uint32_t> slot;
  Le<uint64_t> generation;
  Le<uint64_t> resume_epoch;  // 0: a new epoch. Replay will use these three
  Le<uint32_t> resume_received;
  Le<uint32_t> reserved1;
  std::array<std::byte, 32> resume_proof;
  std::array<std::byte, kTokenBytes> token;
  Le<uint8_t> host_id_bytes;
  Le<uint8_t> box_id_bytes;
  Le<uint8_t> attachment_id_bytes;
  Le<uint8_t> reserved2;
  Le<uint32_t> reserved3;
  std::array<char, kMaxIdBytes> host_id;
  std::array<char, kMaxIdBytes> box_id;
  std::array<char, kMaxIdBytes> attachment_id;
};
static_assert(sizeof(HelloWire) == 344 && alignof(HelloWire) == 1);
static_assert(offsetof(HelloWire, max_payload) == 32 && offsetof(HelloWire, generation) == 56);
static_assert(offsetof(HelloWire, token) == 112 && offsetof(HelloWire, host_id) == 152);

struct HelloAckWire {
  Le<uint64_t> magic;
  Le<uint16_t> version;
  Le<uint16_t> reserved0;
  Le<uint32_t> reserved1;
  Le<uint64_t> features;
  Le<uint32_t> max_payload;
  Le<uint32_t> max_read_request;
  Le<uint32_t> read_completion_boundary;
  Le<uint32_t> max_outstanding;
  Le<uint32_t> keep_alive_ms;
  Le<uint8_t> model_bytes;
  std::array<std::byte, 3> reserved2;
  Le<uint64_t> epoch;
  std::array<std::byte, 32> session_key;
  Le<uint32_t> credit_posted;      // 0 in version 1
  Le<uint32_t> credit_non_posted;  // 0 in version 1
  Le<uint64_t> reserved3;
  std::array<char, kMaxIdBytes> model;
};
static_assert(sizeof(HelloAckWire) == 168 && alignof(HelloAckWire) == 1);
static_assert(offsetof(HelloAckWire, max_payload) == 24 && offsetof(HelloAckWire, epoch) == 48);
static_assert(offsetof(HelloAckWire, session_key) == 56 && offsetof(HelloAckWire, model) == 104);
// Payload of a HelloAck: configuration bytes, write mask, write-one-to-clear mask.
inline constexpr uint32_t kHelloAckPayloadBytes = 3 * pcie::kConfigSpaceBytes;

struct PingWire {
  Le<uint64_t> stamp;  // the sender's own; Pong repeats it
};
static_assert(sizeof(PingWire) == 8);

struct ResetWire {
  Le<uint8_t> status;  // answer: a completion status; request: 0
  std::array<std::byte, 7> reserved;
};
static_assert(sizeof(ResetWire) == 8);

struct TerminateWire {
  Le<uint16_t> reason;
  Le<uint16_t> reserved;
  Le<uint32_t> offset;  // of the offending byte in the offending frame
};
static_assert(sizeof(TerminateWire) == 8);
inline constexpr uint32_t kMaxTerminateDetail = 256;

// Requester and completer ids. A session joins exactly two parties.
inline constexpr pcie::RequesterId kHostId = 0x0000;
inline constexpr pcie::RequesterId kFunctionId = 0x0100;

// MSI-X: a one-DW posted write of the vector number to kMsiAddress. Any address of the window means the same.
inline constexpr uint64_t kMsiAddress = 0xFEE00000;
inline constexpr uint64_t kMsiWindowEnd = 0xFEF00000;
// Where the host starts to place the BARs of the function it reaches.
inline constexpr uint64_t kFabricBarBase = 0x10000000;

}  // namespace dxpu::fabric
