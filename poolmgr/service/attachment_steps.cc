// The life of an attachment, step by step: what the facts of its box and its host make of it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "poolmgr/service/convert.h"
#include "poolmgr/service/reconciler.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {
namespace {

constexpr size_t kTokenBytes = 32;

std::string detail_of(absl::string_view fallback, const std::string& detail) {
  return detail.empty() ? std::string(fallback) : absl::StrCat(fallback, ": ", detail);
}

bool holds(v1::PortPhase phase) {
  return phase == v1::PORT_PHASE_CONNECTING || phase == v1::PORT_PHASE_PLUGGING || phase == v1::PORT_PHASE_ATTACHED;
}

}  // namespace

const BoxLive* Reconciler::box_live(const std::string& id) const {
  auto it = boxes_.find(id);
  return it == boxes_.end() ? nullptr : &it->second;
}

const HostLive* Reconciler::host_live(const std::string& id) const {
  auto it = hosts_.find(id);
  return it == hosts_.end() ? nullptr : &it->second;
}

const v1::SlotFact* Reconciler::slot_fact(const AttachmentRecord& a) const {
  const BoxLive* box = box_live(a.box_id);
  return box == nullptr ? nullptr : box->fact(a.slot);
}

const v1::PortFact* Reconciler::port_fact(const AttachmentRecord& a) const {
  const HostLive* host = host_live(a.host_id);
  return host == nullptr ? nullptr : host->fact(a.port);
}

void Reconciler::set_deadline(Changes& c, AttachmentRecord& a, absl::Duration step) {
  a.deadline = c.now() + step;
  const OperationRecord* op = c.operation(a.operation_id);
  if (op != nullptr && !op->done && op->kind == "attach") a.deadline = std::min(a.deadline, op->deadline);
}

bool Reconciler::late(const AttachmentRecord& a) const { return deadlines_run() && now() >= a.deadline; }

absl::Status Reconciler::step_attachment(Changes& c, AttachmentRecord& a) {
  if (a.terminal()) return absl::OkStatus();
  const v1::SlotFact* slot = slot_fact(a);
  if (slot != nullptr && slot->attachment_id() == a.id) a.box_served = true;
  if (a.ending) return step_ending(c, a);

  // The box says that it serves the newest generation: from now on the host may be told.
  const bool serving = slot != nullptr && slot->attachment_id() == a.id && slot->phase() == v1::SLOT_PHASE_SERVING;
  if (serving && slot->generation() == a.generation && a.host_generation < a.generation) {
    a.host_generation = a.generation;
    a.host_token = a.token;
    a.host_ticket_expires = a.ticket_expires;
  }
  return a.state == AttachmentState::kAttached ? step_attached(c, a) : step_attaching(c, a);
}

