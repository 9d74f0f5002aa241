// Where a function is plugged in to be used: a port of dxpu.ko (attach::KernelAttach) or this process
// (attach::DirectAttach). Any Function plugs into any AttachPoint.
#pragma once

#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proxy/function/function.h"

namespace dxpu::attach {

enum class PortState {
  kEmpty,
  kPlugging,  // plugged, the host has not shown it yet
  kAttached,  // the host shows it
  kGone,      // function gone (all ones), users have not closed yet
  kRemoving,  // users closed, the host is removing it
};
const char* name_of(PortState state);

struct PortStatus {
  PortState state = PortState::kEmpty;
  std::string bus_address;  // "dddd:bb:dd.f", empty when not enumerated
  std::string holder;       // "pid 123 (name)", empty when nobody has it open
  std::string detail;       // why the last plug failed, else empty
};

class AttachPoint : public function::Upstream {
 public:
  // Shows `function` on the port. Returns when the host was told; status() goes to kAttached when it is enumerated.
  // FAILED_PRECONDITION when the port is not empty; INVALID_ARGUMENT when the BARs do not fit the port's windows.
  // `function` stays the caller's and must outlive unplug().
  virtual absl::Status plug(function::Function& function) = 0;

  // Step one of removal, at once and without waiting for users: reads give all ones, waiters end, DMA stops, users are
  // told. After it returns `function` is not used again. Idempotent. `reason` is for the log.
  virtual absl::Status unplug(const std::string& reason) = 0;
  // Asks users to close (VFIO's REQ interrupt) while the function still works: the polite step before unplug().
  virtual absl::Status request_release() = 0;

  virtual PortStatus status() const = 0;
  // `changed` runs (any thread, must not block) after each change of status(). Set it before plug().
  virtual void set_status_callback(absl::AnyInvocable<void()> changed) = 0;
};

}  // namespace dxpu::attach
