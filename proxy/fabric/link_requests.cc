// Requests and answers of a link.
#include <algorithm>

#include "proxy/fabric/link.h"
#include "proxy/fabric/tlp_io.h"
#include "proxy/pcie/split.h"

namespace dxpu::fabric {
namespace {

using function::Outcome;

// Unanswered requests of the peer kept beyond what it may have in flight: those it has given up on count here too.
constexpr uint32_t kAbandoned = 4096;
// Posted writes of a large range are handed to the queue in portions, so that answers get in between.
constexpr unsigned kPortion = 64;

}  // namespace

void Link::begin(const Requester::OperationPtr& operation) {
  absl::Duration earliest;
  if (!requester_.start(operation, earliest)) return;
  flush();
  if (!operation->waited_for) watch(earliest);
}

void Link::watch(absl::Duration deadline) {
  if (absl::ToInt64Nanoseconds(deadline) < planned_ns_.load(std::memory_order_seq_cst)) kick();
}

void Link::kick() {
  std::lock_guard lock(service_mutex_);
  kicked_ = true;
  service_wake_.notify_one();
}

void Link::read_memory(uint64_t address, std::span<std::byte> out, function::Done done) {
  if (out.empty() || address + out.size() - 1 < address) {
    done(out.empty() ? Outcome::kSuccess : Outcome::kUnsupportedRequest);
    return;
  }
  auto operation = std::make_shared<Requester::Operation>();
  operation->request.type = pcie::TlpType::kMemRead;
  operation->address = address;
  operation->left = out.size();
  operation->out = out.data();
  operation->done = std::move(done);
  begin(operation);
}

void Link::read_memory(uint64_t address, uint32_t bytes, function::ReadDone done) {
  auto operation = std::make_shared<Requester::Operation>();
  operation->request.type = pcie::TlpType::kMemRead;
  if (bytes <= operation->small.size()) {
    operation->result = std::span(operation->small).first(bytes);
  } else {
    operation->large.resize(bytes);
    operation->result = operation->large;
  }
  operation->address = address;
  operation->left = bytes;
  operation->out = operation->result.data();
  operation->read_done = std::move(done);
  begin(operation);
}

void Link::read_config(uint32_t offset, uint8_t byte_enable, function::ReadDone done) {
  auto operation = std::make_shared<Requester::Operation>();
  pcie::Tlp& request = operation->request;
  request.type = pcie::TlpType::kCfgRead0;
  request.length_dw = 1;
  request.first_be = byte_enable;
  request.target = setup_.peer;
  request.config_register = static_cast<uint16_t>(offset & ~3u);
  operation->left = 4;
  operation->result = std::span(operation->small).first(4);
  operation->read_done = std::move(done);
  begin(operation);
}

void Link::write_config(uint32_t offset, uint8_t byte_enable, uint32_t dw, absl::Duration deadline,
                        function::Done done) {
  auto operation = std::make_shared<Requester::Operation>();
  pcie::Tlp& request = operation->request;
  request.type = pcie::TlpType::kCfgWrite0;
  request.length_dw = 1;
  request.first_be = byte_enable;
  request.target = setup_.peer;
  request.config_register = static_cast<uint16_t>(offset & ~3u);
  request.payload.resize(4);
  Le<uint32_t> wire;
  wire.set(dw);
  std::memcpy(request.payload.data(), &wire, 4);
  operation->left = 4;
  operation->deadline = deadline;
  operation->done = std::move(done);
  begin(operation);
}

void Link::atomic(function::AtomicOp op, uint64_t address, unsigned width, uint64_t operand, uint64_t compare,
                  function::ReadDone done) {
  if ((width != 4 && width != 8) || address % width != 0) {
    done(Outcome::kUnsupportedRequest, {});
    return;
  }
  auto operation = std::make_shared<Requester::Operation>();
  pcie::Tlp& request = operation->request;
  switch (op) {
    case function::AtomicOp::kFetchAdd:
      request.type = pcie::TlpType::kFetchAdd;
      break;
    case function::AtomicOp::kSwap:
      request.type = pcie::TlpType::kSwap;
      break;
    case function::AtomicOp::kCompareSwap:
      request.type = pcie::TlpType::kCompareSwap;
      break;
  }
  const bool cas = op == function::AtomicOp::kCompareSwap;
  request.address = address;
  request.length_dw = static_cast<uint16_t>((cas ? 2 : 1) * width / 4);
  request.payload.resize(request.length_dw * 4u);
  Le<uint64_t> wire;
  if (cas) {  // the compare value comes first
    wire.set(compare);
    std::memcpy(request.payload.data(), &wire, width);
  }
  wire.set(operand);
  std::memcpy(request.payload.data() + (cas ? width : 0), &wire, width);
  operation->left = width;
  operation->result = std::span(operation->small).first(width);
  operation->read_done = std::move(done);
  begin(operation);
}

void Link::write_memory(uint64_t address, std::span<const std::byte> data) {
  if (data.empty() || address + data.size() - 1 < address) {
    if (!data.empty()) count_unsupported();
    return;
  }
  const bool may_wait = !in_dispatch();
  uint64_t last = 0;
  unsigned portion = 0;
  bool referenced = false;
  bool open = true;
  size_t at = 0;
  pcie::split_request(address, data.size(), setup_.negotiated.max_payload, [&](uint64_t piece_address, uint32_t bytes) {
    if (!open) return;
    const std::span<const std::byte> piece = data.subspan(at, bytes);
    at += bytes;
    const pcie::ByteEnables be = pcie::byte_enables(piece_address, bytes);
    pcie::Tlp tlp;
    tlp.type = pcie::TlpType::kMemWrite;
    tlp.requester = setup_.id;
    tlp.address = piece_address & ~uint64_t{3};
    tlp.length_dw = be.length_dw;
    tlp.first_be = be.first;
    tlp.last_be = be.last;
    const uint32_t payload_bytes = be.length_dw * 4u;
    Packet packet;
    std::array<std::byte, 16> small;
    std::span<const std::byte> payload = piece;
    if (payload_bytes <= small.size()) {
      small.fill(std::byte{0});
      std::memcpy(small.data() + (piece_address & 3), piece.data(), bytes);
      payload = std::span(small).first(payload_bytes);
    } else if (!may_wait || payload_bytes != bytes || data.size() <= pcie::kMaxPayloadBytes) {
      // Padding to whole DWs needs a copy; so does whoever must not wait, or need not for so little.
      packet.buffer = pool_.get();
      std::memset(packet.buffer.get(), 0, 4);
      std::memset(packet.buffer.get() + payload_bytes - 4, 0, 4);
      std::memcpy(packet.buffer.get() + (piece_address & 3), piece.data(), bytes);
      payload = {packet.buffer.get(), payload_bytes};
    } else {
      referenced = true;
    }
    if (!pack(tlp, 0, payload, packet).ok()) {
      open = false;
      return;
    }
    tlps_sent_.fetch_add(1, std::memory_order_relaxed);
    const uint64_t number = queue_.append(std::move(packet), true);
    if (number == 0) {
      open = false;
      return;
    }
    last = number;
    if (may_wait && referenced && ++portion == kPortion) {
      portion = 0;
      referenced = false;
      open = queue_.wait_sent(last).ok();
    }
  });
  if (!may_wait) return;  // flushed at the end of the dispatch
  if (last != 0 && (referenced || queue_.queued_bytes() > SendQueue::kSoftBytes)) {
    queue_.wait_sent(last).IgnoreError();  // the queue has told the link
  } else {
    queue_.flush();
  }
}

void Link::reset_peer(function::Done done) {
  const absl::Duration deadline = clock_.monotonic() + setup_.options.deadlines.fast_io_fail;
  uint32_t transaction = 0;
  {
    std::lock_guard lock(service_mutex_);
    if (alive()) {
      if (++next_reset_ == 0) ++next_reset_;
      transaction = next_reset_;
      resets_.emplace(transaction, PendingReset{deadline, std::move(done)});
    }
  }
  if (transaction == 0) {
    done(Outcome::kLinkDown);
    return;
  }
  Packet packet;
  const ResetWire wire{};
  pack_control(FrameType::kReset, 0, transaction, std::as_bytes(std::span(&wire, 1)), packet);
  queue_.append(std::move(packet), true);
  flush();
  watch(deadline);
}

// ---- answers -------------------------------------------------------------------------------------------------------

bool Link::admit() {
  if (inbound_.fetch_add(1, std::memory_order_relaxed) < setup_.negotiated.we_accept + kAbandoned) return true;
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  return false;
}

void Link::answer_data(const pcie::Tlp& request, uint32_t transaction, Buffer data) {
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  const std::byte* const bytes = data.get();
  // The buffer goes with the last piece: pieces leave in order.
  Packet previous;
  bool first = true;
  for_each_completion(request, setup_.id, setup_.negotiated.max_payload, setup_.negotiated.read_completion_boundary,
                      [&](const pcie::Tlp& completion, uint32_t offset, uint32_t length) {
                        if (!first) queue_.append(std::move(previous), true);
                        first = false;
                        previous = Packet();
                        pack(completion, transaction, {bytes + offset, length}, previous).IgnoreError();
                        tlps_sent_.fetch_add(1, std::memory_order_relaxed);
                      });
  previous.buffer = std::move(data);
  queue_.append(std::move(previous), true);
  flush();
}

void Link::answer_inline(const pcie::Tlp& request, uint32_t transaction, std::span<const std::byte> dws) {
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  pcie::Tlp completion;
  completion.type = pcie::TlpType::kCompletionData;
  completion.requester = request.requester;
  completion.tag = request.tag;
  completion.completer = setup_.id;
  completion.traffic_class = request.traffic_class;
  completion.attributes = request.attributes;
  completion.length_dw = static_cast<uint16_t>(dws.size() / 4);
  completion.byte_count = static_cast<uint16_t>(dws.size());
  if (request.type == pcie::TlpType::kMemRead) {
    const pcie::ByteRange range = pcie::range_of(request);
    completion.byte_count = static_cast<uint16_t>(std::max<uint32_t>(range.bytes, 1));
    completion.lower_address = static_cast<uint8_t>(range.address & 0x7f);
  }
  Packet packet;
  if (!pack(completion, transaction, dws, packet).ok()) return;
  tlps_sent_.fetch_add(1, std::memory_order_relaxed);
  queue_.append(std::move(packet), true);
  flush();
}

void Link::answer_status(const pcie::Tlp& request, uint32_t transaction, Outcome outcome) {
  inbound_.fetch_sub(1, std::memory_order_relaxed);
  if (outcome == Outcome::kUnsupportedRequest) count_unsupported();
  Packet packet;
  const pcie::Tlp completion = pcie::make_completion_status(request, status_of(outcome), setup_.id);
  if (!pack(completion, transaction, {}, packet).ok()) return;
  tlps_sent_.fetch_add(1, std::memory_order_relaxed);
  queue_.append(std::move(packet), true);
  flush();
}

void Link::answer_reset(uint32_t transaction, Outcome outcome) {
  ResetWire wire{};
  wire.status.set(static_cast<uint8_t>(status_of(outcome)));
  Packet packet;
  pack_control(FrameType::kReset, kFlagAnswer, transaction, std::as_bytes(std::span(&wire, 1)), packet);
  queue_.append(std::move(packet), true);
  flush();
}

}  // namespace dxpu::fabric
