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
void split_request(uint64_t address, uint64_t bytes, uint32_t limit,
                   absl::FunctionRef<void(uint64_t address, uint32_t bytes)> piece);

// How a completer answers one memory read: pieces of at most `mps` bytes, cut at multiples of `rcb` (64 or 128), in
// address order. Each completion has Byte Count and Lower Address set; payload comes from `data`, the bytes of
// range_of(request). A zero-length read gives one DW with Byte Count 1.
std::vector<Tlp> make_completions(const Tlp& request, std::span<const std::byte> data, RequesterId completer, uint32_t mps,
                                  uint32_t rcb);
// Cpl (no data) that ends any non-posted request with `status`.
Tlp make_completion_status(const Tlp& request, CplStatus status, RequesterId completer);

// Collects the pieces of one read. The requester counts its own bytes: the completer's Byte Count is only compared.
class Reassembly {
 public:
  // `out` receives the bytes of range_of(request) and must outlive this object.
  Reassembly(const Tlp& request, std::span<std::byte> out);

  // Takes one Cpl/CplD header with its payload (payload apart so that no copy is needed). Returns true when the request is over
  // (all bytes here, or an error status: see status()), false when pieces are missing. INVALID_ARGUMENT when the piece
  // does not fit (wrong Byte Count, Lower Address or Length): a protocol error of the peer; `out` is untouched by it.
  absl::StatusOr<bool> add(const Tlp& completion, std::span<const std::byte> payload);

  CplStatus status() const { return status_; }
  bool poisoned() const { return poisoned_; }
  uint32_t received() const { return received_; }

 private:
  std::span<std::byte> out_;
  uint64_t address_ = 0;      // first enabled byte
  uint32_t expected_ = 0;     // bytes, 1 for a zero-length read
  uint32_t received_ = 0;
  bool zero_length_ = false;
  bool poisoned_ = false;
  CplStatus status_ = CplStatus::kSuccess;
};

}  // namespace dxpu::pcie
