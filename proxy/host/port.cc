#include "proxy/host/port.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proxy/base/sync_point.h"

namespace dxpu::host {

const char* name_of(PortPhase phase) {
  switch (phase) {
    case PortPhase::kEmpty:
      return "empty";
    case PortPhase::kConnecting:
      return "connecting";
    case PortPhase::kPlugging:
      return "plugging";
    case PortPhase::kAttached:
      return "attached";
    case PortPhase::kGone:
      return "gone";
    case PortPhase::kRemoving:
      return "removing";
    case PortPhase::kFailed:
      return "failed";
  }
  return "unknown";
}

bool allowed(PortPhase from, PortPhase to) {
  switch (from) {
    // kGone, kRemoving: what an earlier hostd left on the port is still being taken away.
    case PortPhase::kEmpty:
      return to == PortPhase::kConnecting || to == PortPhase::kGone || to == PortPhase::kRemoving;
    case PortPhase::kConnecting:
      return to == PortPhase::kPlugging || to == PortPhase::kEmpty || to == PortPhase::kFailed;
    case PortPhase::kPlugging:
      return to == PortPhase::kAttached || to == PortPhase::kGone;
    case PortPhase::kAttached:
      return to == PortPhase::kGone;
    case PortPhase::kGone:
      return to == PortPhase::kRemoving || to == PortPhase::kEmpty || to == PortPhase::kFailed;
    case PortPhase::kRemoving:
      return to == PortPhase::kEmpty || to == PortPhase::kFailed;
    case PortPhase::kFailed:
      return to == PortPhase::kConnecting || to == PortPhase::kEmpty;
  }
  return false;
}

Port::Port(uint32_t number, attach::AttachPoint& attach, Connector& connector, const PortDeadlines& deadlines,
           base::Clock& clock, PortCallbacks callbacks)
    : number_(number),
      attach_(attach),
      connector_(connector),
      deadlines_(deadlines),
      clock_(clock),
      callbacks_(std::move(callbacks)) {
  attach_.set_status_callback([this] { wake(); });
}

Port::~Port() {
  attach_.set_status_callback([] {});
}

void Port::want(const PortWant& want) {
  absl::MutexLock lock(&mutex_);
  const bool same = want_.attach && want.attach && want.ticket.attachment_id == want_.ticket.attachment_id;
  if (same && want.ticket.generation < want_.ticket.generation) return;  // late
  want_ = want;
  news_ = true;
}

PortSnapshot Port::snapshot() const {
  absl::MutexLock lock(&mutex_);
  return shown_;
}

void Port::wake() {
  absl::MutexLock lock(&mutex_);
  news_ = true;
}

void Port::stop() {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
}

bool Port::stopping() const {
  absl::MutexLock lock(&mutex_);
  return stopping_;
}

void Port::wait(absl::Duration deadline) {
  absl::MutexLock lock(&mutex_);
  auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return news_ || stopping_; };
  mutex_.AwaitWithTimeout(absl::Condition(&ready), deadline);
  news_ = false;
}

void Port::move_to(PortPhase to, const std::string& detail) {
  {
    absl::MutexLock lock(&mutex_);
    if (!allowed(shown_.phase, to)) {
      spdlog::error("port={} from={} to={} refused=illegal", number_, name_of(shown_.phase), name_of(to));
      return;
    }
    spdlog::info("port={} from={} to={} attachment={} generation={} detail=\"{}\"", number_, name_of(shown_.phase),
                 name_of(to), shown_.attachment_id, shown_.generation, detail);
    shown_.phase = to;
    shown_.detail = detail;
    if (to == PortPhase::kEmpty || to == PortPhase::kFailed || to == PortPhase::kConnecting) {
      shown_.bus_address.clear();
      shown_.holder.clear();
      shown_.epoch = 0;
    }
    // With the phase, in one lock: "empty" and "empty, but wants it back" are different news.
    shown_.wants_ticket = wants_ticket();
  }
  due_ = absl::InfiniteDuration();
  release_asked_ = false;
  callbacks_.changed();
}

