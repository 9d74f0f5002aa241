// The life of a function that no attachment holds: it follows what its box reports.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "poolmgr/service/reconciler.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {

absl::Status Reconciler::step_function(Changes& c, FunctionRecord& f) {
  auto live = boxes_.find(f.box_id);
  const v1::SlotFact* fact = live == boxes_.end() ? nullptr : live->second.fact(f.slot);
  if (fact == nullptr || inventory_.holder_of_function(f.id) != nullptr) return absl::OkStatus();
  // A pool manager that has lost its memory must not count from the start again.
  f.generation = std::max(f.generation, fact->generation());
  const std::string box = absl::StrCat("box ", f.box_id);
  const std::string detail = fact->detail().empty() ? "" : absl::StrCat(": ", fact->detail());

  using enum Lifecycle;
  switch (fact->phase()) {
    case v1::SLOT_PHASE_SERVING:
      if (f.lifecycle == kDetaching) return absl::OkStatus();
      c.event(
          "function.unknown_attachment", f.id,
          absl::StrCat(box, " serves ", fact->attachment_id(), ", which this pool does not know; it is taken apart in ",
                       absl::FormatDuration(options_.orphan_grace)),
          fact->attachment_id());
      return c.move(f, kDetaching, absl::StrCat(box, " serves the unknown attachment ", fact->attachment_id()));
    case v1::SLOT_PHASE_SCRUBBING:
      if (f.lifecycle == kScrubbing) return absl::OkStatus();
      return c.move(f, kScrubbing, absl::StrCat(box, " wipes it", detail));
    case v1::SLOT_PHASE_VALIDATING:
      if (f.lifecycle == kValidating) return absl::OkStatus();
      if (f.lifecycle == kDetaching) DXPU_RETURN_IF_ERROR(c.move(f, kScrubbing, absl::StrCat(box, " wiped it")));
      return c.move(f, kValidating, absl::StrCat(box, " reads it back and tests it", detail));
    case v1::SLOT_PHASE_FAILED:
      c.set_condition(f, Condition::kUnhealthy, true, absl::StrCat(box, " could not scrub or validate it", detail));
      if (f.lifecycle == kFree || f.lifecycle == kDiscovered) {
        return c.move(f, kValidating, absl::StrCat(box, " reports it as failed", detail));
      }
      return absl::OkStatus();
    case v1::SLOT_PHASE_IDLE:
      if (f.lifecycle == kDetaching) DXPU_RETURN_IF_ERROR(c.move(f, kScrubbing, absl::StrCat(box, " wiped it")));
      if (f.lifecycle == kScrubbing || f.lifecycle == kDiscovered) {
        DXPU_RETURN_IF_ERROR(c.move(f, kValidating, absl::StrCat(box, " validated it")));
      }
      if (f.lifecycle == kValidating)
        DXPU_RETURN_IF_ERROR(c.move(f, kFree, absl::StrCat(box, " says it is clean and idle", detail)));
      c.set_condition(f, Condition::kUnhealthy, false, "validated");
      return absl::OkStatus();
    default:
      return absl::OkStatus();
  }
}

}  // namespace dxpu::poolmgr
