// The only writer of the pool's state: brings what the store says and what the agents report together.
//
// Level-triggered. Each call (a fact, a request, the timer) marks what may have changed, then goes over it: for every
// attachment, function and operation it compares records with facts, takes the steps that are due, each in one
// transaction with its events, and then sends the agents the sets of intents that follow from the records. Nothing it
// holds outside of the store matters: destroyed at any point and made again on the same store, it goes on where it was.
//
// What it is not: a place where policy is spread out. Which state may follow which is core/lifecycle's word, which
// function is chosen core/placer's.
//
// Files: reconciler.cc (the pass, commits, intents), agents.cc (streams and facts), attachment_steps.cc,
// function_steps.cc, operation_steps.cc, requests.cc, views.cc.
//
// Threads. Every public method may be called from any thread; one lock. Transactions are committed with it held, no
// network call is: AgentLink only queues.
//
// Errors. Requests return canonical codes with a message that names the thing, what was wrong and what to do. When the
// store can not commit (a full disk), requests fail with its error, the agents keep what they hold, and the steps that
// were due are tried again by the timer.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "dxpu/v1/agent.pb.h"
#include "dxpu/v1/pool.pb.h"
#include "poolmgr/core/inventory.h"
#include "poolmgr/service/agent_link.h"
#include "poolmgr/service/changes.h"
#include "poolmgr/service/live.h"
#include "poolmgr/service/options.h"
#include "poolmgr/service/random.h"
#include "poolmgr/store/store.h"
#include "proxy/base/clock.h"

namespace dxpu::poolmgr {

class Reconciler {
 public:
  static absl::StatusOr<std::unique_ptr<Reconciler>> create(Store& store, base::Clock& clock, Random& random,
                                                            Options options);

  // ---- agents ----
  // A message of an agent. The first on a link must be a hello. An error ends the stream with it.
  absl::Status message(const std::shared_ptr<AgentLink>& link, const v1::AgentMessage& message);
  // The stream is over, whoever ended it. Idempotent.
  void disconnected(const AgentLink* link);

  // ---- operators ----
  absl::StatusOr<v1::AttachResponse> attach(const v1::AttachRequest& request);
  absl::StatusOr<v1::DetachResponse> detach(const v1::DetachRequest& request);
  absl::StatusOr<v1::SetCordonResponse> set_cordon(const v1::SetCordonRequest& request);
  absl::StatusOr<v1::RemoveBoxResponse> remove_box(const v1::RemoveBoxRequest& request);
  absl::StatusOr<v1::RemoveHostResponse> remove_host(const v1::RemoveHostRequest& request);

  absl::StatusOr<v1::GetPoolResponse> pool() const;
  absl::StatusOr<v1::ListFunctionsResponse> functions(const v1::ListFunctionsRequest& request) const;
  absl::StatusOr<v1::ListBoxesResponse> boxes(const v1::ListBoxesRequest& request) const;
  absl::StatusOr<v1::ListHostsResponse> hosts(const v1::ListHostsRequest& request) const;
  absl::StatusOr<v1::ListAttachmentsResponse> attachments(const v1::ListAttachmentsRequest& request) const;
  absl::StatusOr<v1::GetTablesResponse> tables(const v1::GetTablesRequest& request) const;

  // ---- time ----
  // Deadlines, silent agents, retries. To be called several times a second.
  void tick();

 private:
  enum class Ending { kGraceful, kForced, kUndo };

  Reconciler(Store& store, base::Clock& clock, Random& random, Options options)
      : store_(store), clock_(clock), random_(random), options_(options) {}

