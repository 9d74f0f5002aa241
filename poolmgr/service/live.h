// What is known about an agent only while it is there: its stream, its last facts, the intents it was sent.
//
// None of it is kept in the store: a restarted pool manager learns it again from the agents' first messages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "dxpu/v1/agent.pb.h"
#include "poolmgr/service/agent_link.h"

namespace dxpu::poolmgr {

// A slot or a port. Fact is v1::SlotFact or v1::PortFact, Intent v1::SlotIntent or v1::PortIntent.
template <typename Fact, typename Intent>
struct PlaceLive {
  Fact fact;
  bool reported = false;  // in this stream; otherwise `fact` is what an earlier one said
  Intent sent;
  // Sequence of the first message of this stream that carried exactly `sent`; 0: nothing was sent.
  uint64_t sent_since = 0;
  // Monotonic; when it was first seen to hold something the pool does not know. InfiniteDuration: it does not.
  absl::Duration unknown_since = absl::InfiniteDuration();
};
using SlotLive = PlaceLive<v1::SlotFact, v1::SlotIntent>;
using PortLive = PlaceLive<v1::PortFact, v1::PortIntent>;

template <typename Place>
struct AgentLive {
  std::shared_ptr<AgentLink> link;  // nullptr: not connected
  std::string boot_id;
  absl::Duration heard = absl::ZeroDuration();  // monotonic
  absl::Time last_seen = absl::InfinitePast();
  absl::Duration beat = absl::ZeroDuration();  // monotonic; our last heartbeat to it
  bool have_facts = false;                     // in this stream
  uint64_t applied = 0;                        // sequence of the last intents it acted upon
  bool intents_due = false;
  std::map<uint32_t, Place> places;

  bool ready() const { return link != nullptr && have_facts; }
  // The current fact of a place; nullptr when the agent is not there or has not said.
  const auto* fact(uint32_t number) const {
    auto it = places.find(number);
    return ready() && it != places.end() && it->second.reported ? &it->second.fact : nullptr;
  }
  // The intent of a place that the agent has acted upon; nullptr when it has not acted upon the newest.
  const auto* acted(uint32_t number) const {
    auto it = places.find(number);
    const bool has = ready() && it != places.end() && it->second.sent_since != 0 && applied >= it->second.sent_since;
    return has ? &it->second.sent : nullptr;
  }
  void opened(std::shared_ptr<AgentLink> new_link, std::string boot) {
    link = std::move(new_link);
    boot_id = std::move(boot);
    have_facts = false;
    applied = 0;
    intents_due = true;
    for (auto& [number, place] : places) {
      place.reported = false;
      place.sent.Clear();
      place.sent_since = 0;
    }
  }
};
using BoxLive = AgentLive<SlotLive>;
using HostLive = AgentLive<PortLive>;

}  // namespace dxpu::poolmgr