bool Port::wants_ticket() const {
  const bool without =
      shown_.phase == PortPhase::kEmpty || shown_.phase == PortPhase::kGone || shown_.phase == PortPhase::kRemoving;
  return without && (lost_epoch_ || ticket_stale_) && want_.attach &&
         want_.ticket.attachment_id == shown_.attachment_id && want_.ticket.generation == shown_.generation;
}

void Port::set_detail(const std::string& detail) {
  {
    absl::MutexLock lock(&mutex_);
    if (shown_.detail == detail) return;
    shown_.detail = detail;
  }
  callbacks_.changed();
}

PortWant Port::wanted() const {
  absl::MutexLock lock(&mutex_);
  return want_;
}

bool Port::current(const PortWant& want) const {
  absl::MutexLock lock(&mutex_);
  return want.attach && want.ticket.attachment_id == shown_.attachment_id &&
         want.ticket.generation == shown_.generation;
}

absl::Duration Port::step() {
  absl::Duration due = absl::InfiniteDuration();
  // Each round is one change; a port that had more than this to do at once would be going in circles.
  for (int round = 0; round < 16 && advance(&due); ++round) {
  }
  return due;
}

bool Port::advance(absl::Duration* due) {
  PortWant want;
  bool lost = false;
  std::string loss;
  PortPhase phase;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return false;
    want = want_;
    lost = lost_;
    loss = loss_.ToString();
    phase = shown_.phase;
  }
  look_around();
  const attach::PortStatus status = attach_.status();
  const absl::Duration now = clock_.monotonic();
  *due = due_ == absl::InfiniteDuration() ? due_ : std::max(due_ - now, absl::ZeroDuration());

  switch (phase) {
    case PortPhase::kEmpty:
    case PortPhase::kFailed: {
      if (status.state != attach::PortState::kEmpty) {
        if (phase == PortPhase::kFailed) return false;
        after_ = PortPhase::kEmpty;
        after_detail_.clear();
        move_to(status.state == attach::PortState::kRemoving ? PortPhase::kRemoving : PortPhase::kGone,
                "what an earlier hostd left here is being removed");
        return true;
      }
      if (!want.attach) {
        if (phase == PortPhase::kFailed) {
          move_to(PortPhase::kEmpty, "");
          return true;
        }
        return false;
      }
      if (!current(want)) {
        connect();
        return true;
      }
      return false;
    }
    case PortPhase::kConnecting:
      return false;  // connect() does not return in it
    case PortPhase::kPlugging:
      if (lost) {
        take_away(absl::StrCat("the session was lost before the host showed the function: ", loss), PortPhase::kFailed);
        return true;
      }
      if (!current(want)) {
        take_away("not wanted any more", PortPhase::kEmpty);
        return true;
      }
      if (status.state == attach::PortState::kAttached) {
        base::sync_point("host.attached");
        move_to(PortPhase::kAttached, "");
        return true;
      }
      if (status.state != attach::PortState::kPlugging) {
        take_away(absl::StrCat("the host did not take the function: ",
                               status.detail.empty() ? "it was removed while being plugged in" : status.detail),
                  PortPhase::kFailed);
        return true;
      }
      if (now >= due_) {
        take_away(absl::StrCat("the host did not show the function within ", absl::FormatDuration(deadlines_.plug),
                               status.detail.empty() ? "" : ": ", status.detail),
                  PortPhase::kFailed);
        return true;
      }
      return false;
    case PortPhase::kAttached: {
      if (lost) {
        const PortSnapshot was = snapshot();
        callbacks_.event("link.lost",
                         absl::StrCat("port ", number_, " lost box ", was.box_id, " slot ", was.slot, ": ", loss,
                                      status.holder.empty() ? "" : absl::StrCat("; held by ", status.holder)),
                         was.attachment_id);
        {
          absl::MutexLock lock(&mutex_);
          lost_epoch_ = true;
        }
        take_away(absl::StrCat("link lost: ", loss), PortPhase::kEmpty);
        return true;
      }
      if (status.state != attach::PortState::kAttached) {
        callbacks_.event("port.removed",
                         absl::StrCat("port ", number_, ": the function was removed on the host itself"),
                         snapshot().attachment_id);
        take_away("removed on the host itself", PortPhase::kEmpty);
        return true;
      }
      if (current(want)) {
        if (release_asked_) {  // wanted again
          release_asked_ = false;
          due_ = absl::InfiniteDuration();
          set_detail("");
        }
        return false;
      }
      const bool polite = !want.attach && !want.force && !status.holder.empty();
      if (polite && !release_asked_) {
        release_asked_ = true;
        due_ = now + deadlines_.release;
        if (absl::Status asked = attach_.request_release(); !asked.ok()) {
          spdlog::warn("port={} request_release=failed reason=\"{}\"", number_, asked.ToString());
        }
        set_detail(absl::StrCat("asked to close: ", status.holder));
        return true;
      }
      if (polite && now < due_) return false;
      take_away(want.attach ? "another attachment or epoch is wanted" : "detached", PortPhase::kEmpty);
      return true;
    }
    case PortPhase::kGone:
    case PortPhase::kRemoving:
      if (status.state == attach::PortState::kEmpty) {
        remote_.reset();
        move_to(after_, after_detail_);
        base::sync_point("host.empty");
        return true;
      }
      if (phase == PortPhase::kGone && status.state == attach::PortState::kRemoving) {
        move_to(PortPhase::kRemoving, snapshot().detail);
        return true;
      }
      return false;
  }
  return false;
}

