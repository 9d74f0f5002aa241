// The whole pool manager in one object: store, reconciler, gRPC server, timer.
//
// Threads: gRPC's, one dispatcher for watchers, one timer (unless the owner ticks). stop() ends them in the reverse
// order of their start. It may be destroyed at any moment: what matters is in the store.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "poolmgr/service/agent_service.h"
#include "poolmgr/service/options.h"
#include "poolmgr/service/pool_service.h"
#include "poolmgr/service/random.h"
#include "poolmgr/service/reconciler.h"
#include "poolmgr/store/sqlite_store.h"
#include "proxy/base/clock.h"

namespace dxpu::poolmgr {

struct ServerConfig {
  std::string listen;  // "address:port", port 0 for any free one; empty: in this process only
  SqliteOptions database;
  Options options;
  base::Clock* clock = &base::Clock::real();
  Random* random = &Random::real();
  bool timer = true;  // false: the owner calls tick()
};

class PoolServer {
 public:
  // INVALID_ARGUMENT: options that do not go together. UNAVAILABLE: the address can not be listened on. Otherwise the
  // store's.
  static absl::StatusOr<std::unique_ptr<PoolServer>> start(ServerConfig config);
  ~PoolServer();

  int port() const { return port_; }
  std::shared_ptr<grpc::Channel> in_process_channel();
  Store& store() { return *store_; }
  void tick() { reconciler_->tick(); }
  void stop();

 private:
  PoolServer() = default;

  std::unique_ptr<Store> store_;
  std::unique_ptr<Reconciler> reconciler_;
  std::unique_ptr<PoolServiceImpl> pool_service_;
  std::unique_ptr<AgentServiceImpl> agent_service_;
  std::unique_ptr<grpc::Server> server_;
  absl::Notification stopping_;
  std::thread timer_;
  int port_ = 0;
};

}  // namespace dxpu::poolmgr
