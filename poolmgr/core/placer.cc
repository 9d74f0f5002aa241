#include "poolmgr/core/placer.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dxpu::poolmgr {
namespace {

// Empty: it fits.
absl::string_view refusal_of(const FunctionRecord& f, const BoxRecord* box, bool box_available,
                             const PlacementRequest& request) {
  if (!request.function_id.empty() && f.id != request.function_id) return kNotThatFunction;
  if (!request.model.empty() && f.model != request.model) return kWrongModel;
  if (f.memory_bytes < request.min_memory_bytes) return kTooLittleMemory;
  if (f.conditions.has(Condition::kQuarantined)) return kQuarantined;
  if (f.conditions.has(Condition::kMissing)) return kMissing;
  if (!box_available) return kBoxNotConnected;
  if (f.conditions.has(Condition::kCordoned) || box == nullptr || box->cordoned) return kCordoned;
  if (f.conditions.has(Condition::kUnhealthy)) return kUnhealthy;
  if (f.lifecycle != Lifecycle::kFree || !f.attachment_id.empty()) return kNotFree;
  return {};
}

struct Candidate {
  const BoxRecord* box;
  std::vector<const FunctionRecord*> fitting;  // smallest memory that will do first, then by slot
};

}  // namespace

std::map<std::string, uint32_t> Placement::counts() const {
  std::map<std::string, uint32_t> out;
  for (const Refusal& r : refusals) ++out[std::string(r.reason)];
  return out;
}

std::string Placement::describe() const {
  std::vector<std::string> parts;
  for (const auto& [reason, count] : counts()) parts.push_back(absl::StrCat(count, " ", reason));
  return absl::StrJoin(parts, ", ");
}

Placement Placer::place(const Inventory& inventory, const BoxAvailable& available, const PlacementRequest& request) {
  Placement out;
  std::map<std::string, absl::string_view> refused;
  std::vector<Candidate> boxes;
  size_t fitting_in_pool = 0;
  for (const auto& [box_id, box] : inventory.boxes()) {
    Candidate candidate{&box, {}};
    const bool box_available = available(box_id);
    for (const FunctionRecord* f : inventory.functions_of(box_id)) {
      absl::string_view reason = refusal_of(*f, &box, box_available, request);
      if (reason.empty()) {
        candidate.fitting.push_back(f);
      } else {
        refused[f->id] = reason;
      }
    }
    fitting_in_pool += candidate.fitting.size();
    std::stable_sort(candidate.fitting.begin(), candidate.fitting.end(),
                     [](const auto* a, const auto* b) { return a->memory_bytes < b->memory_bytes; });
    if (!candidate.fitting.empty()) boxes.push_back(std::move(candidate));
  }

  std::set<absl::string_view> chosen;
  auto take = [&](Candidate& candidate, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      chosen.insert(candidate.fitting[i]->id);
      out.function_ids.push_back(candidate.fitting[i]->id);
    }
    candidate.fitting.erase(candidate.fitting.begin(), candidate.fitting.begin() + static_cast<ptrdiff_t>(count));
  };
  // Boxes are in order of id, so a tie goes to the first.
  auto tightest = [&](size_t count) -> Candidate* {
    Candidate* best = nullptr;
    for (Candidate& c : boxes) {
      if (c.fitting.size() < count) continue;
      if (best == nullptr || c.fitting.size() < best->fitting.size()) best = &c;
    }
    return best;
  };

  size_t wanted = request.count;
  absl::string_view leftover = kNotNeeded;
  if (wanted == 0 || (!request.function_id.empty() && wanted != 1) || fitting_in_pool < wanted) {
    leftover = request.same_box ? kTooFewInBox : kTooFewInPool;
  } else if (Candidate* one = tightest(wanted)) {
    take(*one, wanted);
  } else if (request.same_box) {
    leftover = kTooFewInBox;
  } else {
    while (wanted > 0) {
      if (Candidate* last = tightest(wanted)) {
        take(*last, wanted);
        break;
      }
      Candidate* largest = &*std::max_element(boxes.begin(), boxes.end(), [](const Candidate& a, const Candidate& b) {
        return a.fitting.size() < b.fitting.size();
      });
      wanted -= largest->fitting.size();
      take(*largest, largest->fitting.size());
    }
  }

  for (const auto& [id, f] : inventory.functions()) {
    if (chosen.count(id) != 0) continue;
    auto it = refused.find(id);
    out.refusals.push_back({id, it != refused.end() ? it->second : leftover});
  }
  return out;
}

}  // namespace dxpu::poolmgr
