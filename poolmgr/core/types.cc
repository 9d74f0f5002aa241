#include "poolmgr/core/types.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace dxpu::poolmgr {

absl::string_view to_string(Lifecycle lifecycle) {
  switch (lifecycle) {
    case Lifecycle::kDiscovered:
      return "DISCOVERED";
    case Lifecycle::kValidating:
      return "VALIDATING";
    case Lifecycle::kFree:
      return "FREE";
    case Lifecycle::kReserved:
      return "RESERVED";
    case Lifecycle::kAttaching:
      return "ATTACHING";
    case Lifecycle::kAttached:
      return "ATTACHED";
    case Lifecycle::kDraining:
      return "DRAINING";
    case Lifecycle::kDetaching:
      return "DETACHING";
    case Lifecycle::kScrubbing:
      return "SCRUBBING";
    case Lifecycle::kRetired:
      return "RETIRED";
  }
  return "UNKNOWN";
}

absl::string_view to_string(Condition condition) {
  switch (condition) {
    case Condition::kCordoned:
      return "CORDONED";
    case Condition::kUnhealthy:
      return "UNHEALTHY";
    case Condition::kMissing:
      return "MISSING";
    case Condition::kQuarantined:
      return "QUARANTINED";
  }
  return "UNKNOWN";
}

absl::string_view to_string(AttachmentState state) {
  switch (state) {
    case AttachmentState::kRequested:
      return "REQUESTED";
    case AttachmentState::kPlaced:
      return "PLACED";
    case AttachmentState::kLinking:
      return "LINKING";
    case AttachmentState::kPlugging:
      return "PLUGGING";
    case AttachmentState::kAttached:
      return "ATTACHED";
    case AttachmentState::kQuiescing:
      return "QUIESCING";
    case AttachmentState::kUnplugging:
      return "UNPLUGGING";
    case AttachmentState::kUnlinking:
      return "UNLINKING";
    case AttachmentState::kEnded:
      return "ENDED";
    case AttachmentState::kFailed:
      return "FAILED";
    case AttachmentState::kLost:
      return "LOST";
  }
  return "UNKNOWN";
}

std::string function_id(absl::string_view box_id, uint32_t slot) { return absl::StrCat(box_id, "/", slot); }

bool valid_id(absl::string_view id) {
  constexpr size_t kMaxId = 63;  // a DNS label's length, so that an id can name a machine
  if (id.empty() || id.size() > kMaxId) return false;
  for (size_t i = 0; i < id.size(); ++i) {
    const char c = id[i];
    if (absl::ascii_isdigit(c) || absl::ascii_islower(c)) continue;
    if (i > 0 && (c == '.' || c == '-')) continue;
    return false;
  }
  return true;
}

StepRecord* OperationRecord::step(absl::string_view name) {
  for (StepRecord& s : steps) {
    if (s.name == name) return &s;
  }
  return nullptr;
}

const StepRecord* OperationRecord::step(absl::string_view name) const {
  return const_cast<OperationRecord*>(this)->step(name);
}

}  // namespace dxpu::poolmgr
