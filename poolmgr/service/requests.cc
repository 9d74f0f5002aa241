// What operators ask for: each answer is one transaction, and then the reconciler goes on with it.
#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "poolmgr/core/placer.h"
#include "poolmgr/service/convert.h"
#include "poolmgr/service/reconciler.h"
#include "proto/grpc_status.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr absl::Duration kLongestTimeout = absl::Hours(24);

// The same request gives the same bytes within one version of the program, which is as long as it has to.
template <typename Request>
std::string fingerprint_of(const Request& request) {
  return request.SerializeAsString();
}

absl::Status check_texts(const std::string& request_id, const std::string& owner) {
  if (request_id.size() > kMaxRequestId) {
    return absl::InvalidArgumentError(
        absl::StrCat("request_id has ", request_id.size(), " characters; up to ", kMaxRequestId, " are allowed"));
  }
  if (owner.size() > 128) return absl::InvalidArgumentError("owner has more than 128 characters");
  return absl::OkStatus();
}

absl::StatusOr<absl::Duration> timeout_of(bool given, const google::protobuf::Duration& timeout,
                                          absl::Duration otherwise) {
  const absl::Duration asked = given ? get_duration(timeout) : absl::ZeroDuration();
  if (asked == absl::ZeroDuration()) return otherwise;
  if (asked < absl::ZeroDuration() || asked > kLongestTimeout) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout ", absl::FormatDuration(asked), " must be more than 0 and at most 24h"));
  }
  return asked;
}

std::vector<StepRecord> steps_named(std::initializer_list<const char*> names) {
  std::vector<StepRecord> out;
  for (const char* name : names) {
    StepRecord step;
    step.name = name;
    out.push_back(std::move(step));
  }
  return out;
}

}  // namespace

absl::StatusOr<std::optional<OperationRecord>> Reconciler::repeated(absl::string_view request_id,
                                                                    absl::string_view method,
                                                                    const std::string& fingerprint) {
  if (request_id.empty()) return std::nullopt;
  DXPU_ASSIGN_OR_RETURN(std::optional<RequestRecord> known, store_.request(request_id));
  if (!known) return std::nullopt;
  if (known->method != method || known->fingerprint != fingerprint) {
    return absl::AlreadyExistsError(absl::StrCat("request_id ", request_id, " was used for another request (",
                                                 known->method, ", operation ", known->operation_id,
                                                 "); use a new one"));
  }
  DXPU_ASSIGN_OR_RETURN(std::optional<OperationRecord> op, store_.operation(known->operation_id));
  if (!op) {
    return absl::NotFoundError(absl::StrCat("request_id ", request_id, " was answered with operation ",
                                            known->operation_id, ", which is no longer kept"));
  }
  return op;
}

