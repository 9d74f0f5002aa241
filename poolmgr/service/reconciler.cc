#include "poolmgr/service/reconciler.h"

#include <google/protobuf/util/message_differencer.h>
#include <spdlog/spdlog.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "poolmgr/service/convert.h"
#include "proxy/base/status.h"
#include "proxy/base/sync_point.h"

namespace dxpu::poolmgr {
namespace {

// Everything is looked at this often even when nothing seems to have changed: deadlines, retries, lost wake-ups.
constexpr absl::Duration kFullPass = absl::Seconds(1);
constexpr absl::Duration kPrune = absl::Minutes(10);
// A step may make another one due; a chain longer than this goes on at the next tick.
constexpr int kRounds = 32;

template <typename Message>
bool same(const Message& a, const Message& b) {
  return google::protobuf::util::MessageDifferencer::Equals(a, b);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Reconciler>> Reconciler::create(Store& store, base::Clock& clock, Random& random,
                                                               Options options) {
  DXPU_RETURN_IF_ERROR(options.check());
  DXPU_ASSIGN_OR_RETURN(Snapshot snapshot, store.load());
  std::unique_ptr<Reconciler> out(new Reconciler(store, clock, random, options));
  absl::MutexLock lock(&out->mutex_);
  for (BoxRecord& r : snapshot.boxes) {
    out->boxes_[r.id].last_seen = r.last_seen;
    out->inventory_.put(std::move(r));
  }
  for (HostRecord& r : snapshot.hosts) {
    out->hosts_[r.id].last_seen = r.last_seen;
    out->inventory_.put(std::move(r));
  }
  for (FunctionRecord& r : snapshot.functions) out->inventory_.put(std::move(r));
  for (AttachmentRecord& r : snapshot.attachments) out->inventory_.put(std::move(r));
  for (OperationRecord& r : snapshot.operations) out->inventory_.put(std::move(r));
  out->started_ = out->full_pass_ = out->pruned_ = clock.monotonic();
  return out;
}

// In the store's precision, so that a record reads back as it was written.
absl::Time Reconciler::now() const { return absl::FromUnixMicros(absl::ToUnixMicros(clock_.now())); }

bool Reconciler::deadlines_run() const { return clock_.monotonic() - started_ >= options_.silence; }

std::string Reconciler::new_id(absl::string_view prefix) const {
  constexpr size_t kIdBytes = 6;
  return absl::StrCat(prefix, absl::BytesToHexString(random_.bytes(kIdBytes)));
}

absl::Status Reconciler::commit(Changes& changes) {
  for (const EventRecord& told : told_) changes.event(told);
  if (!changes.any()) return absl::OkStatus();
  int64_t version = 0;
  absl::StatusOr<int64_t> reached = store_.transact([&](Transaction& t) {
    version = t.revision();
    return changes.write(t);
  });
  if (!reached.ok()) {
    if (!store_failing_) spdlog::error("store=failing error=\"{}\"", reached.status().ToString());
    store_failing_ = true;
    return reached.status();
  }
  if (store_failing_) spdlog::info("store=works_again revision={}", *reached);
  store_failing_ = false;
  told_.clear();
  changes.apply(inventory_, version);
  for (const std::string& step : changes.steps()) base::sync_point(absl::StrCat("poolmgr.", step));
  return absl::OkStatus();
}

void Reconciler::dirty_box(const std::string& box_id) {
  for (const FunctionRecord* f : inventory_.functions_of(box_id)) dirty_functions_.insert(f->id);
  for (const AttachmentRecord* a : inventory_.attachments_of_box(box_id)) dirty_attachments_.insert(a->id);
  boxes_[box_id].intents_due = true;
}

void Reconciler::dirty_host(const std::string& host_id) {
  for (const AttachmentRecord* a : inventory_.attachments_of_host(host_id)) dirty_attachments_.insert(a->id);
  hosts_[host_id].intents_due = true;
}

void Reconciler::dirty_attachment(const AttachmentRecord& a) {
  dirty_attachments_.insert(a.id);
  dirty_functions_.insert(a.function());
  if (!a.operation_id.empty()) dirty_operations_.insert(a.operation_id);
  boxes_[a.box_id].intents_due = true;
  hosts_[a.host_id].intents_due = true;
}

void Reconciler::dirty_everything() {
  for (const auto& [id, box] : inventory_.boxes()) dirty_box(id);
  for (const auto& [id, host] : inventory_.hosts()) dirty_host(id);
  for (const auto& [id, op] : inventory_.operations()) dirty_operations_.insert(id);
}

void Reconciler::reconcile() {
  bool store_works = true;
  for (int round = 0; round < kRounds && store_works; ++round) {
    std::set<std::string> attachments, functions, operations;
    attachments.swap(dirty_attachments_);
    functions.swap(dirty_functions_);
    operations.swap(dirty_operations_);
    if (attachments.empty() && functions.empty() && operations.empty()) break;

    // One transaction each: what one of them can not do does not hold up the others.
    auto run = [&](auto&& step, const std::string& id) {
      if (!store_works) return;
      Changes c(inventory_, now());
      absl::Status status = step(c);
      if (!status.ok()) {
        spdlog::critical("step=refused id={} error=\"{}\"", id, status.ToString());
        return;
      }
      if (!c.any()) return;
      store_works = commit(c).ok();
    };
    for (const std::string& id : attachments) {
      const AttachmentRecord* before = inventory_.attachment(id);
      if (before == nullptr) continue;
      const AttachmentRecord old = *before;
      run([&](Changes& c) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return step_attachment(c, *c.attachment(id)); }, id);
      const AttachmentRecord* after = inventory_.attachment(id);
      if (after == nullptr) {
        // Every operation that names it, not only the last: a detach may have cut an attach short.
        for (const auto& [op_id, op] : inventory_.operations()) dirty_operations_.insert(op_id);
      }
      if (after == nullptr || !(*after == old)) {
        dirty_attachment(after == nullptr ? old : *after);
        for (const AttachmentRecord* beside : inventory_.attachments_of_host(old.host_id)) {
          if (beside->operation_id == old.operation_id) dirty_attachment(*beside);
        }
      }
    }
    for (const std::string& id : functions) {
      if (inventory_.function(id) == nullptr) continue;
      run([&](Changes& c) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return step_function(c, *c.function(id)); }, id);
    }
    for (const std::string& id : operations) {
      if (inventory_.operation(id) == nullptr) continue;
      run([&](Changes& c) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return step_operation(c, *c.operation(id)); }, id);
    }
  }
  send_intents();
}

