// The pool's nouns as plain values: what the store keeps and the reconciler moves.
//
// What this is not: behaviour. Whether a lifecycle may follow another is lifecycle.h's word; who changes a record is
// poolmgr/service's reconciler alone. Numbers of enums are those of proto/dxpu/v1/pool.proto and are kept in the
// database: never renumber.
//
// Records are values: copying one copies everything. absl::InfinitePast() stands for "never", absl::InfiniteFuture()
// for "no deadline".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dxpu::poolmgr {

enum class Lifecycle : int {
  kDiscovered = 1,
  kValidating = 2,
  kFree = 3,
  kReserved = 4,
  kAttaching = 5,
  kAttached = 6,
  kDraining = 7,
  kDetaching = 8,
  kScrubbing = 9,
  kRetired = 10,
};
inline constexpr Lifecycle kEveryLifecycle[] = {
    Lifecycle::kDiscovered, Lifecycle::kValidating, Lifecycle::kFree,      Lifecycle::kReserved,  Lifecycle::kAttaching,
    Lifecycle::kAttached,   Lifecycle::kDraining,   Lifecycle::kDetaching, Lifecycle::kScrubbing, Lifecycle::kRetired,
};
absl::string_view to_string(Lifecycle lifecycle);  // "FREE", as in the proto without its prefix

// Also true of a function whatever its lifecycle: a set, never part of the enum above.
enum class Condition : uint32_t {
  kCordoned = 1,
  kUnhealthy = 2,
  kMissing = 3,
  kQuarantined = 4,
};
inline constexpr Condition kEveryCondition[] = {Condition::kCordoned, Condition::kUnhealthy, Condition::kMissing,
                                                Condition::kQuarantined};
absl::string_view to_string(Condition condition);

class Conditions {
 public:
  constexpr Conditions() = default;
  static constexpr Conditions from_bits(uint32_t bits) {
    Conditions c;
    c.bits_ = bits;
    return c;
  }
  constexpr bool has(Condition c) const { return (bits_ & bit(c)) != 0; }
  constexpr void set(Condition c, bool on) { bits_ = on ? bits_ | bit(c) : bits_ & ~bit(c); }
  constexpr uint32_t bits() const { return bits_; }
  friend constexpr bool operator==(Conditions a, Conditions b) { return a.bits_ == b.bits_; }

 private:
  static constexpr uint32_t bit(Condition c) { return 1u << static_cast<uint32_t>(c); }
  uint32_t bits_ = 0;
};

enum class AttachmentState : int {
  kRequested = 1,
  kPlaced = 2,
  kLinking = 3,
  kPlugging = 4,
  kAttached = 5,
  kQuiescing = 6,
  kUnplugging = 7,
  kUnlinking = 8,
  kEnded = 9,
  kFailed = 10,
  kLost = 11,
};
inline constexpr AttachmentState kEveryAttachmentState[] = {
    AttachmentState::kRequested, AttachmentState::kPlaced,    AttachmentState::kLinking,    AttachmentState::kPlugging,
    AttachmentState::kAttached,  AttachmentState::kQuiescing, AttachmentState::kUnplugging, AttachmentState::kUnlinking,
    AttachmentState::kEnded,     AttachmentState::kFailed,    AttachmentState::kLost,
};
absl::string_view to_string(AttachmentState state);

enum class StepState : int { kPending = 1, kRunning = 2, kDone = 3, kFailed = 4, kSkipped = 5 };

// "<box>/<slot>".
std::string function_id(absl::string_view box_id, uint32_t slot);
// [a-z0-9][a-z0-9.-]{0,62}: what boxes and hosts may be called.
bool valid_id(absl::string_view id);

struct FunctionRecord {
  std::string id;
  std::string owner;
  std::string box_id;
  uint32_t slot = 0;
  std::string model;
  uint64_t memory_bytes = 0;
  std::string engine;
  uint32_t vendor_id = 0;
  uint32_t device_id = 0;
  std::string serial;
  Lifecycle lifecycle = Lifecycle::kDiscovered;
  Conditions conditions;
  std::string reason;
  absl::Time since = absl::InfinitePast();
  absl::Time deadline = absl::InfiniteFuture();
  std::string attachment_id;  // that holds it, empty when none
  uint64_t generation = 0;    // of the last binding; never falls
  int64_t version = 0;        // store revision of the last change