absl::Status Reconciler::check_known(const v1::AttachRequest& request) const {
  if (request.count() == 0 || request.count() > kMaxCount) {
    return absl::InvalidArgumentError(absl::StrCat("count is ", request.count(), "; it must be 1 to ", kMaxCount));
  }
  if (!request.function_id().empty()) {
    if (request.count() != 1) {
      return absl::InvalidArgumentError(absl::StrCat("count is ", request.count(), " but function ",
                                                     request.function_id(), " is one; ask for count 1"));
    }
    if (inventory_.function(request.function_id()) == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("function ", request.function_id().substr(0, 80),
                       " is not in the pool; functions are named <box>/<slot>, see `dxpu gpu list`"));
    }
  }
  if (!request.model().empty()) {
    std::set<std::string> models;
    for (const auto& [id, f] : inventory_.functions()) models.insert(f.model);
    if (models.count(request.model()) == 0) {
      return absl::NotFoundError(
          absl::StrCat("no function of model ", request.model().substr(0, 80), " is in the pool; ",
                       models.empty() ? "it has none at all: start a box" : "it has " + absl::StrJoin(models, ", ")));
    }
  }
  if (inventory_.host(request.host_id()) == nullptr) {
    std::vector<std::string> hosts;
    for (const auto& [id, host] : inventory_.hosts()) {
      if (hosts.size() < 10) hosts.push_back(id);
    }
    return absl::NotFoundError(
        absl::StrCat("host ", request.host_id().substr(0, 80), " is not in the pool; ",
                     hosts.empty() ? "no host is: start dxpu-hostd on one" : "known: " + absl::StrJoin(hosts, ", ")));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint32_t>> Reconciler::free_ports(const HostRecord& host, uint32_t count) const {
  const HostLive* live = host_live(host.id);
  if (live == nullptr || !live->ready()) {
    return absl::UnavailableError(
        absl::StrCat("host ", host.id, " is not connected (last seen ",
                     host.last_seen == absl::InfinitePast() ? "never" : absl::FormatTime(host.last_seen),
                     "); start dxpu-hostd there, or look at its log"));
  }
  std::vector<uint32_t> free;
  std::vector<std::string> others;
  for (const auto& [port, place] : live->places) {
    if (!place.reported) continue;
    const v1::PortPhase phase = place.fact.phase();
    const AttachmentRecord* holder = inventory_.holder_of_port(host.id, port);
    if (holder == nullptr && (phase == v1::PORT_PHASE_EMPTY || phase == v1::PORT_PHASE_FAILED)) {
      free.push_back(port);
      continue;
    }
    others.push_back(absl::StrCat("port ", port, " ", phase_name(phase), holder == nullptr ? "" : " " + holder->id,
                                  place.fact.holder().empty() ? "" : " held by " + place.fact.holder()));
  }
  if (free.size() < count) {
    if (others.size() > 8) others.resize(8);
    return absl::ResourceExhaustedError(absl::StrCat("host ", host.id, " has ", free.size(), " free ports of ",
                                                     live->places.size(), ", asked for ", count,
                                                     others.empty() ? "" : " (" + absl::StrJoin(others, ", ") + ")",
                                                     "; detach something from it or choose another host"));
  }
  free.resize(count);
  return free;
}

absl::StatusOr<std::optional<v1::AttachResponse>> Reconciler::repeated_attach(const v1::AttachRequest& request) {
  DXPU_ASSIGN_OR_RETURN(std::optional<OperationRecord> op,
                        repeated(request.request_id(), "Attach", fingerprint_of(request)));
  if (!op) return std::nullopt;
  v1::AttachResponse out;
  *out.mutable_operation() = to_proto(*op);
  for (const std::string& id : op->attachment_ids) {
    if (const AttachmentRecord* a = inventory_.attachment(id)) {
      *out.add_attachments() = view(*a);
      continue;
    }
    AttachmentFilter filter;
    filter.id = id;
    filter.include_ended = true;
    DXPU_ASSIGN_OR_RETURN(std::vector<AttachmentRecord> kept, store_.attachments(filter));
    for (const AttachmentRecord& a : kept) *out.add_attachments() = view(a);
  }
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::AttachResponse> Reconciler::attach(const v1::AttachRequest& request) {
  absl::MutexLock lock(&mutex_);
  DXPU_RETURN_IF_ERROR(check_texts(request.request_id(), request.owner()));
  DXPU_ASSIGN_OR_RETURN(std::optional<v1::AttachResponse> first, repeated_attach(request));
  if (first) return *first;
  DXPU_RETURN_IF_ERROR(check_known(request));
  DXPU_ASSIGN_OR_RETURN(absl::Duration timeout, timeout_of(request.has_timeout(), request.timeout(), options_.attach));

  PlacementRequest wanted;
  wanted.count = request.count();
  wanted.model = request.model();
  wanted.min_memory_bytes = request.min_memory_bytes();
  wanted.same_box = request.same_box();
  wanted.function_id = request.function_id();
  Placement placement = Placer::place(
      inventory_,
      [this](absl::string_view id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const BoxLive* box = box_live(std::string(id));
        return box != nullptr && box->ready();
      },
      wanted);
  if (!placement.ok()) {
    v1::RefusalDetails details;
    for (const auto& [reason, count] : placement.counts()) {
      v1::RefusalCount& out = *details.add_counts();
      out.set_reason(reason);
      out.set_count(count);
    }
    absl::Status refused = absl::ResourceExhaustedError(
        absl::StrCat("no place for ", request.count(), request.count() == 1 ? " function" : " functions",
                     request.model().empty() ? "" : " of model " + request.model(),
                     request.same_box() ? " in one box" : "", ": of ", placement.refusals.size(), " candidates ",
                     placement.refusals.empty() ? "none; start a box" : placement.describe()));
    refused.SetPayload(kRefusalUrl, absl::Cord(details.SerializeAsString()));
    return refused;
  }
  DXPU_ASSIGN_OR_RETURN(std::vector<uint32_t> ports, free_ports(*inventory_.host(request.host_id()), request.count()));

  Changes c(inventory_, now());
  OperationRecord op;
  op.id = new_id("op-");
  op.kind = "attach";
  op.owner = request.owner();
  op.request_id = request.request_id();
  op.created = c.now();
  op.deadline = c.now() + timeout;
  op.steps = steps_named({"place", "serve", "link", "plug"});
  std::vector<std::string> ids;
  for (size_t i = 0; i < placement.function_ids.size(); ++i) {
    FunctionRecord& f = *c.function(placement.function_ids[i]);
    AttachmentRecord a;
    a.id = new_id("att-");
    a.owner = request.owner();
    a.host_id = request.host_id();
    a.port = ports[i];
    a.box_id = f.box_id;
    a.slot = f.slot;
    a.paths = c.box(f.box_id)->paths;
    a.created = a.since = c.now();
    a.operation_id = op.id;
    a.generation = ++f.generation;
    a.token = random_.bytes(kTokenBytes);
    a.ticket_expires = c.now() + options_.ticket_life;
    f.attachment_id = a.id;
    f.owner = request.owner();
    DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kReserved, absl::StrCat("for host ", a.host_id, " port ", a.port)));
    DXPU_RETURN_IF_ERROR(
        c.move(a, AttachmentState::kPlaced,
               absl::StrCat("box ", a.box_id, " slot ", a.slot, " for host ", a.host_id, " port ", a.port)));
    a.deadline = std::min(op.deadline, c.now() + options_.serve);
    op.attachment_ids.push_back(a.id);
    ids.push_back(a.id);
    c.add(std::move(a));
  }
  advance_step(op, "place", StepState::kDone, c.now(), absl::StrJoin(placement.function_ids, ", "));
  advance_step(op, "serve", StepState::kRunning, c.now(), "");
  const std::string op_id = op.id;
  c.event("operation.created", op.id,
          absl::StrCat("attach ", absl::StrJoin(placement.function_ids, ", "), " to host ", request.host_id()),
          ids.size() == 1 ? ids.front() : "");
  if (!request.request_id().empty()) {
    c.remember({request.request_id(), "Attach", fingerprint_of(request), op.id, c.now()});
  }
  c.add(std::move(op));
  DXPU_RETURN_IF_ERROR(commit(c));

  v1::AttachResponse out;
  *out.mutable_operation() = to_proto(*inventory_.operation(op_id));
  for (const std::string& id : ids) {
    *out.add_attachments() = view(*inventory_.attachment(id));
    dirty_attachment(*inventory_.attachment(id));
  }
  out.set_revision(store_.revision());
  reconcile();
  return out;
}

