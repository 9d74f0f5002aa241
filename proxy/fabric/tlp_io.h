// TLPs to and from frames: packing, cutting completions without copying them, walking byte enables. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "proxy/fabric/frame.h"
#include "proxy/fabric/send_queue.h"
#include "proxy/function/function.h"
#include "proxy/pcie/tlp.h"

namespace dxpu::fabric {

// Completion statuses and how requests end. What has no status of its own (a timeout behind us, …) is CA to the peer;
// an unknown status is CA to us.
pcie::CplStatus status_of(function::Outcome outcome);
function::Outcome outcome_of(pcie::CplStatus status);

// Envelope and TLP header of `tlp` into `packet`; `payload` is `tlp.length_dw` DWs in memory order for types with data,
// else empty. Up to 16 bytes are copied, more are referenced and must live until the packet has left. tlp.payload is
// not looked at.
absl::Status pack(const pcie::Tlp& tlp, uint32_t transaction, std::span<const std::byte> payload, Packet& packet);
// Frames without a TLP.
void pack_control(FrameType type, uint8_t flags, uint32_t transaction, std::span<const std::byte> header,
                  Packet& packet);

// Decodes the TLP of a Tlp frame and proves that everything that exists twice agrees. False: `error`.
bool unpack(const Frame& frame, pcie::Tlp& out, FrameError& error);

// How a completer answers `request` (MRd) with the bytes of range_of(request): pieces in address order, at most `mps`
// bytes each, cut at multiples of `rcb`. `offset` counts from the first DW asked for, so payloads are whole DWs of a
// buffer whose first byte is at the DW-aligned address.
void for_each_completion(const pcie::Tlp& request, pcie::RequesterId completer, uint32_t mps, uint32_t rcb,
                         absl::FunctionRef<void(const pcie::Tlp& completion, uint32_t offset, uint32_t bytes)> piece);

// Runs of enabled bytes of a memory request, ascending: one for ordinary requests, several where the byte enables have
// holes, none for a zero-length one. `offset` counts from the first DW.
void for_each_run(const pcie::Tlp& request,
                  absl::FunctionRef<void(uint64_t address, uint32_t offset, uint32_t bytes)> run);

}  // namespace dxpu::fabric
