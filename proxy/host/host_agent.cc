#include "proxy/host/host_agent.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proxy/agent/agent_stream.h"
#include "proxy/agent/version.h"
#include "proxy/base/status.h"

namespace dxpu::host {
namespace {

v1::PortPhase phase_of(PortPhase phase) {
  switch (phase) {
    case PortPhase::kEmpty:
      return v1::PORT_PHASE_EMPTY;
    case PortPhase::kConnecting:
      return v1::PORT_PHASE_CONNECTING;
    case PortPhase::kPlugging:
      return v1::PORT_PHASE_PLUGGING;
    case PortPhase::kAttached:
      return v1::PORT_PHASE_ATTACHED;
    case PortPhase::kGone:
      return v1::PORT_PHASE_GONE;
    case PortPhase::kRemoving:
      return v1::PORT_PHASE_REMOVING;
    case PortPhase::kFailed:
      return v1::PORT_PHASE_FAILED;
  }
  return v1::PORT_PHASE_UNSPECIFIED;
}

class TcpConnector : public Connector {
 public:
  explicit TcpConnector(const fabric::SessionOptions& options) : options_(options) {}

  absl::StatusOr<std::unique_ptr<fabric::RemoteFunction>> connect(
      const std::string& path, const fabric::Ticket& ticket, absl::Duration deadline,
      absl::AnyInvocable<void(absl::Status)> on_loss) override {
    const absl::Duration end = options_.clock->monotonic() + deadline;
    DXPU_ASSIGN_OR_RETURN(auto transport, fabric::tcp_connect(path, deadline));
    const absl::Duration left = std::max(end - options_.clock->monotonic(), absl::Milliseconds(100));
    return fabric::RemoteFunction::connect(std::move(transport), ticket, options_, left, std::move(on_loss));
  }

 private:
  const fabric::SessionOptions options_;
};

class Agent : public HostAgent {
 public:
  Agent(HostOptions options, const std::vector<attach::AttachPoint*>& points)
      : options_(std::move(options)),
        boot_id_(agent::make_boot_id()),
        connector_(make_tcp_connector(options_.session)) {
    for (uint32_t number = 0; number < points.size(); ++number) {
      PortCallbacks callbacks;
      callbacks.changed = [this] { publish(); };
      callbacks.event = [this, number](const std::string& type, const std::string& message,
                                       const std::string& attachment) {
        spdlog::info("event={} port={} attachment={} message=\"{}\"", type, number, attachment, message);
        stream_->event(type, absl::StrCat(options_.id, "/", number), message, attachment);
      };
      ports_.push_back(std::make_unique<Port>(number, *points[number], *connector_, options_.ports,
                                              *options_.session.clock, std::move(callbacks)));
    }
    agent::StreamOptions stream;
    stream.pool_address = options_.pool_address;
    agent::StreamCallbacks callbacks;
    callbacks.hello = [this] { return hello(); };
    callbacks.intents = [this](const v1::ManagerMessage& message) {
      if (message.has_host_intents()) apply(message.host_intents());
    };
    stream_ = agent::AgentStream::start(std::move(stream), std::move(callbacks));
    for (auto& port : ports_) threads_.push_back(std::make_unique<PortThread>(*port));
    publish();
  }
  ~Agent() override { stop(); }

  std::vector<PortSnapshot> ports() const override {
    std::vector<PortSnapshot> out;
    for (const auto& port : ports_) out.push_back(port->snapshot());
    return out;
  }

  void stop() override {
    absl::MutexLock lock(&stop_mutex_);
    stream_->stop(absl::Milliseconds(500));
    for (auto& port : ports_) port->stop();  // all at once, then wait for each
    threads_.clear();
    for (auto& port : ports_) port->unplug("hostd stops");
  }

 private:
  v1::AgentMessage hello() const {
    v1::AgentMessage out;
    v1::HostHello& h = *out.mutable_host_hello();
    h.set_host_id(options_.id);
    h.set_boot_id(boot_id_);
    h.set_software_version(agent::kSoftwareVersion);
    h.set_port_count(static_cast<uint32_t>(ports_.size()));
    h.set_attach_point(options_.attach_point);
    return out;
  }
  void publish();
  void apply(const v1::HostIntents& intents);

  const HostOptions options_;
  const std::string boot_id_;
  const std::unique_ptr<Connector> connector_;
  std::vector<std::unique_ptr<Port>> ports_;
  std::unique_ptr<agent::AgentStream> stream_;
  std::vector<std::unique_ptr<PortThread>> threads_;
  absl::Mutex publish_mutex_;  // what is read last is sent last
  absl::Mutex stop_mutex_;
};

void Agent::publish() {
  absl::MutexLock lock(&publish_mutex_);
  v1::AgentMessage message;
  for (const auto& port : ports_) {
    const PortSnapshot s = port->snapshot();
    v1::PortFact& fact = *message.mutable_host_facts()->add_ports();
    fact.set_port(port->number());
    fact.set_phase(phase_of(s.phase));
    fact.set_attachment_id(s.attachment_id);
    fact.set_generation(s.generation);
    fact.set_epoch(s.epoch);
    fact.set_bus_address(s.bus_address);
    fact.set_holder(s.holder);
    fact.set_detail(s.detail);
    fact.set_wants_ticket(s.wants_ticket);
  }
  stream_->publish(std::move(message));
}

void Agent::apply(const v1::HostIntents& intents) {
  for (const v1::PortIntent& intent : intents.ports()) {
    if (intent.port() >= ports_.size()) {
      spdlog::warn("intent=ignored port={} reason=\"this host has {} ports\"", intent.port(), ports_.size());
      continue;
    }
    PortWant want;
    want.attach = intent.attach();
    want.force = intent.force();
    if (intent.attach()) {
      const v1::Ticket& t = intent.ticket();
      if (t.token().size() != fabric::kTokenBytes || t.host_id() != options_.id || t.box_id().empty() ||
          t.box_id().size() > fabric::kMaxIdBytes || t.attachment_id().empty() ||
          t.attachment_id().size() > fabric::kMaxIdBytes) {
        spdlog::error("intent=ignored port={} reason=\"its ticket is not one for this host\"", intent.port());
        stream_->event("intent.refused", absl::StrCat(options_.id, "/", intent.port()),
                       "the ticket in the intent is not one for this host", t.attachment_id());
        continue;
      }
      want.ticket.host_id = t.host_id();
      want.ticket.box_id = t.box_id();
      want.ticket.slot = t.slot();
      want.ticket.attachment_id = t.attachment_id();
      want.ticket.generation = t.generation();
      std::copy_n(reinterpret_cast<const std::byte*>(t.token().data()), t.token().size(), want.ticket.token.begin());
      want.paths.assign(intent.paths().begin(), intent.paths().end());
    }
    ports_[intent.port()]->want(want);
  }
  // Facts as they are after the intents: older ones must not go out as an answer to them.
  publish();
}

}  // namespace

std::unique_ptr<HostAgent> HostAgent::start(HostOptions options, const std::vector<attach::AttachPoint*>& points) {
  return std::make_unique<Agent>(std::move(options), points);
}

std::unique_ptr<Connector> make_tcp_connector(const fabric::SessionOptions& options) {
  return std::make_unique<TcpConnector>(options);
}

}  // namespace dxpu::host