absl::StatusOr<v1::DetachResponse> Reconciler::detach(const v1::DetachRequest& request) {
  absl::MutexLock lock(&mutex_);
  DXPU_RETURN_IF_ERROR(check_texts(request.request_id(), ""));
  auto answer = [&](const OperationRecord& op) {
    v1::DetachResponse out;
    *out.mutable_operation() = to_proto(op);
    out.set_revision(store_.revision());
    return out;
  };
  const std::string fingerprint = fingerprint_of(request);
  DXPU_ASSIGN_OR_RETURN(std::optional<OperationRecord> first, repeated(request.request_id(), "Detach", fingerprint));
  if (first) return answer(*first);
  DXPU_ASSIGN_OR_RETURN(absl::Duration timeout, timeout_of(request.has_timeout(), request.timeout(), options_.detach));

  const std::string& id = request.attachment_id();
  const AttachmentRecord* known = inventory_.attachment(id);
  if (known == nullptr) {
    AttachmentFilter filter;
    filter.id = id;
    filter.include_ended = true;
    std::vector<AttachmentRecord> ended;
    if (!id.empty()) {
      DXPU_ASSIGN_OR_RETURN(ended, store_.attachments(filter));
    }
    if (ended.empty()) {
      return absl::NotFoundError(
          absl::StrCat("there is no attachment \"", id.substr(0, 80), "\"; see `dxpu attachment list`"));
    }
    return absl::FailedPreconditionError(
        absl::StrCat("attachment ", id, " is over already (", to_string(ended[0].state), " since ",
                     absl::FormatTime(ended[0].since), "); there is nothing to detach"));
  }
  const v1::PortFact* port = port_fact(*known);
  const bool host_there = port != nullptr;
  const std::string holder = host_there && port->attachment_id() == id ? port->holder() : "";
  if (!request.force() && known->host_generation > 0 && !known->ending) {
    if (!holder.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("attachment ", id, ": port ", known->port, " of host ",
                                                        known->host_id, " is in use by ", holder,
                                                        "; end that use, or detach with force (surprise removal)"));
    }
    if (!host_there && !deadlines_run()) {
      return absl::UnavailableError(
          absl::StrCat("host ", known->host_id,
                       " has not come back since the pool manager started, so its users can not be asked; "
                       "try again in ",
                       absl::FormatDuration(options_.silence), ", or detach with force"));
    }
  }

  Changes c(inventory_, now());
  AttachmentRecord& a = *c.attachment(id);
  // Being detached already: the same operation goes on, with force if it is asked for now.
  OperationRecord* running = c.operation(a.operation_id);
  const bool join = a.ending && running != nullptr && !running->done && running->kind == "detach";
  OperationRecord fresh;
  if (!join) {
    fresh.id = new_id("op-");
    fresh.kind = "detach";
    fresh.owner = a.owner;
    fresh.request_id = request.request_id();
    fresh.created = c.now();
    fresh.deadline = c.now() + timeout;
    fresh.attachment_ids = {id};
    fresh.steps = steps_named({"check-users", "unplug", "unlink", "scrub", "validate"});
    const bool asked = host_there && !request.force();
    advance_step(fresh, "check-users", asked ? StepState::kDone : StepState::kSkipped, c.now(),
                 asked             ? "nobody uses it"
                 : request.force() ? (holder.empty() ? "forced" : "forced; in use by " + holder)
                                   : "host not connected");
    c.event("operation.created", fresh.id, absl::StrCat("detach ", id, request.force() ? ", forced" : ""), id);
  }
  const std::string op_id = join ? running->id : fresh.id;
  if (!a.ending) {
    const std::string reason = absl::StrCat("detach asked for", request.force() ? " with force" : "", " (", op_id, ")");
    if (a.state != AttachmentState::kAttached) {
      // It is still being attached: that operation ends, and with it what it joined.
      DXPU_RETURN_IF_ERROR(fail_attach(c, a, absl::StatusCode::kCancelled,
                                       absl::StrCat("attachment ", id, " was detached while being attached")));
      a.failed = false;
    } else {
      const bool alone = request.force() || !host_there;
      DXPU_RETURN_IF_ERROR(begin_end(c, a, alone ? Ending::kForced : Ending::kGraceful, false, reason));
      a.force = request.force();
    }
  } else if (request.force() && !(a.force && a.box_stop)) {
    FunctionRecord& f = *c.function(a.function());
    a.force = a.box_stop = true;
    if (!a.box_released && f.lifecycle == Lifecycle::kDraining) {
      DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kDetaching, "detach forced"));
    }
    c.event("attachment.forced", id, "users are no longer waited for", id);
  }
  if (!join) {
    a.operation_id = fresh.id;
    c.add(std::move(fresh));
  }
  if (!request.request_id().empty()) c.remember({request.request_id(), "Detach", fingerprint, op_id, c.now()});
  DXPU_RETURN_IF_ERROR(commit(c));
  v1::DetachResponse out = answer(*inventory_.operation(op_id));
  dirty_everything();
  reconcile();
  return out;
}

