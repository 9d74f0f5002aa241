// An agent's stream to the pool manager: the same for boxd and hostd.
//
// What this is: connects, says hello, sends the whole set of facts, and again after each change; hands the intents that
// come down to the agent; keeps trying, with jitter, for as long as the agent lives. What it is not: it never decides
// anything, and losing the stream changes nothing the agent holds.
//
// Facts are level-triggered (agent.proto), yet each publish() made while connected is sent as its own message, so that
// the pool manager's history shows short phases too; when the manager is slow, only the newest ones are kept.
//
// Threads. One thread runs the connection and reads, one writes. The callbacks run on the first, one at a time.
// publish() and event() may be called from any thread, from a callback too, and never block on the network. stop()
// joins; it must not be called from a callback.
//
// Errors. None reach the caller: a stream that fails is logged (attempt, reason, next try) and opened again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "dxpu/v1/agent.pb.h"

namespace dxpu::agent {

struct StreamOptions {
  std::string pool_address;  // "address:port"
  absl::Duration first_retry = absl::Milliseconds(100);
  absl::Duration longest_retry = absl::Seconds(3);
  absl::Duration heartbeat = absl::Seconds(2);  // until the pool manager's Welcome says otherwise
};

struct StreamCallbacks {
  // The first message of a stream (box_hello or host_hello set). Called on every connect.
  std::function<v1::AgentMessage()> hello;
  // BoxIntents or HostIntents. When it returns they count as acted upon.
  std::function<void(const v1::ManagerMessage&)> intents;
};

class AgentStream {
 public:
  // Connects only when the first facts have been published.
  static std::unique_ptr<AgentStream> start(StreamOptions options, StreamCallbacks callbacks);
  virtual ~AgentStream() = default;

  // `facts` (box_facts or host_facts set) is the whole set as it is now; intents_applied is filled in here.
  virtual void publish(v1::AgentMessage facts) = 0;
  // For the event log. Kept (the newest 1000) until it has been sent once.
  virtual void event(const std::string& type, const std::string& subject, const std::string& message,
                     const std::string& attachment_id) = 0;
  virtual bool connected() const = 0;
  // Sends what is queued, at most for `grace`, then ends the stream and joins. Idempotent.
  virtual void stop(absl::Duration grace) = 0;
};

void stamp(google::protobuf::Timestamp* out, absl::Time time);
absl::Time to_time(const google::protobuf::Timestamp& stamp);

// A random id for this start of the agent.
std::string make_boot_id();

}  // namespace dxpu::agent
