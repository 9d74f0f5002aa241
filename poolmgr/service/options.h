// The pool manager's deadlines and limits, and the rules between them.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "poolmgr/store/store.h"

namespace dxpu::poolmgr {

struct Options {
  absl::Duration heartbeat = absl::Seconds(2);  // how often an agent and the pool manager say that they live
  absl::Duration silence = absl::Seconds(10);   // an agent silent for longer is taken for gone

  // Steps of an attach: the box serves, the host connects, the host's kernel shows it.
  absl::Duration serve = absl::Seconds(30);
  absl::Duration link = absl::Seconds(30);
  absl::Duration plug = absl::Seconds(60);
  absl::Duration attach = absl::Minutes(3);  // the whole of it, when the request names no timeout
  // Steps of a detach: the host lets go. What the box does has no deadline of its own: a function is never given back
  // early.
  absl::Duration unplug = absl::Seconds(30);
  absl::Duration detach = absl::Minutes(2);

  absl::Duration ticket_life = absl::Minutes(2);    // from its making until it opens an epoch
  absl::Duration ticket_pause = absl::Seconds(1);   // between two new tickets for one attachment
  absl::Duration orphan_grace = absl::Minutes(10);  // before a binding the pool does not know is taken apart
  Retention retention;

  // INVALID_ARGUMENT names the two that do not go together.
  absl::Status check() const;
};

// Limits on what agents and operators may send, so that one of them can not fill the pool manager's memory.
inline constexpr uint32_t kMaxSlots = 256;  // a box with more is a configuration error
inline constexpr uint32_t kMaxPorts = 256;  // one bus of a virtual host bridge
inline constexpr int kMaxPaths = 64;
inline constexpr int kMaxPhysicalGpus = 256;
inline constexpr size_t kMaxText = 1024;    // of one reason, detail or event message; longer ones are cut
inline constexpr uint32_t kMaxCount = 256;  // functions in one attach: no host has more ports
inline constexpr size_t kMaxRequestId = 128;
inline constexpr uint32_t kDefaultPage = 100;
inline constexpr uint32_t kMaxPage = 1000;

}  // namespace dxpu::poolmgr
