// The pool manager as the CLI sees it: one blocking method per RPC, each with a deadline, answers as StatusOr.
//
// gRPC's headers stay in pool_client.cc (they cost about 9 s a translation unit). Not thread-safe.
// Errors: the pool manager's own status as it came; UNAVAILABLE naming the address when there is no pool manager to
// talk to, also when it does not answer within the deadline while no connection could be made.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dxpu/v1/pool.pb.h"

namespace dxpu::cli {

// How long an answer may take, beyond the time an RPC is asked to wait itself.
inline constexpr absl::Duration kRpcDeadline = absl::Seconds(5);

class PoolClient {
 public:
  explicit PoolClient(std::string address, absl::Duration deadline = kRpcDeadline);
  ~PoolClient();

  absl::StatusOr<v1::GetPoolResponse> get_pool(const v1::GetPoolRequest& request);
  absl::StatusOr<v1::ListFunctionsResponse> list_functions(const v1::ListFunctionsRequest& request);
  absl::StatusOr<v1::ListBoxesResponse> list_boxes(const v1::ListBoxesRequest& request);
  absl::StatusOr<v1::ListHostsResponse> list_hosts(const v1::ListHostsRequest& request);
  absl::StatusOr<v1::ListAttachmentsResponse> list_attachments(const v1::ListAttachmentsRequest& request);
  absl::StatusOr<v1::AttachResponse> attach(const v1::AttachRequest& request);
  absl::StatusOr<v1::DetachResponse> detach(const v1::DetachRequest& request);
  absl::StatusOr<v1::Operation> get_operation(const v1::GetOperationRequest& request);
  absl::StatusOr<v1::Operation> wait_operation(const v1::WaitOperationRequest& request);
  absl::StatusOr<v1::SetCordonResponse> set_cordon(const v1::SetCordonRequest& request);
  absl::StatusOr<v1::RemoveBoxResponse> remove_box(const v1::RemoveBoxRequest& request);
  absl::StatusOr<v1::RemoveHostResponse> remove_host(const v1::RemoveHostRequest& request);
  absl::StatusOr<v1::GetTablesResponse> get_tables(const v1::GetTablesRequest& request);
  absl::StatusOr<v1::ListEventsResponse> list_events(const v1::ListEventsRequest& request);

  // Calls on_response for each message until it returns false (then OK) or the stream ends (then why). Has no deadline
  // of its own: it is what a person watches; a dead connection ends it.
  absl::Status watch(const v1::WatchRequest& request, const std::function<bool(const v1::WatchResponse&)>& on_response);

  // Every page of a list: the first answer with the items of the others added. `items` is the repeated field's mutable
  // accessor.
  template <class Response, class Request, class Items>
  absl::StatusOr<Response> all_pages(absl::StatusOr<Response> (PoolClient::*list)(const Request&), Request request,
                                     Items* (Response::*items)()) {
    Response all;
    for (;;) {
      absl::StatusOr<Response> page = (this->*list)(request);
      if (!page.ok()) return page.status();
      const std::string next = page->next_page_token();
      (all.*items)()->MergeFrom(*(*page.*items)());
      all.set_revision(page->revision());
      if (next.empty()) return all;
      // A pool manager that never finishes must not keep us for ever.
      if (next == request.page_token()) return absl::InternalError("the pool manager repeats a page of its list");
      request.set_page_token(next);
    }
  }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dxpu::cli
