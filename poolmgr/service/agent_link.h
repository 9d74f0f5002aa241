// The pool manager's end of one agent's stream, as the reconciler sees it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "dxpu/v1/agent.pb.h"

namespace dxpu::poolmgr {

class AgentLink {
 public:
  virtual ~AgentLink() = default;
  // Queues the message and never blocks; a newer set of intents may take the place of one that is still queued. Returns
  // the sequence the message carries. Called with the reconciler's lock held: must not call it back.
  virtual uint64_t send(v1::ManagerMessage message) = 0;
  // Ends the stream with this status. Idempotent; same rule.
  virtual void close(absl::Status why) = 0;
  // For people: "ipv4:127.0.0.1:4242".
  virtual std::string peer() const = 0;
};

}  // namespace dxpu::poolmgr
