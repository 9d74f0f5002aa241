// Where the pool's state is kept: records, their events, and one revision counter over both.
//
// What this is not: a place of decisions. It keeps what the reconciler says, all of a transaction or nothing.
//
// Revisions. Each committed transaction raises the revision; each event has one of its own, in order, without gaps a
// reader could fall into: reading events after revision N and finding the last at M means that everything up to M has
// been seen.
//
// Threads. All methods may be called from any thread; transactions are one at a time. The function given to transact()
// must not call the store. Wake-ups of watch() run on the committing thread after the commit, outside of any lock of
// the store: they must not block and may read.
//
// Errors. RESOURCE_EXHAUSTED when the disk is full, DATA_LOSS when the database is damaged, UNAVAILABLE when it is
// locked. After any error nothing of the transaction remains, and the store goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "poolmgr/core/types.h"

namespace dxpu::poolmgr {

// What a request_id was answered with.
struct RequestRecord {
  std::string request_id;
  std::string method;
  std::string fingerprint;  // of the whole request: the same id for something else is refused
  std::string operation_id;
  absl::Time time;
};

class Transaction {
 public:
  virtual ~Transaction() = default;
  // The version that records changed by this transaction carry.
  virtual int64_t revision() const = 0;
  virtual absl::Status put(const BoxRecord& record) = 0;
  virtual absl::Status put(const HostRecord& record) = 0;
  virtual absl::Status put(const FunctionRecord& record) = 0;
  virtual absl::Status put(const AttachmentRecord& record) = 0;
  virtual absl::Status put(const OperationRecord& record) = 0;
  virtual absl::Status erase_function(absl::string_view id) = 0;
  virtual absl::Status erase_box(absl::string_view id) = 0;
  virtual absl::Status erase_host(absl::string_view id) = 0;
  virtual absl::Status append(const EventRecord& event) = 0;
  virtual absl::Status remember(const RequestRecord& request) = 0;
};

// What a restarted pool manager needs: everything but attachments and operations that are over.
struct Snapshot {
  int64_t revision = 0;
  std::vector<BoxRecord> boxes;
  std::vector<HostRecord> hosts;
  std::vector<FunctionRecord> functions;
  std::vector<AttachmentRecord> attachments;
  std::vector<OperationRecord> operations;
};

struct AttachmentFilter {
  std::string id, host_id, box_id;  // empty: any
  bool include_ended = false;
  std::string after_id;  // paging: ids greater than this
  uint32_t limit = 1000;
};

struct Retention {
  int64_t events = 100'000;                   // newest kept
  int64_t ended = 10'000;                     // attachments and operations that are over, newest kept
  absl::Duration requests = absl::Hours(24);  // how long a request_id is remembered
};

// Ends the wake-ups when destroyed; blocks until one that is running has returned.
class Subscription {
 public:
  virtual ~Subscription() = default;
};

class Store {
 public:
  virtual ~Store() = default;

  // Runs `change` in one durable transaction and returns the revision after it.
  virtual absl::StatusOr<int64_t> transact(absl::FunctionRef<absl::Status(Transaction&)> change) = 0;

  virtual int64_t revision() const = 0;
  virtual absl::StatusOr<Snapshot> load() = 0;
  virtual absl::StatusOr<std::optional<RequestRecord>> request(absl::string_view request_id) = 0;
  virtual absl::StatusOr<std::optional<OperationRecord>> operation(absl::string_view id) = 0;
  virtual absl::StatusOr<std::vector<AttachmentRecord>> attachments(const AttachmentFilter& filter) = 0;

  // Events with a revision above `since`, oldest first, at most `limit`; only those of an attachment unless it is
  // empty. FAILED_PRECONDITION "compacted" when some of them are no longer kept.
  virtual absl::StatusOr<std::vector<EventRecord>> events(int64_t since, absl::string_view attachment_id,
                                                          uint32_t limit) = 0;

  // `wake` is called after each commit with the revision reached.
  virtual std::unique_ptr<Subscription> watch(std::function<void(int64_t revision)> wake) = 0;

  // Forgets what is older than `retention` says.
  virtual absl::Status prune(const Retention& retention, absl::Time now) = 0;
  // For people: the file.
  virtual std::string location() const = 0;
};

}  // namespace dxpu::poolmgr
