// Chooses functions for a request, all of them or none, and says why each other one was not chosen.
//
// Pure and deterministic: the same inventory, availability and request give the same answer. It never chooses a
// function that is not FREE, that carries a condition, or whose box is cordoned or not connected.
//
// Policy. One box when it can: the box with the fewest fitting functions left that still fits the request (boxes that
// are partly used fill up first, whole boxes stay whole for large same-box requests). When no single box fits and the
// request allows several: the boxes with the most, until the rest fits into one, then that rule again.
//
// Errors: none. A placement that does not succeed is a Placement with ok() false and the refusals.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "poolmgr/core/inventory.h"

namespace dxpu::poolmgr {

struct PlacementRequest {
  uint32_t count = 1;
  std::string model;              // empty: any
  uint64_t min_memory_bytes = 0;  // 0: any
  bool same_box = false;
  std::string function_id;  // exactly this one; empty: any
};

// Why a candidate was refused. Each candidate has one: the first that applies, in this order.
inline constexpr absl::string_view kNotThatFunction = "not-that-function";
inline constexpr absl::string_view kWrongModel = "wrong-model";
inline constexpr absl::string_view kTooLittleMemory = "too-little-memory";
inline constexpr absl::string_view kQuarantined = "quarantined";
inline constexpr absl::string_view kMissing = "missing";
inline constexpr absl::string_view kBoxNotConnected = "box-not-connected";
inline constexpr absl::string_view kCordoned = "cordoned";
inline constexpr absl::string_view kUnhealthy = "unhealthy";
inline constexpr absl::string_view kNotFree = "not-free";
inline constexpr absl::string_view kTooFewInBox =
    "too-few-in-its-box";  // fits, but a same-box request needs more beside it
inline constexpr absl::string_view kTooFewInPool = "too-few-in-the-pool";  // fits, but the pool has not enough like it
inline constexpr absl::string_view kNotNeeded = "not-needed";              // fits; others were better

struct Refusal {
  std::string function_id;
  absl::string_view reason;
};

struct Placement {
  std::vector<std::string> function_ids;  // request.count of them, or none
  std::vector<Refusal> refusals;          // every function not chosen, once, in order of id

  bool ok() const { return !function_ids.empty(); }
  std::map<std::string, uint32_t> counts() const;  // per reason
  std::string describe() const;                    // "3 not-free, 1 wrong-model"
};

class Placer {
 public:
  // Is the box's agent connected and has it reported?
  using BoxAvailable = std::function<bool(absl::string_view box_id)>;

  static Placement place(const Inventory& inventory, const BoxAvailable& available, const PlacementRequest& request);
};

}  // namespace dxpu::poolmgr
