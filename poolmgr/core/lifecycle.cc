#include "poolmgr/core/lifecycle.h"

#include <initializer_list>

#include "absl/strings/str_cat.h"

namespace dxpu::poolmgr {
namespace {

constexpr uint32_t set_of(std::initializer_list<Lifecycle> states) {
  uint32_t bits = 0;
  for (Lifecycle s : states) bits |= 1u << static_cast<int>(s);
  return bits;
}
constexpr uint32_t set_of(std::initializer_list<AttachmentState> states) {
  uint32_t bits = 0;
  for (AttachmentState s : states) bits |= 1u << static_cast<int>(s);
  return bits;
}

// What may come after `from`. FREE comes after VALIDATING only: whatever a tenant could have touched is scrubbed and
// checked first. A box that restarts or retries scrubs on its own, hence SCRUBBING and VALIDATING after the quiet
// states, and DETACHING after them for a binding the pool manager does not know.
constexpr uint32_t after(Lifecycle from) {
  using enum Lifecycle;
  switch (from) {
    case kDiscovered:
      return set_of({kScrubbing, kValidating, kDetaching, kRetired});
    case kScrubbing:
      return set_of({kValidating, kDetaching, kRetired});
    case kValidating:
      return set_of({kFree, kScrubbing, kDetaching, kRetired});
    case kFree:
      return set_of({kReserved, kScrubbing, kValidating, kDetaching, kRetired});
    case kReserved:
      return set_of({kAttaching, kDetaching});
    case kAttaching:
      return set_of({kAttached, kDetaching});
    case kAttached:
      return set_of({kDraining, kDetaching});
    case kDraining:
      return set_of({kDetaching});
    // VALIDATING at once only when the box never served the binding: there is nothing to scrub.
    case kDetaching:
      return set_of({kScrubbing, kValidating, kRetired});
    case kRetired:
      return set_of({kDiscovered});
  }
  return 0;
}

constexpr uint32_t after(AttachmentState from) {
  using enum AttachmentState;
  switch (from) {
    case kRequested:
      return set_of({kPlaced});
    case kPlaced:
      return set_of({kLinking, kUnlinking});
    case kLinking:
      return set_of({kPlugging, kUnplugging});
    case kPlugging:
      return set_of({kAttached, kUnplugging});
    case kAttached:
      return set_of({kQuiescing, kUnplugging, kLost});
    case kQuiescing:
      return set_of({kUnplugging});
    // The box may have let go before the host did: then the port was the last thing held.
    case kUnplugging:
      return set_of({kUnlinking, kEnded, kFailed});
    case kUnlinking:
      return set_of({kEnded, kFailed});
    case kLost:
      return set_of({kFailed});
    case kEnded:
    case kFailed:
      return 0;
  }
  return 0;
}

}  // namespace

bool may_follow(Lifecycle from, Lifecycle to) { return (after(from) >> static_cast<int>(to) & 1u) != 0; }
bool may_follow(AttachmentState from, AttachmentState to) { return (after(from) >> static_cast<int>(to) & 1u) != 0; }

absl::Status move_to(FunctionRecord& function, Lifecycle to, absl::Time now, std::string reason) {
  if (!may_follow(function.lifecycle, to)) {
    return absl::InternalError(absl::StrCat("function ", function.id, " can not go from ",
                                            to_string(function.lifecycle), " to ", to_string(to), " (", reason, ")"));
  }
  function.lifecycle = to;
  function.reason = std::move(reason);
  function.since = now;
  function.deadline = absl::InfiniteFuture();
  return absl::OkStatus();
}

absl::Status move_to(AttachmentRecord& attachment, AttachmentState to, absl::Time now, std::string reason) {
  if (!may_follow(attachment.state, to)) {
    return absl::InternalError(absl::StrCat("attachment ", attachment.id, " can not go from ",
                                            to_string(attachment.state), " to ", to_string(to), " (", reason, ")"));
  }
  attachment.state = to;
  attachment.reason = std::move(reason);
  attachment.since = now;
  attachment.deadline = absl::InfiniteFuture();
  return absl::OkStatus();
}

}  // namespace dxpu::poolmgr
