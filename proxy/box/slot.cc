#include "proxy/box/slot.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proxy/base/sync_point.h"

namespace dxpu::box {

const char* name_of(SlotState state) {
  switch (state) {
    case SlotState::kScrubbing:
      return "scrubbing";
    case SlotState::kValidating:
      return "validating";
    case SlotState::kIdle:
      return "idle";
    case SlotState::kStarting:
      return "starting";
    case SlotState::kServing:
      return "serving";
    case SlotState::kStopping:
      return "stopping";
    case SlotState::kFailed:
      return "failed";
  }
  return "unknown";
}

bool allowed(SlotState from, SlotState to) {
  switch (from) {
    case SlotState::kScrubbing:
      return to == SlotState::kValidating || to == SlotState::kFailed;
    case SlotState::kValidating:
      return to == SlotState::kIdle || to == SlotState::kFailed;
    case SlotState::kIdle:
      return to == SlotState::kStarting;
    case SlotState::kStarting:
      return to == SlotState::kServing || to == SlotState::kStopping || to == SlotState::kScrubbing;
    case SlotState::kServing:
      return to == SlotState::kStopping || to == SlotState::kScrubbing;
    case SlotState::kStopping:
      return to == SlotState::kScrubbing;
    // kServing: only a worker that is adopted, before anything else has happened.
    case SlotState::kFailed:
      return to == SlotState::kScrubbing || to == SlotState::kServing;
  }
  return false;
}

Slot::Slot(std::string box_id, SlotRecord record, SlotDeadlines deadlines, SlotWorld& world, base::Clock& clock)
    : box_id_(std::move(box_id)),
      record_(std::move(record)),
      deadlines_(deadlines),
      world_(world),
      clock_(clock),
      detail_("boxd is starting"),
      retry_(deadlines.first_retry) {}

void Slot::begin() {
  // The worker of an attachment that was served is gone, and its memory with it.
  if (record_.wanted && record_.wanted->attachment_id == record_.served_attachment) {
    world_.event("worker.died", record_.slot,
                 absl::StrCat("worker of slot ", record_.slot, " was gone when the box daemon started"),
                 record_.served_attachment);
    record_.wanted.reset();
    record_.lease_expired = false;
    save();
  }
  move_to(SlotState::kScrubbing, "first scrub since boxd started");
}

void Slot::adopt(const WorkerStatus& worker) {
  worker_ = worker;
  record_.served_attachment = worker.attachment_id;
  record_.served_generation = std::max(record_.served_generation, worker.generation);
  record_.epoch = std::max(record_.epoch, worker.epoch);
  record_.lease_expired = false;
  save();
  world_.event("worker.adopted", record_.slot,
               absl::StrCat("worker of slot ", record_.slot, " adopted: pid ", worker.pid, ", epoch ", worker.epoch),
               worker.attachment_id);
  move_to(SlotState::kServing, "adopted");
  worker_status(worker);
}

void Slot::move_to(SlotState to, const std::string& detail) {
  if (!allowed(state_, to)) {
    // A bug, and one that must not lend memory out: scrub decides nothing, so stay and say so.
    spdlog::error("slot={} from={} to={} refused=illegal", record_.slot, name_of(state_), name_of(to));
    return;
  }
  spdlog::info("slot={} from={} to={} attachment={} detail=\"{}\"", record_.slot, name_of(state_), name_of(to),
               record_.wanted ? record_.wanted->attachment_id : record_.served_attachment, detail);
  state_ = to;
  detail_ = detail;
  killed_ = false;
  const absl::Duration now = clock_.monotonic();
  deadline_ = absl::InfiniteDuration();
  switch (to) {
    case SlotState::kScrubbing:
      worker_ = {};
      deadline_ = now + deadlines_.scrub;
      world_.changed(record_.slot);
      base::sync_point("box.scrubbing");
      world_.start_scrub(record_.slot);
      return;
    case SlotState::kValidating:
      deadline_ = now + deadlines_.validate;
      world_.changed(record_.slot);
      base::sync_point("box.validating");
      world_.start_validate(record_.slot);
      return;
    case SlotState::kStarting:
      deadline_ = now + deadlines_.start;
      worker_ = {};
      worker_.attachment_id = record_.wanted->attachment_id;
      worker_.generation = record_.wanted->generation;
      world_.changed(record_.slot);
      base::sync_point("box.starting");
      world_.start_worker(record_.slot, *record_.wanted);
      base::sync_point("box.worker_started");
      return;
    case SlotState::kStopping:
      deadline_ = now + deadlines_.stop;
      world_.changed(record_.slot);
      base::sync_point("box.stopping");
      world_.stop_worker(record_.slot);
      return;
    case SlotState::kFailed:
      deadline_ = now + retry_;
      retry_ = std::min(retry_ * 2, deadlines_.longest_retry);
      world_.event("slot.failed", record_.slot, absl::StrCat("slot ", record_.slot, ": ", detail), "");
      break;
    case SlotState::kIdle:
      retry_ = deadlines_.first_retry;
      break;
    case SlotState::kServing:
      break;
  }
  world_.changed(record_.slot);
}

void Slot::save() {
  absl::Status saved = world_.save(record_);
  epoch_recorded_ = saved.ok();
  if (!saved.ok()) spdlog::error("slot={} record=not-saved reason=\"{}\"", record_.slot, saved.ToString());
}

void Slot::want_nothing() {
  if (record_.wanted) {
    record_.wanted.reset();
    save();
    base::sync_point("box.intent_nothing");
  }
  next();
}

void Slot::want(const SlotTicket& ticket) {
  if (record_.wanted && record_.wanted->attachment_id == ticket.attachment_id) {
    SlotTicket& have = *record_.wanted;
    if (ticket.generation < have.generation) return;
    if (ticket.generation == have.generation) {
      // The same intent again. A used ticket stays used whatever comes with it.
      if (!have.used &&
          (have.token != ticket.token || have.expires != ticket.expires || have.host_id != ticket.host_id)) {
        have = ticket;
        have.used = false;
        save();
      }
      next();
      return;
    }
  } else if (ticket.attachment_id == record_.served_attachment && state_ != SlotState::kServing) {
    // Over: what it had stored is wiped. The facts say so; the pool manager takes it apart.
    return;
  }
  record_.wanted = ticket;
  record_.wanted->used = false;
  if (state_ == SlotState::kServing && record_.served_attachment == ticket.attachment_id) {
    record_.served_generation = std::max(record_.served_generation, ticket.generation);
  }
  save();
  base::sync_point("box.intent_serve");
  world_.changed(record_.slot);
  next();
}

void Slot::next() {
  switch (state_) {
    case SlotState::kIdle:
      if (record_.wanted) move_to(SlotState::kStarting, "starting a worker");
      return;
    case SlotState::kStarting:
    case SlotState::kServing: {
      const std::string runs = worker_.attachment_id;
      if (!record_.wanted) {
        move_to(SlotState::kStopping, "not wanted any more");
      } else if (runs != record_.wanted->attachment_id) {
        move_to(SlotState::kStopping, "another attachment is wanted");
      }
      return;
    }
    default:
      return;
  }
}

void Slot::job_ended(const absl::Status& result) {
  if (state_ == SlotState::kScrubbing) {
    if (result.ok()) {
      move_to(SlotState::kValidating, "wiped");
    } else {
      move_to(SlotState::kFailed, absl::StrCat("scrub: ", result.message()));
    }
  } else if (state_ == SlotState::kValidating) {
    if (result.ok()) {
      move_to(SlotState::kIdle, "wiped, read back and tested");
      next();
    } else {
      move_to(SlotState::kFailed, absl::StrCat("validation: ", result.message()));
    }
  }
}

void Slot::worker_status(const WorkerStatus& status) {
  if (state_ != SlotState::kStarting && state_ != SlotState::kServing && state_ != SlotState::kStopping) return;
  const bool news =
      status.session_up != worker_.session_up || status.epoch != worker_.epoch || status.pid != worker_.pid;
  worker_ = status;
  if (status.heard_ago < absl::InfiniteDuration()) {
    lease_renewed_ = std::max(lease_renewed_, clock_.now() - status.heard_ago);
  }
  if (state_ == SlotState::kStarting) {
    record_.served_attachment = status.attachment_id;
    const bool wanted = record_.wanted && record_.wanted->attachment_id == status.attachment_id;
    record_.served_generation = wanted ? record_.wanted->generation : status.generation;
    record_.lease_expired = false;
    lease_renewed_ = absl::InfinitePast();
    save();
    base::sync_point("box.serving");
    move_to(SlotState::kServing, "");
    next();  // the intent may have changed meanwhile
    return;
  }
  if (news) {
    detail_.clear();
    world_.changed(record_.slot);
  }
}

void Slot::worker_ended(WorkerEnd end, const std::string& detail) {
  if (state_ != SlotState::kStarting && state_ != SlotState::kServing && state_ != SlotState::kStopping) return;
  const bool asked = state_ == SlotState::kStopping;
  if (state_ == SlotState::kStarting) {
    // It never served, yet it is over: else a worker that dies at its start would be started for ever.
    record_.served_attachment = worker_.attachment_id;
    record_.served_generation = worker_.generation;
  }
  const std::string over = record_.served_attachment;
  record_.lease_expired = end == WorkerEnd::kLeaseExpired;
  if (record_.wanted && record_.wanted->attachment_id == over) record_.wanted.reset();
  save();
  std::string why = "stopped";
  if (end == WorkerEnd::kLeaseExpired) {
    why = absl::StrCat("the lease of the host ran out: ", detail);
    world_.event("lease.expired", record_.slot, absl::StrCat("slot ", record_.slot, ": ", why), over);
  } else if (end == WorkerEnd::kDied) {
    why = absl::StrCat("worker of slot ", record_.slot, " died: ", detail);
    world_.event("worker.died", record_.slot, why, over);
  } else if (!asked) {
    why = absl::StrCat("worker of slot ", record_.slot, " was told to stop by somebody else");
    world_.event("worker.stopped", record_.slot, why, over);
  }
  move_to(SlotState::kScrubbing, why);
}

fabric::TerminateReason Slot::admit(const fabric::Ticket& shown, uint64_t* epoch, std::string* detail) {
  using fabric::TerminateReason;
  const bool serving =
      state_ == SlotState::kServing && record_.wanted && worker_.attachment_id == record_.wanted->attachment_id;
  TerminateReason reason = check_ticket(record_, box_id_, serving, shown, clock_.now());
  if (reason != TerminateReason::kNone) {
    *detail = absl::StrCat("slot ", record_.slot, " is ", name_of(state_), "; ", fabric::name_of(reason));
    // A ticket that comes a little before its intent, or its worker, is ordinary; the host tries again.
    if (reason != TerminateReason::kBusy) {
      world_.event("ticket.refused", record_.slot,
                   absl::StrCat("slot ", record_.slot, " refused host ", shown.host_id, " generation ",
                                shown.generation, ": ", fabric::name_of(reason)),
                   shown.attachment_id);
    }
    return reason;
  }
  record_.wanted->used = true;
  record_.epoch += 1;
  save();
  if (!epoch_recorded_) {
    // Unrecorded it could be shown again after a restart of boxd.
    *detail =
        absl::StrCat("the box can not record that the ticket of slot ", record_.slot, " is used; look at its disk");
    return TerminateReason::kFunctionFailed;
  }
  base::sync_point("box.ticket_used");
  *epoch = record_.epoch;
  return TerminateReason::kNone;
}

absl::Duration Slot::tick() {
  const absl::Duration now = clock_.monotonic();
  if (now < deadline_) return deadline_ - now;
  switch (state_) {
    case SlotState::kFailed:
      move_to(SlotState::kScrubbing, "trying again");
      break;
    case SlotState::kScrubbing:
    case SlotState::kValidating:
    case SlotState::kStarting:
    case SlotState::kStopping:
      // Its end is reported like any other end.
      spdlog::warn("slot={} state={} deadline=passed action=kill again={}", record_.slot, name_of(state_), killed_);
      killed_ = true;
      deadline_ = now + absl::Seconds(10);
      world_.kill_child(record_.slot);
      break;
    case SlotState::kIdle:
    case SlotState::kServing:
      deadline_ = absl::InfiniteDuration();
      break;
  }
  return std::max(deadline_ - now, absl::ZeroDuration());
}

bool Slot::session_up() const {
  return state_ == SlotState::kServing && worker_.session_up && record_.wanted &&
         worker_.generation == record_.wanted->generation;
}

}  // namespace dxpu::box