absl::Status Reconciler::step_attaching(Changes& c, AttachmentRecord& a) {
  FunctionRecord& f = *c.function(a.function());
  const v1::SlotFact* slot = slot_fact(a);
  const v1::PortFact* port = port_fact(a);
  const bool box_ours = slot != nullptr && slot->attachment_id() == a.id;
  const bool serving = box_ours && slot->phase() == v1::SLOT_PHASE_SERVING;

  if (a.state == AttachmentState::kPlaced) {
    if (f.lifecycle == Lifecycle::kReserved && box_live(a.box_id) != nullptr && box_live(a.box_id)->ready()) {
      DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kAttaching, absl::StrCat("asked of its box for host ", a.host_id)));
    }
    if (serving && a.host_generation == a.generation) {
      // A restarted pool manager may hear that the box serves it before it has noted that it asked for it.
      if (f.lifecycle == Lifecycle::kReserved) {
        DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kAttaching, absl::StrCat("asked of its box for host ", a.host_id)));
      }
      DXPU_RETURN_IF_ERROR(
          c.move(a, AttachmentState::kLinking,
                 absl::StrCat("box ", a.box_id, " serves slot ", a.slot, ", generation ", a.generation)));
      set_deadline(c, a, options_.link);
      return absl::OkStatus();
    }
    if (slot != nullptr && slot->phase() == v1::SLOT_PHASE_FAILED) {
      return fail_attach(c, a, absl::StatusCode::kUnavailable,
                         detail_of(absl::StrCat("box ", a.box_id, " can not serve slot ", a.slot), slot->detail()));
    }
    if (box_ours && !serving && slot->generation() == a.generation) {
      return fail_attach(
          c, a, absl::StatusCode::kUnavailable,
          detail_of(absl::StrCat("box ", a.box_id, " stopped serving slot ", a.slot, " before the host linked"),
                    slot->detail()));
    }
    if (late(a)) {
      return fail_attach(
          c, a, absl::StatusCode::kDeadlineExceeded,
          absl::StrCat("box ", a.box_id, " did not serve slot ", a.slot, " in time",
                       slot == nullptr ? " (it is not connected)" : "", "; look at its log, then attach again"));
    }
    return absl::OkStatus();
  }

  // LINKING or PLUGGING.
  if (slot != nullptr && !serving) {
    return fail_attach(c, a, absl::StatusCode::kUnavailable,
                       detail_of(absl::StrCat("box ", a.box_id, " stopped serving slot ", a.slot), slot->detail()));
  }
  const bool host_ours = port != nullptr && port->attachment_id() == a.id && port->generation() == a.host_generation;
  if (host_ours) {
    const v1::PortPhase phase = port->phase();
    if (port->wants_ticket()) {
      new_ticket(c, a, "the host asked for one");
    } else if (phase == v1::PORT_PHASE_FAILED || phase == v1::PORT_PHASE_GONE || phase == v1::PORT_PHASE_REMOVING ||
               phase == v1::PORT_PHASE_EMPTY) {
      return fail_attach(
          c, a, absl::StatusCode::kUnavailable,
          detail_of(absl::StrCat("host ", a.host_id, " could not attach it to port ", a.port), port->detail()));
    }
    if (a.state == AttachmentState::kLinking &&
        (phase == v1::PORT_PHASE_PLUGGING || phase == v1::PORT_PHASE_ATTACHED)) {
      DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kPlugging,
                                  absl::StrCat("session up, host ", a.host_id, " plugs it into port ", a.port)));
      set_deadline(c, a, options_.plug);
    }
    if (a.state == AttachmentState::kPlugging && phase == v1::PORT_PHASE_ATTACHED) {
      a.bus_address = port->bus_address();
      // A direct attach point has no bus.
      const std::string where = a.bus_address.empty() ? std::string() : absl::StrCat(" at ", a.bus_address);
      DXPU_RETURN_IF_ERROR(
          c.move(f, Lifecycle::kAttached, absl::StrCat("host ", a.host_id, " port ", a.port, " shows it", where)));
      return c.move(a, AttachmentState::kAttached, absl::StrCat("host ", a.host_id, " shows it", where));
    }
  }
  if (late(a)) {
    const bool linking = a.state == AttachmentState::kLinking;
    return fail_attach(
        c, a, absl::StatusCode::kDeadlineExceeded,
        absl::StrCat("host ", a.host_id,
                     linking ? " did not connect to box " + a.box_id : std::string(" did not show the function"),
                     " for port ", a.port, " in time", port == nullptr ? " (it is not connected)" : "",
                     linking ? "; can it reach " + (a.paths.empty() ? a.box_id : a.paths.front()) + "?"
                             : std::string("; look at its kernel log")));
  }
  return absl::OkStatus();
}

absl::Status Reconciler::step_attached(Changes& c, AttachmentRecord& a) {
  const v1::SlotFact* slot = slot_fact(a);
  const v1::PortFact* port = port_fact(a);
  if (slot != nullptr && (slot->attachment_id() != a.id || slot->phase() != v1::SLOT_PHASE_SERVING)) {
    std::string why = absl::StrCat("box ", a.box_id, " no longer serves slot ", a.slot);
    if (slot->lease_expired())
      why = absl::StrCat("the lease of host ", a.host_id, " on box ", a.box_id, " slot ", a.slot, " ran out");
    return lose(c, a, detail_of(why, slot->detail()));
  }
  if (port == nullptr) {
    absent_since_.erase(a.id);
    return absl::OkStatus();  // silence detaches nothing: the lease is between box and host
  }
  const bool host_ours = port->attachment_id() == a.id;
  // Of the newest generation it was offered only: an older one is still on its way to being replaced.
  if (host_ours && port->wants_ticket() && port->generation() == a.host_generation) {
    absent_since_.erase(a.id);
    new_ticket(c, a, "the host opens a new session");
    return absl::OkStatus();
  }
  if (host_ours && port->generation() == a.host_generation && !holds(port->phase())) {
    return lose(
        c, a,
        detail_of(absl::StrCat("host ", a.host_id, " lost it from port ", a.port, " (", phase_name(port->phase()), ")"),
                  port->detail()));
  }
  if (host_ours && holds(port->phase())) {
    absent_since_.erase(a.id);
    if (port->phase() == v1::PORT_PHASE_ATTACHED && !port->bus_address().empty()) a.bus_address = port->bus_address();
    return absl::OkStatus();
  }
  // It says nothing about it, neither that it holds it nor that it lost it: it may be about to.
  auto [since, fresh] = absent_since_.emplace(a.id, clock_.monotonic());
  if (clock_.monotonic() - since->second < options_.link) return absl::OkStatus();
  return lose(c, a,
              absl::StrCat("host ", a.host_id, " does not hold it on port ", a.port, " and did not take it up again"));
}

