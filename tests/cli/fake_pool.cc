#include "tests/cli/fake_pool.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dxpu/v1/pool.grpc.pb.h"
#include "proto/grpc_status.h"

namespace dxpu::cli {

class FakePool::Service : public v1::PoolService::Service {
 public:
  explicit Service(FakePool& fake) : fake_(fake) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Service() override { stop(); }

  int port() const { return port_; }
  void stop() {
    if (server_) server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
    server_.reset();
  }

  grpc::Status GetPool(grpc::ServerContext* context, const v1::GetPoolRequest*,
                       v1::GetPoolResponse* response) override {
    return answer(context, fake_.pool, response);
  }
  grpc::Status ListFunctions(grpc::ServerContext* context, const v1::ListFunctionsRequest* request,
                             v1::ListFunctionsResponse* response) override {
    fake_.functions_request = *request;
    return page(context, *request, fake_.functions, response, [](auto& list) { return list.mutable_functions(); });
  }
  grpc::Status ListBoxes(grpc::ServerContext* context, const v1::ListBoxesRequest* request,
                         v1::ListBoxesResponse* response) override {
    return page(context, *request, only(fake_.boxes, request->id(), [](auto& list) { return list.mutable_boxes(); }),
                response, [](auto& list) { return list.mutable_boxes(); });
  }
  grpc::Status ListHosts(grpc::ServerContext* context, const v1::ListHostsRequest* request,
                         v1::ListHostsResponse* response) override {
    return page(context, *request, only(fake_.hosts, request->id(), [](auto& list) { return list.mutable_hosts(); }),
                response, [](auto& list) { return list.mutable_hosts(); });
  }
  grpc::Status ListAttachments(grpc::ServerContext* context, const v1::ListAttachmentsRequest* request,
                               v1::ListAttachmentsResponse* response) override {
    return page(context, *request,
                only(fake_.attachments, request->id(), [](auto& list) { return list.mutable_attachments(); }), response,
                [](auto& list) { return list.mutable_attachments(); });
  }
  grpc::Status ListEvents(grpc::ServerContext* context, const v1::ListEventsRequest* request,
                          v1::ListEventsResponse* response) override {
    fake_.events_request = *request;
    return page(context, *request, fake_.events, response, [](auto& list) { return list.mutable_events(); });
  }
  grpc::Status Attach(grpc::ServerContext* context, const v1::AttachRequest* request,
                      v1::AttachResponse* response) override {
    fake_.attach_request = *request;
    return answer(context, fake_.attach, response);
  }
  grpc::Status Detach(grpc::ServerContext* context, const v1::DetachRequest* request,
                      v1::DetachResponse* response) override {
    fake_.detach_request = *request;
    return answer(context, fake_.detach, response);
  }
  grpc::Status GetOperation(grpc::ServerContext* context, const v1::GetOperationRequest* request,
                            v1::Operation* response) override {
    if (request->id() != fake_.operation.id()) return grpc::Status(grpc::StatusCode::NOT_FOUND, "no such operation");
    return answer(context, fake_.operation, response);
  }
  grpc::Status WaitOperation(grpc::ServerContext* context, const v1::WaitOperationRequest* request,
                             v1::Operation* response) override {
    if (!fake_.wait_errors.empty()) {
      const grpc::Status error = to_grpc(fake_.wait_errors.front());
      fake_.wait_errors.pop_front();
      return error;
    }
    if (fake_.waits.empty()) {
      // Still running: answers when the time it may take is over, as the real one does.
      std::this_thread::sleep_for(std::chrono::seconds(request->timeout().seconds()) +
                                  std::chrono::nanoseconds(request->timeout().nanos()));
      return answer(context, fake_.operation, response);
    }
    *response = fake_.waits.front();
    if (fake_.waits.size() > 1) fake_.waits.pop_front();
    return grpc::Status::OK;
  }
  grpc::Status SetCordon(grpc::ServerContext* context, const v1::SetCordonRequest* request,
                         v1::SetCordonResponse* response) override {
    fake_.cordon_request = *request;
    return answer(context, v1::SetCordonResponse(), response);
  }
  grpc::Status RemoveBox(grpc::ServerContext* context, const v1::RemoveBoxRequest* request,
                         v1::RemoveBoxResponse* response) override {
    fake_.removed = request->id();
    return answer(context, v1::RemoveBoxResponse(), response);
  }
  grpc::Status RemoveHost(grpc::ServerContext* context, const v1::RemoveHostRequest* request,
                          v1::RemoveHostResponse* response) override {
    fake_.removed = request->id();
    return answer(context, v1::RemoveHostResponse(), response);
  }
  grpc::Status GetTables(grpc::ServerContext* context, const v1::GetTablesRequest* request,
                         v1::GetTablesResponse* response) override {
    fake_.tables_request = *request;
    return answer(context, fake_.tables, response);
  }
  grpc::Status Watch(grpc::ServerContext*, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchResponse>* writer) override {
    fake_.watch_requests.push_back(*request);
    if (fake_.streams.empty()) return grpc::Status(grpc::StatusCode::CANCELLED, "no stream left in the test");
    const Stream stream = fake_.streams.front();
    fake_.streams.pop_front();
    for (const v1::WatchResponse& response : stream.responses) writer->Write(response);
    return to_grpc(stream.end);
  }

 private:
  template <class Response>
  grpc::Status answer(grpc::ServerContext* context, const Response& canned, Response* response) {
    while (fake_.hang && !context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (!fake_.fail_with.ok()) return to_grpc(fake_.fail_with);
    *response = canned;
    return grpc::Status::OK;
  }

  template <class List, class Items>
  static List only(List list, const std::string& id, Items items) {
    if (id.empty()) return list;
    auto* all = items(list);
    all->erase(std::remove_if(all->begin(), all->end(), [&](const auto& item) { return item.id() != id; }), all->end());
    return list;
  }

  // The page token is the number of the first item.
  template <class Request, class List, class Items>
  grpc::Status page(grpc::ServerContext* context, const Request& request, List list, List* response, Items items) {
    int first = 0;
    if (!request.page_token().empty() && !absl::SimpleAtoi(request.page_token(), &first)) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "bad page token");
    }
    auto* all = items(list);
    const int end = std::min(first + fake_.page_size, all->size());
    if (end < all->size()) list.set_next_page_token(absl::StrCat(end));
    all->DeleteSubrange(end, all->size() - end);
    all->DeleteSubrange(0, first);
    return answer(context, list, response);
  }

  FakePool& fake_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

FakePool::FakePool() : service_(std::make_unique<Service>(*this)) {}
FakePool::~FakePool() = default;
std::string FakePool::address() const { return absl::StrCat("127.0.0.1:", service_->port()); }
void FakePool::stop() { service_->stop(); }

}  // namespace dxpu::cli