void Port::look_around() {
  const attach::PortStatus status = attach_.status();
  bool changed = false;
  {
    absl::MutexLock lock(&mutex_);
    const bool wants = wants_ticket();
    changed = shown_.wants_ticket != wants;
    shown_.wants_ticket = wants;
    const bool holds = shown_.phase != PortPhase::kEmpty && shown_.phase != PortPhase::kFailed &&
                       shown_.phase != PortPhase::kConnecting;
    if (holds) {
      changed |= shown_.holder != status.holder;
      shown_.holder = status.holder;
      if (!status.bus_address.empty()) {
        changed |= shown_.bus_address != status.bus_address;
        shown_.bus_address = status.bus_address;
      }
    }
  }
  if (changed) callbacks_.changed();
}

void Port::connect() {
  PortWant want;
  uint64_t session = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!want_.attach) return;
    want = want_;
    session = ++session_;
    lost_ = false;
    lost_epoch_ = ticket_stale_ = false;
    // In one lock with the phase: "empty" of the new attachment would be taken for its end.
    shown_ = PortSnapshot{};
    shown_.phase = PortPhase::kConnecting;
    shown_.attachment_id = want.ticket.attachment_id;
    shown_.generation = want.ticket.generation;
    shown_.box_id = want.ticket.box_id;
    shown_.slot = want.ticket.slot;
  }
  due_ = absl::InfiniteDuration();
  release_asked_ = false;
  spdlog::info("port={} to=connecting attachment={} generation={} box={} slot={}", number_, want.ticket.attachment_id,
               want.ticket.generation, want.ticket.box_id, want.ticket.slot);
  callbacks_.changed();
  base::sync_point("host.connecting");

  const absl::Duration end = clock_.monotonic() + deadlines_.connect;
  bool stale = false;
  absl::Status last = absl::InvalidArgumentError("the intent names no path to the box");
  for (int attempt = 1;; ++attempt) {
    for (const std::string& path : want.paths) {
      const absl::Duration left = end - clock_.monotonic();
      if (left <= absl::ZeroDuration() || stopping() || !current(wanted())) break;
      auto remote =
          connector_.connect(path, want.ticket, std::min(left, deadlines_.one_path), [this, session](absl::Status why) {
            absl::MutexLock lock(&mutex_);
            if (session != session_) return;
            lost_ = true;
            loss_ = std::move(why);
            news_ = true;
          });
      if (remote.ok()) {
        remote_ = *std::move(remote);
        break;
      }
      last = absl::Status(remote.status().code(), absl::StrCat(path, ": ", remote.status().message()));
      spdlog::warn("port={} attachment={} path={} attempt={} refused=\"{}\"", number_, want.ticket.attachment_id, path,
                   attempt, remote.status().ToString());
      if (fabric::reason_of(remote.status()) == fabric::TerminateReason::kTicketStale) {
        stale = true;
        break;
      }
    }
    if (remote_ != nullptr || stale) break;
    absl::MutexLock lock(&mutex_);
    const bool wanted = want_.attach && want_.ticket.attachment_id == shown_.attachment_id &&
                        want_.ticket.generation == shown_.generation;
    if (stopping_ || !wanted || clock_.monotonic() >= end || want.paths.empty()) break;
    auto stop = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
    mutex_.AwaitWithTimeout(absl::Condition(&stop), std::min(deadlines_.retry * attempt, absl::Seconds(1)));
  }

  if (remote_ == nullptr) {
    if (stale) {
      {
        absl::MutexLock lock(&mutex_);
        ticket_stale_ = true;
      }
      return move_to(PortPhase::kEmpty, "the ticket was used up; a new one is needed");
    }
    if (!current(wanted())) return move_to(PortPhase::kEmpty, "not wanted any more");
    callbacks_.event("port.failed", absl::StrCat("port ", number_, ": no session: ", last.message()),
                     want.ticket.attachment_id);
    return move_to(PortPhase::kFailed, absl::StrCat("no session with the box: ", last.message()));
  }
  {
    absl::MutexLock lock(&mutex_);
    shown_.epoch = remote_->epoch();
  }
  base::sync_point("host.connected");
  move_to(PortPhase::kPlugging, "");
  due_ = clock_.monotonic() + deadlines_.plug;
  if (absl::Status plugged = attach_.plug(*remote_); !plugged.ok()) {
    take_away(absl::StrCat("could not be plugged in: ", plugged.message()), PortPhase::kFailed);
    return;
  }
  base::sync_point("host.plugged");
}

