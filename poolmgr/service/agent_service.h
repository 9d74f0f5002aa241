// The agents' gRPC edge: one stream per agent, its messages to the reconciler, the reconciler's to it.
//
// Threads: gRPC's. What the reconciler sends is queued per stream, and a newer set of intents takes the place of one
// that has not left yet, so a slow agent costs a bounded queue.
#pragma once

#include <grpcpp/grpcpp.h>

#include "dxpu/v1/agent.grpc.pb.h"
#include "poolmgr/service/reconciler.h"

namespace dxpu::poolmgr {

class AgentServiceImpl final : public v1::AgentService::CallbackService {
 public:
  explicit AgentServiceImpl(Reconciler& reconciler) : reconciler_(reconciler) {}
  grpc::ServerBidiReactor<v1::AgentMessage, v1::ManagerMessage>* Connect(grpc::CallbackServerContext* context) override;

 private:
  Reconciler& reconciler_;
};

}  // namespace dxpu::poolmgr