void Reconciler::send_intents() {
  for (auto& [id, box] : boxes_) {
    if (!box.intents_due || !box.ready()) continue;
    box.intents_due = false;
    send_box_intents(id, box);
  }
  for (auto& [id, host] : hosts_) {
    if (!host.intents_due || !host.ready()) continue;
    host.intents_due = false;
    send_host_intents(id, host);
  }
}

void Reconciler::send_box_intents(const std::string& box_id, BoxLive& box) {
  v1::ManagerMessage message;
  v1::BoxIntents& intents = *message.mutable_box_intents();
  bool changed = false;
  for (auto& [slot, live] : box.places) {
    if (!live.reported) continue;
    v1::SlotIntent intent;
    intent.set_slot(slot);
    const AttachmentRecord* a = inventory_.holder_of_function(function_id(box_id, slot));
    if (a != nullptr && !a->box_stop) {
      intent.set_serve(true);
      fill_ticket(*a, a->generation, a->token, a->ticket_expires, *intent.mutable_ticket());
    }
    const bool unknown = a == nullptr && live.fact.phase() == v1::SLOT_PHASE_SERVING;
    if (!unknown) live.unknown_since = absl::InfiniteDuration();
    if (unknown && live.unknown_since == absl::InfiniteDuration()) live.unknown_since = clock_.monotonic();
    if (unknown && clock_.monotonic() - live.unknown_since < options_.orphan_grace) continue;  // left as it is
    changed = changed || live.sent_since == 0 || !same(live.sent, intent);
    *intents.add_slots() = std::move(intent);
  }
  if (!changed) return;
  const v1::BoxIntents copy = intents;
  const uint64_t sequence = box.link->send(std::move(message));
  for (const v1::SlotIntent& intent : copy.slots()) {
    SlotLive& live = box.places[intent.slot()];
    if (live.sent_since != 0 && same(live.sent, intent)) continue;
    live.sent = intent;
    live.sent_since = sequence;
  }
}

void Reconciler::send_host_intents(const std::string& host_id, HostLive& host) {
  v1::ManagerMessage message;
  v1::HostIntents& intents = *message.mutable_host_intents();
  bool changed = false;
  for (auto& [port, live] : host.places) {
    if (!live.reported) continue;
    v1::PortIntent intent;
    intent.set_port(port);
    const AttachmentRecord* a = inventory_.holder_of_port(host_id, port);
    if (a != nullptr && !a->ending && a->host_generation > 0) {
      intent.set_attach(true);
      fill_ticket(*a, a->host_generation, a->host_token, a->host_ticket_expires, *intent.mutable_ticket());
      for (const std::string& path : a->paths) intent.add_paths(path);
    } else if (a != nullptr) {
      intent.set_force(a->force);
    }
    const v1::PortPhase phase = live.fact.phase();
    const bool unknown = a == nullptr && (phase == v1::PORT_PHASE_CONNECTING || phase == v1::PORT_PHASE_PLUGGING ||
                                          phase == v1::PORT_PHASE_ATTACHED);
    if (!unknown) live.unknown_since = absl::InfiniteDuration();
    if (unknown && live.unknown_since == absl::InfiniteDuration()) live.unknown_since = clock_.monotonic();
    if (unknown && clock_.monotonic() - live.unknown_since < options_.orphan_grace) continue;
    if (unknown) intent.set_force(true);
    changed = changed || live.sent_since == 0 || !same(live.sent, intent);
    *intents.add_ports() = std::move(intent);
  }
  if (!changed) return;
  const v1::HostIntents copy = intents;
  const uint64_t sequence = host.link->send(std::move(message));
  for (const v1::PortIntent& intent : copy.ports()) {
    PortLive& live = host.places[intent.port()];
    if (live.sent_since != 0 && same(live.sent, intent)) continue;
    live.sent = intent;
    live.sent_since = sequence;
  }
}

void Reconciler::tick() {
  absl::MutexLock lock(&mutex_);
  close_silent();
  beat();
  const absl::Duration at = clock_.monotonic();
  if (at - full_pass_ >= kFullPass) {
    full_pass_ = at;
    dirty_everything();
  }
  if (!told_.empty()) {
    Changes c(inventory_, now());
    commit(c).IgnoreError();  // they stay in told_
  }
  if (at - pruned_ >= kPrune) {
    pruned_ = at;
    if (absl::Status status = store_.prune(options_.retention, now()); !status.ok()) {
      spdlog::warn("store=prune_failed error=\"{}\"", status.ToString());
    }
  }
  reconcile();
}

}  // namespace dxpu::poolmgr
