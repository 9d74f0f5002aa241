// dxpu-hostd as a library: the ports of a host, and its stream to the pool manager.
//
// What this is: one thread per port, one stream. What it is not: a data path of its own; TLPs go between the session
// and the attach point. The attach points are given, so a test plugs into its own process and opens the devices itself.
//
// Threads: thread-safe. The attach points must outlive the agent.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proxy/attach/attach_point.h"
#include "proxy/host/port.h"

namespace dxpu::host {

struct HostOptions {
  std::string id;
  std::string pool_address;
  std::string attach_point;  // "kernel" or "direct", for people
  fabric::SessionOptions session;
  PortDeadlines ports;
};

class HostAgent {
 public:
  static std::unique_ptr<HostAgent> start(HostOptions options, const std::vector<attach::AttachPoint*>& points);
  virtual ~HostAgent() = default;
  virtual std::vector<PortSnapshot> ports() const = 0;
  // Functions go away at once and sessions are closed; the boxes keep the slots for the rest of their leases, and the
  // pool manager is told nothing, so that a hostd that comes back gets its attachments again, in a new epoch.
  virtual void stop() = 0;
};

// Sessions over tcp.
std::unique_ptr<Connector> make_tcp_connector(const fabric::SessionOptions& options);

}  // namespace dxpu::host