void Reconciler::new_ticket(Changes& c, AttachmentRecord& a, absl::string_view why) {
  if (a.generation != a.host_generation) return;  // one is on its way through the box
  auto it = ticketed_.find(a.id);
  if (it != ticketed_.end() && clock_.monotonic() - it->second < options_.ticket_pause)
    return;  // the timer comes back to it
  ticketed_[a.id] = clock_.monotonic();
  FunctionRecord& f = *c.function(a.function());
  f.generation = std::max(f.generation, a.generation) + 1;
  a.generation = f.generation;
  a.token = random_.bytes(kTokenBytes);
  a.ticket_expires = c.now() + options_.ticket_life;
  c.event("attachment.ticket", a.id, absl::StrCat("new ticket, generation ", a.generation, ": ", why), a.id);
}

// How far the taking apart goes at once. Graceful: the host first, with its users' consent. Forced: both sides at once.
// Undo: the host first, without asking, and the box when the host has let go or does not answer.
absl::Status Reconciler::begin_end(Changes& c, AttachmentRecord& a, Ending how, bool failed,
                                   const std::string& reason) {
  FunctionRecord& f = *c.function(a.function());
  a.ending = true;
  a.failed = failed;
  a.force = how != Ending::kGraceful;
  if (a.host_generation == 0) a.host_released = true;  // it was never told
  if (how == Ending::kForced || a.host_released) a.box_stop = true;
  const bool attached = a.state == AttachmentState::kAttached;
  if (attached) {
    if (how == Ending::kGraceful) {
      DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kDraining, reason));
      DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kQuiescing, reason));
    } else {
      DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kUnplugging, reason));
    }
  } else {
    DXPU_RETURN_IF_ERROR(
        c.move(a, a.host_released ? AttachmentState::kUnlinking : AttachmentState::kUnplugging, reason));
  }
  if (f.lifecycle != Lifecycle::kDraining) DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kDetaching, reason));
  a.deadline = c.now() + options_.unplug;
  absent_since_.erase(a.id);
  ticketed_.erase(a.id);
  return absl::OkStatus();
}

absl::Status Reconciler::lose(Changes& c, AttachmentRecord& a, const std::string& reason) {
  FunctionRecord& f = *c.function(a.function());
  DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kLost, reason));
  DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kDetaching, reason));
  a.ending = a.failed = a.force = a.box_stop = true;
  absent_since_.erase(a.id);
  ticketed_.erase(a.id);
  return absl::OkStatus();
}

// All or nothing: what the operation has already joined is taken apart as well.
absl::Status Reconciler::fail_attach(Changes& c, AttachmentRecord& a, absl::StatusCode code,
                                     const std::string& reason) {
  OperationRecord* op = c.operation(a.operation_id);
  if (op == nullptr || op->done) return begin_end(c, a, Ending::kUndo, true, reason);
  if (op->error_code == 0) {
    op->error_code = static_cast<int>(code);
    op->error_message = reason;
    fail_steps(*op, c.now(), code, reason);
    op->deadline = c.now() + options_.unplug * 2;
  }
  for (const std::string& id : op->attachment_ids) {
    AttachmentRecord* other = c.attachment(id);
    if (other == nullptr || other->ending) continue;
    DXPU_RETURN_IF_ERROR(
        begin_end(c, *other, Ending::kUndo, true,
                  id == a.id ? reason : absl::StrCat("attached together with ", a.id, ", which failed: ", reason)));
  }
  return absl::OkStatus();
}

