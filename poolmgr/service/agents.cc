// The reconciler's ears: hellos, facts, events, silence.
#include <spdlog/spdlog.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "poolmgr/service/convert.h"
#include "poolmgr/service/reconciler.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {
namespace {

constexpr size_t kMaxTold = 10'000;  // events waiting for a store that can not write

std::string cut(const std::string& text) { return text.size() <= kMaxText ? text : text.substr(0, kMaxText); }

absl::Status check_hello(absl::string_view what, const std::string& id, const std::string& boot_id) {
  if (!valid_id(id)) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " id \"", id.substr(0, 80), "\" must match [a-z0-9][a-z0-9.-]{0,62}; choose another id for the agent"));
  }
  if (boot_id.empty() || boot_id.size() > 64) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", id, ": the hello needs a boot_id of 1 to 64 characters"));
  }
  return absl::OkStatus();
}

absl::Status check_slots(const v1::BoxHello& hello) {
  auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("box ", hello.box_id(), ": ", why));
  };
  if (hello.slots_size() > static_cast<int>(kMaxSlots)) {
    return refuse(absl::StrCat(hello.slots_size(), " slots; a box may have up to ", kMaxSlots));
  }
  if (hello.paths_size() == 0) return refuse("no path: name at least one address:port where its fabric listens");
  if (hello.paths_size() > kMaxPaths) return refuse(absl::StrCat("more than ", kMaxPaths, " paths"));
  if (hello.physical_gpus_size() > kMaxPhysicalGpus)
    return refuse(absl::StrCat("more than ", kMaxPhysicalGpus, " GPUs"));
  std::set<uint32_t> seen;
  for (const v1::SlotDescription& s : hello.slots()) {
    if (s.slot() >= kMaxSlots) return refuse(absl::StrCat("slot ", s.slot(), " is not below ", kMaxSlots));
    if (!seen.insert(s.slot()).second) return refuse(absl::StrCat("slot ", s.slot(), " is described twice"));
    if (s.model().empty() || s.model().size() > 128) {
      return refuse(absl::StrCat("slot ", s.slot(), " needs a model of 1 to 128 characters"));
    }
    if (s.engine().size() > 128 || s.serial().size() > 128)
      return refuse(absl::StrCat("slot ", s.slot(), ": a text is too long"));
    if (s.vendor_id() > 0xffff || s.device_id() > 0xffff) {
      return refuse(absl::StrCat("slot ", s.slot(), ": a PCI id has 16 bits"));
    }
  }
  return absl::OkStatus();
}

// May a new stream take the place of the one that is there?
template <typename Live>
absl::Status check_takeover(absl::string_view what, const std::string& id, const Live& live, const std::string& boot_id,
                            absl::Duration at, absl::Duration silence) {
  if (live.link == nullptr || live.boot_id == boot_id || at - live.heard >= silence) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(what, " ", id, " is connected already from ", live.link->peer(), " (boot ", live.boot_id, ", heard ",
                   absl::FormatDuration(absl::Trunc(at - live.heard, absl::Milliseconds(1))),
                   " ago): two agents must not have one id. Stop that one, or choose another id for this one"));
}

}  // namespace

absl::Status Reconciler::message(const std::shared_ptr<AgentLink>& link, const v1::AgentMessage& message) {
  absl::MutexLock lock(&mutex_);
  auto known = links_.find(link.get());
  absl::Status status;
  if (known == links_.end()) {
    if (message.has_box_hello()) {
      status = box_hello(link, message.box_hello());
    } else if (message.has_host_hello()) {
      status = host_hello(link, message.host_hello());
    } else {
      status = absl::FailedPreconditionError("the first message of an agent's stream must be a hello");
    }
  } else if (message.has_box_hello() || message.has_host_hello()) {
    status = absl::FailedPreconditionError("a second hello in one stream; open a new stream");
  } else if (known->second.is_box) {
    BoxLive& box = boxes_[known->second.id];
    box.heard = clock_.monotonic();
    box.last_seen = now();
    if (message.has_box_facts()) status = box_facts(known->second.id, box, message.box_facts());
    if (message.has_host_facts()) status = absl::InvalidArgumentError("host facts from a box");
  } else {
    HostLive& host = hosts_[known->second.id];
    host.heard = clock_.monotonic();
    host.last_seen = now();
    if (message.has_host_facts()) status = host_facts(known->second.id, host, message.host_facts());
    if (message.has_box_facts()) status = absl::InvalidArgumentError("box facts from a host");
  }
  if (!status.ok()) {
    spdlog::warn("agent={} message=refused error=\"{}\"", link->peer(), status.ToString());
    drop_link(link.get(), status.message());
    reconcile();
    return status;
  }
  if (message.events_size() > 0) {
    agent_events(links_.at(link.get()).id, message);
    Changes c(inventory_, now());
    commit(c).IgnoreError();  // they stay in told_ and the timer tries again
  }
  reconcile();
  return absl::OkStatus();
}