  friend bool operator==(const FunctionRecord&, const FunctionRecord&) = default;
};

struct PhysicalGpuRecord {
  std::string pci_address;
  uint32_t vendor_id = 0;
  uint32_t device_id = 0;
  std::string name;

  friend bool operator==(const PhysicalGpuRecord&, const PhysicalGpuRecord&) = default;
};

struct BoxRecord {
  std::string id;
  std::string owner;
  std::vector<std::string> paths;
  uint32_t slot_count = 0;
  std::vector<PhysicalGpuRecord> physical_gpus;
  bool cordoned = false;
  std::string software_version;
  std::string boot_id;
  absl::Time last_seen = absl::InfinitePast();  // as of the last connect or disconnect
  int64_t version = 0;

  friend bool operator==(const BoxRecord&, const BoxRecord&) = default;
};

struct HostRecord {
  std::string id;
  std::string owner;
  uint32_t port_count = 0;
  std::string attach_point;
  std::string software_version;
  std::string boot_id;
  absl::Time last_seen = absl::InfinitePast();
  int64_t version = 0;

  friend bool operator==(const HostRecord&, const HostRecord&) = default;
};

// One (host, port) ↔ (box, slot) binding. It holds two things, the function and the port, and lets go of them one by
// one: a host program that never closes keeps the port, not the function.
struct AttachmentRecord {
  std::string id;
  std::string owner;
  std::string host_id;
  uint32_t port = 0;
  std::string box_id;
  uint32_t slot = 0;
  std::vector<std::string> paths;
  AttachmentState state = AttachmentState::kRequested;
  std::string reason;
  absl::Time since = absl::InfinitePast();
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time created = absl::InfinitePast();
  absl::Time lease_renewed = absl::InfinitePast();
  std::string bus_address;
  std::string operation_id;

  // What the box is asked to serve …
  uint64_t generation = 0;
  std::string token;
  absl::Time ticket_expires = absl::InfiniteFuture();
  // … and what the host has been offered: the same once the box has said that it serves it. 0: nothing yet.
  uint64_t host_generation = 0;
  std::string host_token;
  absl::Time host_ticket_expires = absl::InfiniteFuture();

  bool ending = false;         // being taken apart: the host holds nothing any more
  bool force = false;          // the host does not wait for users
  bool failed = false;         // ends as FAILED instead of ENDED
  bool box_stop = false;       // the box holds nothing any more
  bool box_served = false;     // the box has served it: it must be scrubbed
  bool box_released = false;   // the function is given back
  bool host_released = false;  // the port is given back

  int64_t version = 0;

  std::string function() const { return function_id(box_id, slot); }
  bool terminal() const { return state == AttachmentState::kEnded || state == AttachmentState::kFailed; }

  friend bool operator==(const AttachmentRecord&, const AttachmentRecord&) = default;
};

struct StepRecord {
  std::string name;
  StepState state = StepState::kPending;
  std::string detail;
  absl::Time started = absl::InfinitePast();
  absl::Time finished = absl::InfinitePast();

  friend bool operator==(const StepRecord&, const StepRecord&) = default;
};

struct OperationRecord {
  std::string id;
  std::string kind;  // "attach" or "detach"
  std::string owner;
  std::string request_id;
  std::vector<std::string> attachment_ids;
  std::vector<StepRecord> steps;
  bool done = false;
  int error_code = 0;  // canonical code
  std::string error_message;
  absl::Time created = absl::InfinitePast();
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time finished = absl::InfinitePast();
  int64_t version = 0;

  StepRecord* step(absl::string_view name);
  const StepRecord* step(absl::string_view name) const;

  friend bool operator==(const OperationRecord&, const OperationRecord&) = default;
};

struct EventRecord {
  int64_t revision = 0;  // given by the store
  absl::Time time = absl::InfinitePast();
  std::string type;
  std::string subject;
  std::string message;
  std::string attachment_id;

  friend bool operator==(const EventRecord&, const EventRecord&) = default;
};

}  // namespace dxpu::poolmgr