absl::Status Reconciler::step_ending(Changes& c, AttachmentRecord& a) {
  const HostLive* host = host_live(a.host_id);
  const v1::PortFact* port = port_fact(a);
  // Only what the host says after it has acted upon "hold nothing" counts: it could take the function up again before.
  const v1::PortIntent* acted = host == nullptr ? nullptr : host->acted(a.port);
  const bool told = acted != nullptr && !acted->attach() && port != nullptr;
  const v1::PortPhase phase = port == nullptr ? v1::PORT_PHASE_UNSPECIFIED : port->phase();
  const bool gone = a.host_released || (told && (phase == v1::PORT_PHASE_GONE || phase == v1::PORT_PHASE_REMOVING ||
                                                 phase == v1::PORT_PHASE_EMPTY || phase == v1::PORT_PHASE_FAILED));
  const bool let_go = told && (phase == v1::PORT_PHASE_EMPTY || phase == v1::PORT_PHASE_FAILED);

  FunctionRecord* f = a.box_released ? nullptr : c.function(a.function());
  const std::string reason = a.failed ? a.reason : absl::StrCat("host ", a.host_id, " let it go from port ", a.port);
  if (!a.box_stop) {
    const bool host_silent = port == nullptr;
    if (gone || (late(a) && (a.force || host_silent))) a.box_stop = true;
    if (a.box_stop && f->lifecycle == Lifecycle::kDraining) {
      DXPU_RETURN_IF_ERROR(
          c.move(*f, Lifecycle::kDetaching,
                 gone ? reason : absl::StrCat("host ", a.host_id, " does not answer; the box revokes without it")));
    }
  }
  if (a.state == AttachmentState::kQuiescing && (gone || a.box_stop)) {
    DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kUnplugging,
                                gone ? absl::StrCat("gone from host ", a.host_id, " port ", a.port)
                                     : absl::StrCat("host ", a.host_id, " does not answer")));
  }
  if (let_go && !a.host_released) {
    a.host_released = true;
    c.event("port.released", absl::StrCat(a.host_id, ":", a.port),
            absl::StrCat("port ", a.port, " of host ", a.host_id, " is empty"), a.id);
  }
  if (a.host_released && a.state == AttachmentState::kUnplugging && !a.box_released) {
    DXPU_RETURN_IF_ERROR(c.move(a, AttachmentState::kUnlinking, reason));
  }
  if (!a.box_released) DXPU_RETURN_IF_ERROR(step_giving_back(c, a));
  if (a.state == AttachmentState::kUnplugging && a.box_released && !a.host_released) {
    // The port is all that is left. Say who holds it.
    std::string why = absl::StrCat("the function is free again; port ", a.port, " of host ", a.host_id, " waits");
    if (port == nullptr) {
      absl::StrAppend(&why, " for the host to come back");
    } else if (!port->holder().empty()) {
      absl::StrAppend(&why, " for ", port->holder(), " to close it");
    }
    if (!a.failed) a.reason = why;
  }
  if (a.box_released && a.host_released) {
    return c.move(a, a.failed ? AttachmentState::kFailed : AttachmentState::kEnded,
                  a.failed ? a.reason : std::string("nothing is held any more"));
  }
  return absl::OkStatus();
}

// The box's side: DETACHING → SCRUBBING → VALIDATING → FREE, each in the history even when the box is quicker than its
// reports.
absl::Status Reconciler::step_giving_back(Changes& c, AttachmentRecord& a) {
  const BoxLive* box = box_live(a.box_id);
  const v1::SlotFact* slot = slot_fact(a);
  if (slot == nullptr || !a.box_stop) return absl::OkStatus();
  FunctionRecord& f = *c.function(a.function());
  const v1::SlotIntent* acted = box->acted(a.slot);
  const bool told = acted != nullptr && !acted->serve();
  const v1::SlotPhase phase = slot->phase();
  if (phase == v1::SLOT_PHASE_SERVING || phase == v1::SLOT_PHASE_UNSPECIFIED) return absl::OkStatus();
  if (phase == v1::SLOT_PHASE_FAILED) {
    c.set_condition(f, Condition::kUnhealthy, true,
                    detail_of("its box could not scrub or validate it", slot->detail()));
    return absl::OkStatus();
  }
  if (phase == v1::SLOT_PHASE_IDLE && !told) return absl::OkStatus();
  if (f.lifecycle == Lifecycle::kDetaching && a.box_served) {
    DXPU_RETURN_IF_ERROR(
        c.move(f, Lifecycle::kScrubbing, absl::StrCat("box ", a.box_id, " wipes what ", a.id, " left")));
  }
  if (phase == v1::SLOT_PHASE_SCRUBBING) return absl::OkStatus();
  if (f.lifecycle == Lifecycle::kScrubbing || f.lifecycle == Lifecycle::kDetaching) {
    DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kValidating,
                                a.box_served ? absl::StrCat("wiped; box ", a.box_id, " reads it back and tests it")
                                             : absl::StrCat("box ", a.box_id, " never served it to ", a.host_id)));
  }
  if (phase == v1::SLOT_PHASE_VALIDATING) return absl::OkStatus();
  // The last event of the attachment's history too: it is the proof that nothing of it survives.
  DXPU_RETURN_IF_ERROR(c.move(f, Lifecycle::kFree,
                              detail_of(absl::StrCat("box ", a.box_id, " says it is clean and idle"), slot->detail())));
  f.attachment_id.clear();
  c.set_condition(f, Condition::kUnhealthy, false, "validated");
  f.generation = std::max(f.generation, a.generation);
  a.box_released = true;
  return absl::OkStatus();
}

}  // namespace dxpu::poolmgr