absl::Status Reconciler::box_hello(const std::shared_ptr<AgentLink>& link, const v1::BoxHello& hello) {
  DXPU_RETURN_IF_ERROR(check_hello("box", hello.box_id(), hello.boot_id()));
  DXPU_RETURN_IF_ERROR(check_slots(hello));
  const std::string& id = hello.box_id();
  if (auto it = boxes_.find(id); it != boxes_.end()) {
    DXPU_RETURN_IF_ERROR(check_takeover("box", id, it->second, hello.boot_id(), clock_.monotonic(), options_.silence));
  }

  Changes c(inventory_, now());
  BoxRecord* box = c.box(id);
  if (box == nullptr) {
    BoxRecord fresh;
    fresh.id = id;
    box = &c.add(std::move(fresh));
    c.event("box.registered", id, absl::StrCat("box ", id, " joined the pool with ", hello.slots_size(), " slots"));
  }
  box->paths.assign(hello.paths().begin(), hello.paths().end());
  box->slot_count = static_cast<uint32_t>(hello.slots_size());
  box->software_version = cut(hello.software_version());
  box->boot_id = hello.boot_id();
  box->last_seen = c.now();
  box->physical_gpus.clear();
  for (const v1::PhysicalGpu& gpu : hello.physical_gpus()) {
    box->physical_gpus.push_back({cut(gpu.pci_address()), gpu.vendor_id(), gpu.device_id(), cut(gpu.name())});
  }
  c.event("box.connected", id, absl::StrCat("box ", id, " connected from ", link->peer(), ", boot ", hello.boot_id()));

  std::set<uint32_t> described;
  for (const v1::SlotDescription& s : hello.slots()) {
    described.insert(s.slot());
    FunctionRecord* f = c.function(function_id(id, s.slot()));
    if (f == nullptr) {
      FunctionRecord fresh;
      fresh.id = function_id(id, s.slot());
      fresh.box_id = id;
      fresh.slot = s.slot();
      fresh.since = c.now();
      fresh.reason = "described by its box";
      f = &c.add(std::move(fresh));
      c.event(
          "function.discovered", f->id,
          absl::StrCat("function ", f->id, ": ", s.model(), ", ", s.memory_bytes() >> 20, " MiB, engine ", s.engine()));
    }
    f->model = s.model();
    f->memory_bytes = s.memory_bytes();
    f->engine = s.engine();
    f->vendor_id = s.vendor_id();
    f->device_id = s.device_id();
    f->serial = s.serial();
    c.set_condition(*f, Condition::kMissing, false, "its box describes it again");
  }
  for (const FunctionRecord* known : inventory_.functions_of(id)) {
    if (described.count(known->slot) != 0) continue;
    c.set_condition(*c.function(known->id), Condition::kMissing, true, "its box no longer describes it");
  }
  DXPU_RETURN_IF_ERROR(commit(c));

  BoxLive& live = boxes_[id];
  if (live.link != nullptr) {
    links_.erase(live.link.get());
    live.link->close(absl::AbortedError(absl::StrCat("box ", id, " opened a newer stream")));
  }
  live.opened(link, hello.boot_id());
  live.heard = live.beat = clock_.monotonic();
  live.last_seen = now();
  std::map<uint32_t, SlotLive> places;  // slots that are no longer described are forgotten
  for (uint32_t slot : described) places[slot] = live.places[slot];
  live.places = std::move(places);
  links_[link.get()] = {true, id};
  v1::ManagerMessage message;
  message.mutable_welcome()->set_software_version(DXPU_VERSION);
  set_duration(options_.heartbeat, message.mutable_welcome()->mutable_heartbeat_interval());
  link->send(std::move(message));
  spdlog::info("box={} agent=connected peer={} boot={} slots={}", id, link->peer(), hello.boot_id(),
               hello.slots_size());
  dirty_box(id);
  return absl::OkStatus();
}