  // reconciler.cc
  absl::Time now() const;
  void reconcile() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status commit(Changes& changes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void dirty_box(const std::string& box_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void dirty_host(const std::string& host_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void dirty_attachment(const AttachmentRecord& attachment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void dirty_everything() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void send_intents() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void send_box_intents(const std::string& box_id, BoxLive& box) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void send_host_intents(const std::string& host_id, HostLive& host) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string new_id(absl::string_view prefix) const;
  // Deadlines rest until agents have had the time to come back to a restarted pool manager.
  bool deadlines_run() const;

  // agents.cc
  absl::Status box_hello(const std::shared_ptr<AgentLink>& link, const v1::BoxHello& hello)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status host_hello(const std::shared_ptr<AgentLink>& link, const v1::HostHello& hello)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status box_facts(const std::string& id, BoxLive& box, const v1::BoxFacts& facts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status host_facts(const std::string& id, HostLive& host, const v1::HostFacts& facts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void agent_events(absl::string_view agent, const v1::AgentMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void close_silent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void beat() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void drop_link(const AgentLink* link, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // attachment_steps.cc
  absl::Status step_attachment(Changes& c, AttachmentRecord& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status step_attaching(Changes& c, AttachmentRecord& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status step_attached(Changes& c, AttachmentRecord& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status step_ending(Changes& c, AttachmentRecord& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status step_giving_back(Changes& c, AttachmentRecord& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void new_ticket(Changes& c, AttachmentRecord& a, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status begin_end(Changes& c, AttachmentRecord& a, Ending how, bool failed, const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status lose(Changes& c, AttachmentRecord& a, const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status fail_attach(Changes& c, AttachmentRecord& a, absl::StatusCode code, const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void set_deadline(Changes& c, AttachmentRecord& a, absl::Duration step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool late(const AttachmentRecord& a) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const BoxLive* box_live(const std::string& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const HostLive* host_live(const std::string& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const v1::SlotFact* slot_fact(const AttachmentRecord& a) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const v1::PortFact* port_fact(const AttachmentRecord& a) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // function_steps.cc
  absl::Status step_function(Changes& c, FunctionRecord& f) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // operation_steps.cc
  absl::Status step_operation(Changes& c, OperationRecord& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status step_attach_operation(Changes& c, OperationRecord& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status step_detach_operation(Changes& c, OperationRecord& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish(Changes& c, OperationRecord& op, absl::StatusCode code, const std::string& message);
  void fail_steps(OperationRecord& op, absl::Time now, absl::StatusCode code, const std::string& message);
  static void advance_step(OperationRecord& op, absl::string_view name, StepState state, absl::Time now,
                           absl::string_view detail);

  // requests.cc
  absl::StatusOr<std::vector<uint32_t>> free_ports(const HostRecord& host, uint32_t count) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::optional<v1::AttachResponse>> repeated_attach(const v1::AttachRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::optional<OperationRecord>> repeated(absl::string_view request_id, absl::string_view method,
                                                          const std::string& fingerprint)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status check_known(const v1::AttachRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // views.cc
  v1::Function view(const FunctionRecord& f) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Box view(const BoxRecord& b) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Host view(const HostRecord& h) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Attachment view(const AttachmentRecord& a) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Store& store_;
  base::Clock& clock_;
  Random& random_;
  const Options options_;

  mutable absl::Mutex mutex_;
  Inventory inventory_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, BoxLive> boxes_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, HostLive> hosts_ ABSL_GUARDED_BY(mutex_);
  struct Agent {
    bool is_box;
    std::string id;
  };
  std::map<const AgentLink*, Agent> links_ ABSL_GUARDED_BY(mutex_);
  // When a host was first seen without an attachment it should hold, and when a ticket was last renewed. Monotonic.
  std::map<std::string, absl::Duration> absent_since_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, absl::Duration> ticketed_ ABSL_GUARDED_BY(mutex_);

  std::set<std::string> dirty_attachments_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> dirty_functions_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> dirty_operations_ ABSL_GUARDED_BY(mutex_);
  // What agents told for the event log and is not stored yet.
  std::deque<EventRecord> told_ ABSL_GUARDED_BY(mutex_);
  bool store_failing_ ABSL_GUARDED_BY(mutex_) = false;

  absl::Duration started_ = absl::ZeroDuration();  // monotonic
  absl::Duration full_pass_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
  absl::Duration pruned_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
};

}  // namespace dxpu::poolmgr
