// Operations: what people and control planes wait for. They follow their attachments, never the other way round; only
// their deadlines act.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "poolmgr/service/reconciler.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {

void Reconciler::advance_step(OperationRecord& op, absl::string_view name, StepState state, absl::Time now,
                              absl::string_view detail) {
  StepRecord* step = op.step(name);
  if (step == nullptr || step->state == state) return;
  const bool over =
      step->state == StepState::kDone || step->state == StepState::kFailed || step->state == StepState::kSkipped;
  if (over) return;
  step->state = state;
  if (!detail.empty()) step->detail = std::string(detail);
  if (step->started == absl::InfinitePast() && state != StepState::kSkipped) step->started = now;
  if (state != StepState::kRunning) step->finished = now;
}

// The first step that is not over has failed, the later ones never begin.
void Reconciler::fail_steps(OperationRecord& op, absl::Time now, absl::StatusCode code, const std::string& message) {
  bool found = false;
  for (StepRecord& step : op.steps) {
    if (step.name == "undo" || (step.state != StepState::kPending && step.state != StepState::kRunning)) continue;
    advance_step(op, step.name, found ? StepState::kSkipped : StepState::kFailed, now,
                 found ? "" : absl::StrCat(absl::StatusCodeToString(code), ": ", message));
    found = true;
  }
}

void Reconciler::finish(Changes& c, OperationRecord& op, absl::StatusCode code, const std::string& message) {
  op.done = true;
  op.finished = c.now();
  op.error_code = static_cast<int>(code);
  op.error_message = message;
  if (code != absl::StatusCode::kOk) fail_steps(op, c.now(), code, message);
  c.event("operation.done", op.id,
          absl::StrCat(op.kind, " ", code == absl::StatusCode::kOk ? "done" : absl::StrCat("failed: ", message)),
          op.attachment_ids.size() == 1 ? op.attachment_ids.front() : "");
}

absl::Status Reconciler::step_operation(Changes& c, OperationRecord& op) {
  if (op.done) return absl::OkStatus();
  return op.kind == "attach" ? step_attach_operation(c, op) : step_detach_operation(c, op);
}

absl::Status Reconciler::step_attach_operation(Changes& c, OperationRecord& op) {
  if (op.error_code != 0) {
    if (op.step("undo") == nullptr) {
      op.steps.push_back({"undo", StepState::kRunning, "", c.now(), absl::InfinitePast()});
    }
    bool all_over = true;
    for (const std::string& id : op.attachment_ids) all_over = all_over && inventory_.attachment(id) == nullptr;
    const bool late = deadlines_run() && c.now() >= op.deadline;
    if (!all_over && !late) return absl::OkStatus();
    advance_step(op, "undo", all_over ? StepState::kDone : StepState::kFailed, c.now(),
                 all_over ? "" : "not over yet; it goes on");
    finish(c, op, static_cast<absl::StatusCode>(op.error_code), op.error_message);
    return absl::OkStatus();
  }
  // As far as the slowest of its attachments.
  int rank = 3;
  std::string slowest;
  for (const std::string& id : op.attachment_ids) {
    const AttachmentRecord* a = inventory_.attachment(id);
    int at = 3;
    if (a == nullptr || a->ending) {
      finish(c, op, absl::StatusCode::kAborted, absl::StrCat("attachment ", id, " was taken apart"));
      return absl::OkStatus();
    }
    if (a->state == AttachmentState::kPlaced) at = 0;
    if (a->state == AttachmentState::kLinking) at = 1;
    if (a->state == AttachmentState::kPlugging) at = 2;
    if (at < rank) {
      rank = at;
      slowest = id;
    }
  }
  const char* const names[] = {"serve", "link", "plug"};
  for (int i = 0; i < 3; ++i) {
    if (i < rank) advance_step(op, names[i], StepState::kDone, c.now(), "");
    if (i == rank) advance_step(op, names[i], StepState::kRunning, c.now(), absl::StrCat("waiting for ", slowest));
  }
  if (rank == 3) finish(c, op, absl::StatusCode::kOk, "");
  return absl::OkStatus();
}

absl::Status Reconciler::step_detach_operation(Changes& c, OperationRecord& op) {
  const std::string& id = op.attachment_ids.front();
  const AttachmentRecord* a = inventory_.attachment(id);
  const absl::Time now = c.now();
  auto pass = [&](absl::string_view name) {
    advance_step(op, name, StepState::kRunning, now, "");
    advance_step(op, name, StepState::kDone, now, "");
  };
  if (a == nullptr) {
    for (const char* name : {"unplug", "unlink", "scrub", "validate"}) pass(name);
    finish(c, op, absl::StatusCode::kOk, "");
    return absl::OkStatus();
  }
  const FunctionRecord* f = inventory_.function(a->function());
  const v1::PortFact* port = port_fact(*a);
  if (a->host_released) {
    pass("unplug");
  } else {
    advance_step(op, "unplug", StepState::kRunning, now, "");
  }
  if (a->box_released) {
    for (const char* name : {"unlink", "scrub", "validate"}) pass(name);
  } else if (a->box_stop && f != nullptr) {
    advance_step(op, "unlink", StepState::kRunning, now, "");
    if (f->lifecycle == Lifecycle::kScrubbing || f->lifecycle == Lifecycle::kValidating) {
      pass("unlink");
      advance_step(op, "scrub", StepState::kRunning, now, "");
    }
    if (f->lifecycle == Lifecycle::kValidating) {
      pass("scrub");
      advance_step(op, "validate", StepState::kRunning, now, "");
    }
  }
  // Nobody has to wait for a host that is not there, nor for a program that was not asked.
  if (a->box_released && (port == nullptr || (a->force && !port->holder().empty()))) {
    advance_step(op, "unplug", StepState::kSkipped, now,
                 port == nullptr
                     ? absl::StrCat("host ", a->host_id, " is not connected; port ", a->port,
                                    " is given back when it reports it empty")
                     : absl::StrCat("port ", a->port, " is given back when ", port->holder(), " closes it"));
    finish(c, op, absl::StatusCode::kOk, "");
    return absl::OkStatus();
  }
  if (deadlines_run() && now >= op.deadline) {
    std::string why;
    if (!a->host_released && port != nullptr) {
      why = absl::StrCat("host ", a->host_id, " has not let go of port ", a->port);
      if (!port->holder().empty()) absl::StrAppend(&why, ", held by ", port->holder());
      absl::StrAppend(&why, a->box_stop ? ". The function is revoked; the port comes back when it is closed"
                                        : ". It goes on as soon as it is closed; detach with force does not wait");
    } else if (!a->box_released) {
      const BoxLive* box = box_live(a->box_id);
      why = box != nullptr && box->ready()
                ? absl::StrCat("box ", a->box_id, " has not finished scrubbing slot ", a->slot, "; it goes on")
                : absl::StrCat("box ", a->box_id, " is not connected; it goes on when it is back");
    } else {
      why = absl::StrCat("host ", a->host_id, " is not connected");
    }
    finish(c, op, absl::StatusCode::kDeadlineExceeded, why);
  }
  return absl::OkStatus();
}

}  // namespace dxpu::poolmgr