absl::Status Reconciler::host_hello(const std::shared_ptr<AgentLink>& link, const v1::HostHello& hello) {
  DXPU_RETURN_IF_ERROR(check_hello("host", hello.host_id(), hello.boot_id()));
  const std::string& id = hello.host_id();
  if (hello.port_count() > kMaxPorts) {
    return absl::InvalidArgumentError(
        absl::StrCat("host ", id, ": ", hello.port_count(), " ports; a host may have up to ", kMaxPorts));
  }
  if (auto it = hosts_.find(id); it != hosts_.end()) {
    DXPU_RETURN_IF_ERROR(check_takeover("host", id, it->second, hello.boot_id(), clock_.monotonic(), options_.silence));
  }
  Changes c(inventory_, now());
  HostRecord* host = c.host(id);
  if (host == nullptr) {
    HostRecord fresh;
    fresh.id = id;
    host = &c.add(std::move(fresh));
    c.event("host.registered", id, absl::StrCat("host ", id, " joined the pool with ", hello.port_count(), " ports"));
  }
  host->port_count = hello.port_count();
  host->attach_point = cut(hello.attach_point());
  host->software_version = cut(hello.software_version());
  host->boot_id = hello.boot_id();
  host->last_seen = c.now();
  c.event("host.connected", id,
          absl::StrCat("host ", id, " connected from ", link->peer(), ", boot ", hello.boot_id()));
  DXPU_RETURN_IF_ERROR(commit(c));

  HostLive& live = hosts_[id];
  if (live.link != nullptr) {
    links_.erase(live.link.get());
    live.link->close(absl::AbortedError(absl::StrCat("host ", id, " opened a newer stream")));
  }
  live.opened(link, hello.boot_id());
  live.heard = live.beat = clock_.monotonic();
  live.last_seen = now();
  links_[link.get()] = {false, id};
  v1::ManagerMessage message;
  message.mutable_welcome()->set_software_version(DXPU_VERSION);
  set_duration(options_.heartbeat, message.mutable_welcome()->mutable_heartbeat_interval());
  link->send(std::move(message));
  spdlog::info("host={} agent=connected peer={} boot={} ports={}", id, link->peer(), hello.boot_id(),
               hello.port_count());
  dirty_host(id);
  return absl::OkStatus();
}

absl::Status Reconciler::box_facts(const std::string& id, BoxLive& box, const v1::BoxFacts& facts) {
  std::set<uint32_t> seen;
  for (const v1::SlotFact& fact : facts.slots()) {
    if (box.places.count(fact.slot()) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("box ", id, ": facts about slot ", fact.slot(), ", which its hello did not describe"));
    }
    if (!seen.insert(fact.slot()).second) {
      return absl::InvalidArgumentError(absl::StrCat("box ", id, ": two facts about slot ", fact.slot()));
    }
  }
  for (auto& [slot, live] : box.places) live.reported = seen.count(slot) != 0;
  for (const v1::SlotFact& fact : facts.slots()) {
    v1::SlotFact& kept = box.places[fact.slot()].fact;
    kept = fact;
    kept.set_detail(cut(fact.detail()));
  }
  box.have_facts = true;
  box.applied = facts.intents_applied();
  dirty_box(id);
  return absl::OkStatus();
}

