#include "poolmgr/service/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);
// Hundreds of slots with full texts fit; more is not an agent of ours.
constexpr int kMaxMessage = 1 << 20;
constexpr auto kShutdown = std::chrono::milliseconds(500);

}  // namespace

absl::StatusOr<std::unique_ptr<PoolServer>> PoolServer::start(ServerConfig config) {
  std::unique_ptr<PoolServer> out(new PoolServer());
  DXPU_RETURN_IF_ERROR(config.options.check());
  DXPU_ASSIGN_OR_RETURN(out->store_, open_sqlite_store(config.database));
  DXPU_ASSIGN_OR_RETURN(out->reconciler_,
                        Reconciler::create(*out->store_, *config.clock, *config.random, config.options));
  out->pool_service_ = std::make_unique<PoolServiceImpl>(*out->reconciler_, *out->store_);
  out->agent_service_ = std::make_unique<AgentServiceImpl>(*out->reconciler_);

  static const bool reflection = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)reflection;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessage);
  // A second pool manager on the same port must fail, not take every other connection.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  if (!config.listen.empty()) builder.AddListeningPort(config.listen, grpc::InsecureServerCredentials(), &out->port_);
  builder.RegisterService(out->pool_service_.get());
  builder.RegisterService(out->agent_service_.get());
  out->server_ = builder.BuildAndStart();
  if (out->server_ == nullptr || (!config.listen.empty() && out->port_ == 0)) {
    return absl::UnavailableError(
        absl::StrCat("can not listen on ", config.listen,
                     "; is the address this machine's, and the port free? (--listen address:port)"));
  }
  if (config.timer) {
    out->timer_ = std::thread([server = out.get()] {
      while (!server->stopping_.WaitForNotificationWithTimeout(kTick)) server->reconciler_->tick();
    });
  }
  return out;
}

PoolServer::~PoolServer() { stop(); }

std::shared_ptr<grpc::Channel> PoolServer::in_process_channel() {
  return server_->InProcessChannel(grpc::ChannelArguments());
}

void PoolServer::stop() {
  if (stopping_.HasBeenNotified()) return;
  stopping_.Notify();
  if (timer_.joinable()) timer_.join();
  if (pool_service_ != nullptr) pool_service_->stop();
  if (server_ != nullptr) {
    server_->Shutdown(std::chrono::system_clock::now() + kShutdown);
    server_->Wait();
    server_.reset();
  }
  pool_service_.reset();
  agent_service_.reset();
  reconciler_.reset();
  store_.reset();
}

}  // namespace dxpu::poolmgr