absl::StatusOr<v1::SetCordonResponse> Reconciler::set_cordon(const v1::SetCordonRequest& request) {
  absl::MutexLock lock(&mutex_);
  if (request.box_id().empty() == request.function_id().empty()) {
    return absl::InvalidArgumentError("name either a box or a function to cordon, not both");
  }
  Changes c(inventory_, now());
  const char* word = request.cordoned() ? "cordoned" : "uncordoned";
  if (!request.box_id().empty()) {
    BoxRecord* box = c.box(request.box_id());
    if (box == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("box ", request.box_id().substr(0, 80), " is not in the pool; see `dxpu box list`"));
    }
    if (box->cordoned != request.cordoned()) {
      box->cordoned = request.cordoned();
      c.event(absl::StrCat("box.", word), box->id, absl::StrCat("box ", box->id, " ", word, " by an operator"));
    }
  } else {
    FunctionRecord* f = c.function(request.function_id());
    if (f == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("function ", request.function_id().substr(0, 80), " is not in the pool; see `dxpu gpu list`"));
    }
    c.set_condition(*f, Condition::kCordoned, request.cordoned(), "by an operator");
  }
  DXPU_RETURN_IF_ERROR(commit(c));
  v1::SetCordonResponse out;
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::RemoveBoxResponse> Reconciler::remove_box(const v1::RemoveBoxRequest& request) {
  absl::MutexLock lock(&mutex_);
  const BoxRecord* box = inventory_.box(request.id());
  if (box == nullptr)
    return absl::NotFoundError(
        absl::StrCat("box ", request.id().substr(0, 80), " is not in the pool; see `dxpu box list`"));
  if (const BoxLive* live = box_live(box->id); live != nullptr && live->link != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("box ", box->id, " is connected; stop dxpu-boxd there first, or it would register again"));
  }
  Changes c(inventory_, now());
  for (const AttachmentRecord* held : inventory_.attachments_of_box(box->id)) {
    // A box that died for good never reports its functions as scrubbed: once the host has let go, it may take them with
    // it.
    if (!(held->ending && held->host_released)) {
      return absl::FailedPreconditionError(absl::StrCat("box ", box->id, " still holds attachment ", held->id, " (",
                                                        to_string(held->state), ", host ", held->host_id, " port ",
                                                        held->port, "); detach it first"));
    }
    AttachmentRecord& a = *c.attachment(held->id);
    a.box_released = true;
    if (a.state == AttachmentState::kUnplugging)
      DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kUnlinking, "box removed"));
    DXPU_RETURN_IF_ERROR(
        c.move(a, a.failed || a.state == AttachmentState::kLost ? AttachmentState::kFailed : AttachmentState::kEnded,
               absl::StrCat("box ", box->id, " was removed from the pool")));
    if (!a.operation_id.empty()) dirty_operations_.insert(a.operation_id);
  }
  const std::string id = box->id;
  c.event("box.removed", id, absl::StrCat("box ", id, " and its functions were removed by an operator"));
  c.erase_box(*box);
  DXPU_RETURN_IF_ERROR(commit(c));
  boxes_.erase(id);
  reconcile();
  v1::RemoveBoxResponse out;
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::RemoveHostResponse> Reconciler::remove_host(const v1::RemoveHostRequest& request) {
  absl::MutexLock lock(&mutex_);
  const HostRecord* host = inventory_.host(request.id());
  if (host == nullptr)
    return absl::NotFoundError(
        absl::StrCat("host ", request.id().substr(0, 80), " is not in the pool; see `dxpu host list`"));
  if (const HostLive* live = host_live(host->id); live != nullptr && live->link != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("host ", host->id, " is connected; stop dxpu-hostd there first, or it would register again"));
  }
  Changes c(inventory_, now());
  for (const AttachmentRecord* held : inventory_.attachments_of_host(host->id)) {
    // A host that died for good never reports its ports as empty: once the box has scrubbed, nothing of value is held.
    if (!held->box_released) {
      return absl::FailedPreconditionError(absl::StrCat("host ", host->id, " still holds attachment ", held->id, " (",
                                                        to_string(held->state), ", box ", held->box_id, " slot ",
                                                        held->slot, "); detach it first"));
    }
    AttachmentRecord& a = *c.attachment(held->id);
    a.host_released = true;
    DXPU_RETURN_IF_ERROR(c.move(a, a.failed ? AttachmentState::kFailed : AttachmentState::kEnded,
                                absl::StrCat("host ", host->id, " was removed from the pool")));
    if (!a.operation_id.empty()) dirty_operations_.insert(a.operation_id);
  }
  const std::string id = host->id;
  c.event("host.removed", id, absl::StrCat("host ", id, " was removed by an operator"));
  c.erase_host(id);
  DXPU_RETURN_IF_ERROR(commit(c));
  hosts_.erase(id);
  reconcile();
  v1::RemoveHostResponse out;
  out.set_revision(store_.revision());
  return out;
}

}  // namespace dxpu::poolmgr
