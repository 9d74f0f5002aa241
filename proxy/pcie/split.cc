#include "proxy/pcie/split.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proxy/pcie/tlp_layout.h"

namespace dxpu::pcie {
namespace {

constexpr uint32_t kSmallestRcb = 64;
constexpr uint32_t kLargestRcb = 128;

// What the completions of a request say about it ("Completion Rules", Byte Count and Lower Address).
struct Answer {
  bool memory_read = false;
  bool data = false;        // answered by CplD
  uint32_t bytes = 0;       // of range_of(request)
  uint32_t byte_count = 0;  // of the first completion
  uint64_t first = 0;       // address that Lower Address is taken from; 0 where it is reserved
  uint32_t lead = 0;        // padding in front of the first byte
};

Answer answer_to(const Tlp& request) {
  Answer answer;
  if (!known(request.type)) return answer;
  const ByteRange range = range_of(request);
  answer.bytes = range.bytes;
  switch (row_of(request.type).shape) {
    case Shape::kMemory:
      answer.memory_read = request.type == TlpType::kMemRead;
      answer.data = answer.memory_read;
      answer.byte_count = std::max<uint32_t>(range.bytes, 1);
      answer.first = range.address;
      answer.lead = range.address % 4;
      break;
    case Shape::kAtomic:
      answer.data = true;
      answer.byte_count = range.bytes;
      break;
    case Shape::kIo:
    case Shape::kConfig:
      answer.data = !has_data(request.type);
      answer.byte_count = 4;
      answer.lead = range.address % 4;
      break;
    case Shape::kMessage:
    case Shape::kCompletion:
      break;
  }
  return answer;
}

Tlp completion_header(const Tlp& request, const Answer& answer, RequesterId completer) {
  Tlp tlp;
  tlp.type = TlpType::kCompletion;
  tlp.traffic_class = request.traffic_class;
  tlp.attributes = request.attributes;
  tlp.requester = request.requester;
  tlp.tag = request.tag;
  tlp.completer = completer;
  tlp.byte_count = static_cast<uint16_t>(answer.byte_count);
  tlp.lower_address = answer.first & 0x7f;
  return tlp;
}

absl::Status misfit(const char* what, uint64_t got, uint64_t expected) {
  return absl::InvalidArgumentError(absl::StrCat("completion: ", what, " is ", got, ", expected ", expected));
}

}  // namespace

void split_request(uint64_t address, uint64_t bytes, uint32_t limit,
                   absl::FunctionRef<void(uint64_t address, uint32_t bytes)> piece) {
  if (limit == 0 || limit > kPageBoundary) limit = kPageBoundary;
  if (bytes == 0) return;
  bytes = std::min(bytes, UINT64_MAX - address + (address == 0 ? 0 : 1));
  while (bytes > 0) {
    const uint64_t in_page = address % kPageBoundary;
    const uint64_t cut = std::min(kPageBoundary, (in_page / limit + 1) * limit);
    const uint32_t here = static_cast<uint32_t>(std::min(bytes, cut - in_page));
    piece(address, here);
    address += here;
    bytes -= here;
  }
}

void split_completions(const Tlp& request, RequesterId completer, uint32_t mps, uint32_t rcb,
                       absl::FunctionRef<void(const CompletionPiece&)> piece) {
  if (class_of(request.type) != TlpClass::kNonPosted) return;
  const Answer answer = answer_to(request);
  CompletionPiece part;
  part.header = completion_header(request, answer, completer);
  if (!answer.data) {
    piece(part);
    return;
  }
  part.header.type = TlpType::kCompletionData;
  if (!answer.memory_read || answer.bytes == 0) {
    part.data_bytes = answer.bytes;
    part.lead = answer.bytes == 0 ? 0 : answer.lead;
    part.header.length_dw = static_cast<uint16_t>(std::max<uint32_t>(1, (part.lead + part.data_bytes + 3) / 4));
    piece(part);
    return;
  }
  rcb = rcb >= kLargestRcb ? kLargestRcb : kSmallestRcb;
  mps = std::clamp(mps / rcb * rcb, rcb, kMaxPayloadBytes);
  const uint64_t first_dw = answer.first & ~uint64_t{3};
  while (part.data_offset < answer.bytes) {
    const uint32_t left = answer.bytes - part.data_offset;
    const uint64_t at = answer.first + part.data_offset;
    // Every piece but the first starts at a multiple of rcb.
    const uint64_t from = part.data_offset == 0 ? first_dw : at;
    const uint64_t cut = (from % rcb + mps) / rcb * rcb - from % rcb;  // from `from`; at least 1 since mps >= rcb
    part.lead = static_cast<uint32_t>(at - from);
    part.data_bytes = static_cast<uint32_t>(std::min<uint64_t>(left, cut - part.lead));
    part.header.byte_count = static_cast<uint16_t>(left);
    part.header.lower_address = at & 0x7f;
    part.header.length_dw = static_cast<uint16_t>((part.lead + part.data_bytes + 3) / 4);
    piece(part);
    part.data_offset += part.data_bytes;
  }
}

std::vector<Tlp> make_completions(const Tlp& request, std::span<const std::byte> data, RequesterId completer,
                                  uint32_t mps, uint32_t rcb) {
  std::vector<Tlp> completions;
  if (class_of(request.type) != TlpClass::kNonPosted) return completions;
  const Answer answer = answer_to(request);
  if (answer.data && data.size() != answer.bytes) {
    completions.push_back(make_completion_status(request, CplStatus::kCompleterAbort, completer));
    return completions;
  }
  split_completions(request, completer, mps, rcb, [&](const CompletionPiece& piece) {
    Tlp& tlp = completions.emplace_back(piece.header);
    const auto part = data.subspan(has_data(tlp.type) ? piece.data_offset : 0, piece.data_bytes);
    if (part.size() == tlp.length_dw * size_t{4}) {
      tlp.payload.assign(part.begin(), part.end());
    } else {
      tlp.payload.resize(tlp.length_dw * size_t{4});
      if (!part.empty()) std::memcpy(tlp.payload.data() + piece.lead, part.data(), part.size());
    }
  });
  return completions;
}

Tlp make_completion_status(const Tlp& request, CplStatus status, RequesterId completer) {
  Tlp tlp = completion_header(request, answer_to(request), completer);
  tlp.status = status;
  return tlp;
}

Reassembly::Reassembly(const Tlp& request, std::span<std::byte> out) : out_(out) {
  const Answer answer = answer_to(request);
  answered_by_data_ = answer.data;
  memory_read_ = answer.memory_read;
  expected_ = answer.data ? answer.bytes : 0;
  byte_count_ = answer.byte_count;
  lower_address_ = answer.first;
  lead_ = answer.bytes == 0 ? 0 : answer.lead;
}

absl::StatusOr<bool> Reassembly::add(const Tlp& completion, std::span<const std::byte> payload) {
  if (class_of(completion.type) != TlpClass::kCompletion) {
    return absl::InvalidArgumentError(absl::StrCat("completion: a ", name_of(completion.type), " is none"));
  }
  if (over_) return absl::InvalidArgumentError("completion: the request is over already");
  // The status comes first: an error ends the request, and there is nothing to place that could be wrong.
  if (completion.status != CplStatus::kSuccess) {
    status_ = completion.status;
    over_ = true;
    return true;
  }
  const bool data = completion.type == TlpType::kCompletionData;
  if (data != answered_by_data_) {
    return absl::InvalidArgumentError(data ? "completion: data for a request that asks for none"
                                           : "completion: success without the data that was asked for");
  }
  if (completion.byte_count != byte_count_ - received_) {
    return misfit("Byte Count", completion.byte_count, byte_count_ - received_);
  }
  const uint32_t lower = memory_read_ ? (lower_address_ + received_) & 0x7f : 0;
  if (completion.lower_address != lower) return misfit("Lower Address", completion.lower_address, lower);
  if (!data) {
    if (!payload.empty()) return misfit("payload size", payload.size(), 0);
    over_ = true;
    return true;
  }
  if (out_.size() < expected_) {
    return absl::InvalidArgumentError(
        absl::StrCat("completion: the buffer has ", out_.size(), " bytes, the request ", expected_));
  }
  if (completion.length_dw == 0) return misfit("Length", 0, 1);
  if (payload.size() != completion.length_dw * size_t{4}) {
    return misfit("payload size", payload.size(), completion.length_dw * uint64_t{4});
  }
  const uint32_t lead = received_ == 0 ? lead_ : 0;
  const uint32_t left = expected_ - received_;
  const uint32_t wanted_dw = std::max<uint32_t>(1, (lead + left + 3) / 4);
  if (completion.length_dw > wanted_dw) return misfit("Length (too much data)", completion.length_dw, wanted_dw);
  if (completion.length_dw < wanted_dw) {
    if (!memory_read_) return misfit("Length", completion.length_dw, wanted_dw);
    if ((lower / 4 + completion.length_dw) * 4 % kSmallestRcb != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("completion: Length ", completion.length_dw, " ends away from a Read Completion Boundary"));
    }
  }
  const uint32_t bytes = std::min(left, completion.length_dw * 4u - lead);
  if (bytes != 0) std::memcpy(out_.data() + received_, payload.data() + lead, bytes);
  received_ += bytes;
  poisoned_ = poisoned_ || completion.poisoned;
  over_ = received_ == expected_;
  return over_;
}

}  // namespace dxpu::pcie
