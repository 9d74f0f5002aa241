#include "cli/pool_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dxpu/v1/pool.grpc.pb.h"
#include "proto/grpc_status.h"

namespace dxpu::cli {

using Stub = v1::PoolService::Stub;

struct PoolClient::Impl {
  std::string address;
  absl::Duration deadline;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<Stub> stub;

  absl::Status status_of(const grpc::Status& status) const {
    const bool connected = channel->GetState(false) == GRPC_CHANNEL_READY;
    switch (status.error_code()) {
      case grpc::StatusCode::OK:
        return absl::OkStatus();
      case grpc::StatusCode::UNAVAILABLE:
        return unreachable(status.error_message());
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        if (!connected) return unreachable(absl::StrCat("no answer within ", absl::FormatDuration(deadline)));
        return absl::DeadlineExceededError(absl::StrCat("the pool manager at ", address, " did not answer in time (",
                                                        status.error_message(), "): see its log"));
      default:
        return to_absl(status);
    }
  }

  absl::Status unreachable(absl::string_view why) const {
    // gRPC wraps the one thing that a person needs in what it tried.
    constexpr absl::string_view kWrapping = "Failed to connect to remote host: ";
    if (const size_t at = why.rfind(kWrapping); at != absl::string_view::npos) why.remove_prefix(at + kWrapping.size());
    return absl::UnavailableError(
        absl::StrCat("can not reach the pool manager at ", address, " (", why,
                     "): is dxpu-poolmgr running there? Name another with --pool or DXPU_POOL"));
  }

  template <class Request, class Response>
  absl::StatusOr<Response> call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, absl::Duration extra = absl::ZeroDuration()) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(deadline + extra));
    Response response;
    if (absl::Status status = status_of((stub.get()->*method)(&context, request, &response)); !status.ok()) {
      return status;
    }
    return response;
  }
};

PoolClient::PoolClient(std::string address, absl::Duration deadline) : impl_(std::make_unique<Impl>()) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // the pool manager is never behind the web's proxy
  arguments.SetMaxReceiveMessageSize(64 << 20);     // a page of 1000 resources stays far below
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Finds a dead peer under `events --follow`; servers refuse pings more often than every 5 minutes unless told
  // otherwise.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 310 * 1000);
  impl_->channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  impl_->stub = v1::PoolService::NewStub(impl_->channel);
  impl_->address = std::move(address);
  impl_->deadline = deadline;
}

PoolClient::~PoolClient() = default;

absl::StatusOr<v1::GetPoolResponse> PoolClient::get_pool(const v1::GetPoolRequest& request) {
  return impl_->call(&Stub::GetPool, request);
}
absl::StatusOr<v1::ListFunctionsResponse> PoolClient::list_functions(const v1::ListFunctionsRequest& request) {
  return impl_->call(&Stub::ListFunctions, request);
}
absl::StatusOr<v1::ListBoxesResponse> PoolClient::list_boxes(const v1::ListBoxesRequest& request) {
  return impl_->call(&Stub::ListBoxes, request);
}
absl::StatusOr<v1::ListHostsResponse> PoolClient::list_hosts(const v1::ListHostsRequest& request) {
  return impl_->call(&Stub::ListHosts, request);
}
absl::StatusOr<v1::ListAttachmentsResponse> PoolClient::list_attachments(const v1::ListAttachmentsRequest& request) {
  return impl_->call(&Stub::ListAttachments, request);
}
absl::StatusOr<v1::AttachResponse> PoolClient::attach(const v1::AttachRequest& request) {
  return impl_->call(&Stub::Attach, request);
}
absl::StatusOr<v1::DetachResponse> PoolClient::detach(const v1::DetachRequest& request) {
  return impl_->call(&Stub::Detach, request);
}
absl::StatusOr<v1::Operation> PoolClient::get_operation(const v1::GetOperationRequest& request) {
  return impl_->call(&Stub::GetOperation, request);
}
absl::StatusOr<v1::Operation> PoolClient::wait_operation(const v1::WaitOperationRequest& request) {
  return impl_->call(&Stub::WaitOperation, request,
                     absl::Seconds(request.timeout().seconds()) + absl::Nanoseconds(request.timeout().nanos()));
}
absl::StatusOr<v1::SetCordonResponse> PoolClient::set_cordon(const v1::SetCordonRequest& request) {
  return impl_->call(&Stub::SetCordon, request);
}
absl::StatusOr<v1::RemoveBoxResponse> PoolClient::remove_box(const v1::RemoveBoxRequest& request) {
  return impl_->call(&Stub::RemoveBox, request);
}
absl::StatusOr<v1::RemoveHostResponse> PoolClient::remove_host(const v1::RemoveHostRequest& request) {
  return impl_->call(&Stub::RemoveHost, request);
}
absl::StatusOr<v1::GetTablesResponse> PoolClient::get_tables(const v1::GetTablesRequest& request) {
  return impl_->call(&Stub::GetTables, request);
}
absl::StatusOr<v1::ListEventsResponse> PoolClient::list_events(const v1::ListEventsRequest& request) {
  return impl_->call(&Stub::ListEvents, request);
}

absl::Status PoolClient::watch(const v1::WatchRequest& request,
                               const std::function<bool(const v1::WatchResponse&)>& on_response) {
  grpc::ClientContext context;
  const auto reader = impl_->stub->Watch(&context, request);
  v1::WatchResponse response;
  bool wanted = true;
  while (wanted && reader->Read(&response)) wanted = on_response(response);
  if (!wanted) {
    context.TryCancel();
    static_cast<void>(reader->Finish());  // CANCELLED, by us
    return absl::OkStatus();
  }
  const grpc::Status status = reader->Finish();
  if (status.ok()) return impl_->unreachable("it ended the stream of events");
  return impl_->status_of(status);
}

}  // namespace dxpu::cli
