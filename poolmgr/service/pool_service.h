// The operators' gRPC edge: decodes nothing, decides nothing, turns Status into gRPC's.
//
// Threads. Unary calls run on gRPC's threads. WaitOperation and Watch hold no thread: one dispatcher thread serves all
// of them after each commit. A watcher has at most one message under way, so a slow one costs its own delay only.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <set>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "dxpu/v1/pool.grpc.pb.h"
#include "poolmgr/service/reconciler.h"
#include "poolmgr/store/store.h"

namespace dxpu::poolmgr {

class Waiting;

class PoolServiceImpl final : public v1::PoolService::CallbackService {
 public:
  PoolServiceImpl(Reconciler& reconciler, Store& store);
  ~PoolServiceImpl() override;
  // Ends every WaitOperation and Watch with UNAVAILABLE and stops the dispatcher. Idempotent. The server is shut down
  // after it.
  void stop();

  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;
  Reactor* GetPool(Context*, const v1::GetPoolRequest*, v1::GetPoolResponse*) override;
  Reactor* ListFunctions(Context*, const v1::ListFunctionsRequest*, v1::ListFunctionsResponse*) override;
  Reactor* ListBoxes(Context*, const v1::ListBoxesRequest*, v1::ListBoxesResponse*) override;
  Reactor* ListHosts(Context*, const v1::ListHostsRequest*, v1::ListHostsResponse*) override;
  Reactor* ListAttachments(Context*, const v1::ListAttachmentsRequest*, v1::ListAttachmentsResponse*) override;
  Reactor* Attach(Context*, const v1::AttachRequest*, v1::AttachResponse*) override;
  Reactor* Detach(Context*, const v1::DetachRequest*, v1::DetachResponse*) override;
  Reactor* GetOperation(Context*, const v1::GetOperationRequest*, v1::Operation*) override;
  Reactor* WaitOperation(Context*, const v1::WaitOperationRequest*, v1::Operation*) override;
  Reactor* SetCordon(Context*, const v1::SetCordonRequest*, v1::SetCordonResponse*) override;
  Reactor* RemoveBox(Context*, const v1::RemoveBoxRequest*, v1::RemoveBoxResponse*) override;
  Reactor* RemoveHost(Context*, const v1::RemoveHostRequest*, v1::RemoveHostResponse*) override;
  Reactor* GetTables(Context*, const v1::GetTablesRequest*, v1::GetTablesResponse*) override;
  Reactor* ListEvents(Context*, const v1::ListEventsRequest*, v1::ListEventsResponse*) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(Context*, const v1::WatchRequest*) override;

  absl::StatusOr<v1::Operation> operation(const std::string& id);
  Store& store() { return store_; }
  // False after stop(): then nothing was registered.
  bool add(Waiting* waiting);
  void remove(Waiting* waiting);

 private:
  void dispatch();

  Reconciler& reconciler_;
  Store& store_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<Waiting*> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex wake_mutex_;
  bool woken_ ABSL_GUARDED_BY(wake_mutex_) = false;
  bool over_ ABSL_GUARDED_BY(wake_mutex_) = false;
  std::unique_ptr<Subscription> subscription_;
  std::thread dispatcher_;
};

// A call that waits for commits. look() runs on the dispatcher (or on the call's own threads) and must not block.
class Waiting {
 public:
  virtual ~Waiting() = default;
  virtual void look() = 0;
  virtual void end(absl::Status why) = 0;
};

}  // namespace dxpu::poolmgr
