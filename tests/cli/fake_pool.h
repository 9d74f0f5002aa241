// A PoolService in this process, on a loopback port, that answers what a test tells it to.
//
// Set the public members before the command runs. Lists are cut into pages of `page_size`, as the real one does.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dxpu/v1/pool.pb.h"

namespace dxpu::cli {

class FakePool {
 public:
  FakePool();
  ~FakePool();
  FakePool(const FakePool&) = delete;
  FakePool& operator=(const FakePool&) = delete;

  std::string address() const;
  // From here on nobody listens on the address.
  void stop();

  absl::Status fail_with;  // when not OK: what every RPC answers
  bool hang = false;       // every unary RPC waits until its client gives up
  int page_size = 100;

  v1::GetPoolResponse pool;
  v1::ListFunctionsResponse functions;
  v1::ListBoxesResponse boxes;
  v1::ListHostsResponse hosts;
  v1::ListAttachmentsResponse attachments;
  v1::ListEventsResponse events;
  v1::GetTablesResponse tables;
  v1::AttachResponse attach;
  v1::DetachResponse detach;
  v1::Operation operation;               // of GetOperation
  std::deque<absl::Status> wait_errors;  // WaitOperation fails with these first
  std::deque<v1::Operation> waits;       // then answers these; the last one stays
  // What each Watch sends before it ends with its status; CANCELLED when there is none left.
  struct Stream {
    std::vector<v1::WatchResponse> responses;
    absl::Status end;
  };
  std::deque<Stream> streams;

  // What was asked.
  v1::AttachRequest attach_request;
  v1::DetachRequest detach_request;
  v1::SetCordonRequest cordon_request;
  v1::ListFunctionsRequest functions_request;
  v1::ListEventsRequest events_request;
  v1::GetTablesRequest tables_request;
  std::string removed;
  std::vector<v1::WatchRequest> watch_requests;

 private:
  class Service;
  std::unique_ptr<Service> service_;
};

}  // namespace dxpu::cli