absl::Status Reconciler::host_facts(const std::string& id, HostLive& host, const v1::HostFacts& facts) {
  std::set<uint32_t> seen;
  if (facts.ports_size() > static_cast<int>(kMaxPorts)) {
    return absl::InvalidArgumentError(absl::StrCat("host ", id, ": facts about more than ", kMaxPorts, " ports"));
  }
  for (const v1::PortFact& fact : facts.ports()) {
    if (!seen.insert(fact.port()).second) {
      return absl::InvalidArgumentError(absl::StrCat("host ", id, ": two facts about port ", fact.port()));
    }
  }
  for (auto it = host.places.begin(); it != host.places.end();) {
    it = seen.count(it->first) != 0 ? std::next(it) : host.places.erase(it);
  }
  for (const v1::PortFact& fact : facts.ports()) {
    PortLive& live = host.places[fact.port()];
    live.reported = true;
    live.fact = fact;
    live.fact.set_detail(cut(fact.detail()));
    live.fact.set_holder(cut(fact.holder()));
    live.fact.set_bus_address(cut(fact.bus_address()));
  }
  host.have_facts = true;
  host.applied = facts.intents_applied();
  dirty_host(id);
  return absl::OkStatus();
}

void Reconciler::agent_events(absl::string_view agent, const v1::AgentMessage& message) {
  for (const v1::AgentEvent& e : message.events()) {
    if (told_.size() >= kMaxTold) {
      spdlog::warn("agent={} event=dropped type={} reason=\"{} wait for the store already\"", std::string(agent),
                   e.type(), kMaxTold);
      continue;
    }
    EventRecord event;
    event.time = e.has_time() ? absl::FromUnixMicros(absl::ToUnixMicros(get_time(e.time()))) : now();
    event.type = cut(e.type());
    event.subject = e.subject().empty() ? std::string(agent) : cut(e.subject());
    event.message = cut(e.message());
    event.attachment_id = cut(e.attachment_id());
    told_.push_back(std::move(event));
  }
}

void Reconciler::disconnected(const AgentLink* link) {
  absl::MutexLock lock(&mutex_);
  drop_link(link, "its stream ended");
  reconcile();
}

void Reconciler::drop_link(const AgentLink* link, absl::string_view why) {
  auto it = links_.find(link);
  if (it == links_.end()) return;
  const Agent agent = it->second;
  links_.erase(it);
  Changes c(inventory_, now());
  if (agent.is_box) {
    boxes_[agent.id].link = nullptr;
    if (BoxRecord* box = c.box(agent.id)) box->last_seen = boxes_[agent.id].last_seen;
    dirty_box(agent.id);
  } else {
    hosts_[agent.id].link = nullptr;
    if (HostRecord* host = c.host(agent.id)) host->last_seen = hosts_[agent.id].last_seen;
    dirty_host(agent.id);
  }
  const char* what = agent.is_box ? "box" : "host";
  spdlog::info("{}={} agent=disconnected reason=\"{}\"", what, agent.id, std::string(why));
  c.event(absl::StrCat(what, ".disconnected"), agent.id,
          absl::StrCat(what, " ", agent.id, " is no longer connected: ", why, "; what it holds stays held"));
  // Of no consequence when the store can not write it: connections are not state.
  commit(c).IgnoreError();
}

void Reconciler::close_silent() {
  std::vector<std::shared_ptr<AgentLink>> silent;
  const absl::Duration limit = clock_.monotonic() - options_.silence;
  for (auto& [id, box] : boxes_) {
    if (box.link != nullptr && box.heard < limit) silent.push_back(box.link);
  }
  for (auto& [id, host] : hosts_) {
    if (host.link != nullptr && host.heard < limit) silent.push_back(host.link);
  }
  for (const auto& link : silent) {
    const std::string why = absl::StrCat("silent for more than ", absl::FormatDuration(options_.silence));
    drop_link(link.get(), why);
    link->close(absl::DeadlineExceededError(absl::StrCat(why, "; connect again")));
  }
}

void Reconciler::beat() {
  auto one = [&](auto& live) {
    if (live.link == nullptr || clock_.monotonic() - live.beat < options_.heartbeat) return;
    live.beat = clock_.monotonic();
    v1::ManagerMessage message;
    message.mutable_heartbeat();
    live.link->send(std::move(message));
  };
  for (auto& [id, box] : boxes_) one(box);
  for (auto& [id, host] : hosts_) one(host);
}

}  // namespace dxpu::poolmgr
