// Cutting requests and completions, and putting completions together again (PCIe Base Specification, "Memory, I/O, and
// Configuration Request Rules" and "Completion Rules"). Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "proxy/pcie/tlp.h"

namespace dxpu::pcie {

// Calls `piece` for each part of [address, address + bytes) that one request may carry: cut at every multiple of
// `limit` counted from the 4 KiB page start (MPS for writes, MRRS for reads), so never across 4 KiB, ascending.
// bytes 0: no call. What would lie behind the last address of all is left out; limit 0 counts as 4096.
void split_request(uint64_t address, uint64_t bytes, uint32_t limit,
                   absl::FunctionRef<void(uint64_t address, uint32_t bytes)> piece);

// One completion of a request as a header and the part of the data it carries, so that a sender need not copy: the
// payload is `lead` bytes of padding, data[data_offset, data_offset + data_bytes), and padding up to header.length_dw *
// 4 bytes.
struct CompletionPiece {
  Tlp header;
  uint32_t data_offset = 0;
  uint32_t data_bytes = 0;
  uint32_t lead = 0;
};
// The pieces of make_completions() without their payload. Nothing for a posted request; one Cpl without data for a
// write.
void split_completions(const Tlp& request, RequesterId completer, uint32_t mps, uint32_t rcb,
                       absl::FunctionRef<void(const CompletionPiece&)> piece);
// How a completer answers one memory read: pieces of at most `mps` bytes, cut at multiples of `rcb` (64 or 128), in
// address order. Each completion has Byte Count and Lower Address set; payload comes from `data`, the bytes of
// range_of(request). A zero-length read gives one DW with Byte Count 1. Configuration and IO reads and atomics give
// their one piece, configuration and IO writes a Cpl without data. `data` of another size than the range: one Cpl,
// Completer Abort.
std::vector<Tlp> make_completions(const Tlp& request, std::span<const std::byte> data, RequesterId completer,
                                  uint32_t mps, uint32_t rcb);
// Cpl (no data) that ends any non-posted request with `status`.
Tlp make_completion_status(const Tlp& request, CplStatus status, RequesterId completer);

// Collects the pieces of one read (or the one answer of another non-posted request). The requester counts its own
// bytes: the completer's Byte Count is only compared. Tag and requester id are the caller's to match: that is how it
// found this object.
class Reassembly {
 public:
  // `out` receives the bytes of range_of(request) and must outlive this object. Smaller than that: every piece is
  // refused.
  Reassembly(const Tlp& request, std::span<std::byte> out);

  // Takes one Cpl/CplD header with its payload (payload apart so that no copy is needed). Returns true when the request
  // is over (all bytes here, or an error status: see status()), false when pieces are missing. INVALID_ARGUMENT when
  // the piece does not fit (wrong Byte Count, Lower Address or Length), or comes when the request is over: a protocol
  // error of the peer; `out` and this object are untouched by it. An error status is taken whatever the other fields
  // say.
  absl::StatusOr<bool> add(const Tlp& completion, std::span<const std::byte> payload);

  CplStatus status() const { return status_; }
  bool poisoned() const { return poisoned_; }
  uint32_t received() const { return received_; }

 private:
  std::span<std::byte> out_;
  uint32_t expected_ = 0;  // bytes that go to `out`; 0 for a zero-length read
  uint32_t received_ = 0;
  uint32_t byte_count_ = 0;     // of the whole answer, as the specification counts it
  uint64_t lower_address_ = 0;  // address that Lower Address counts from; 0 unless a memory read
  uint32_t lead_ = 0;           // bytes of the first DW in front of the first one asked for
  bool answered_by_data_ = false;
  bool memory_read_ = false;
  bool over_ = false;
  bool poisoned_ = false;
  CplStatus status_ = CplStatus::kSuccess;
};

}  // namespace dxpu::pcie