void Port::take_away(const std::string& reason, PortPhase after) {
  after_ = after;
  after_detail_ = reason;
  absl::Status unplugged = attach_.unplug(reason);
  if (!unplugged.ok()) spdlog::error("port={} unplug=failed reason=\"{}\"", number_, unplugged.ToString());
  base::sync_point("host.unplugged");
  if (remote_ != nullptr) remote_->close();
  // Kept, closed, when the attach point may still call it; freed when the port is empty.
  if (unplugged.ok()) remote_.reset();
  {
    absl::MutexLock lock(&mutex_);
    ++session_;
    lost_ = false;
  }
  if (after == PortPhase::kFailed)
    callbacks_.event("port.failed", absl::StrCat("port ", number_, ": ", reason), snapshot().attachment_id);
  base::sync_point("host.gone");
  move_to(PortPhase::kGone, reason);
}

void Port::unplug(const std::string& reason) {
  const PortPhase phase = snapshot().phase;
  if (phase == PortPhase::kPlugging || phase == PortPhase::kAttached) take_away(reason, PortPhase::kEmpty);
}

PortThread::PortThread(Port& port) : port_(port) {
  thread_ = std::thread([this] {
    while (!port_.stopping()) {
      const absl::Duration due = port_.step();
      port_.wait(due);
    }
  });
}

PortThread::~PortThread() {
  port_.stop();
  thread_.join();
}

}  // namespace dxpu::host
