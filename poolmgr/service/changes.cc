#include "poolmgr/service/changes.h"

#include "absl/strings/str_cat.h"
#include "poolmgr/core/lifecycle.h"
#include "poolmgr/service/options.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {

void Changes::erase_box(const BoxRecord& box) {
  for (const FunctionRecord* f : inventory_.functions_of(box.id)) erased_functions_.insert(f->id);
  erased_boxes_.insert(box.id);
}

absl::Status Changes::move(FunctionRecord& function, Lifecycle to, std::string reason) {
  const Lifecycle from = function.lifecycle;
  const std::string message = absl::StrCat(to_string(from), " → ", to_string(to), ": ", reason);
  DXPU_RETURN_IF_ERROR(move_to(function, to, now_, std::move(reason)));
  event("function.lifecycle", function.id, message, function.attachment_id);
  steps_.push_back(absl::StrCat("function.", to_string(to)));
  return absl::OkStatus();
}

absl::Status Changes::move(AttachmentRecord& attachment, AttachmentState to, std::string reason) {
  const AttachmentState from = attachment.state;
  const std::string message = absl::StrCat(to_string(from), " → ", to_string(to), ": ", reason);
  DXPU_RETURN_IF_ERROR(move_to(attachment, to, now_, std::move(reason)));
  event("attachment.state", attachment.id, message, attachment.id);
  steps_.push_back(absl::StrCat("attachment.", to_string(to)));
  return absl::OkStatus();
}

void Changes::set_condition(FunctionRecord& function, Condition condition, bool on, absl::string_view why) {
  if (function.conditions.has(condition) == on) return;
  function.conditions.set(condition, on);
  event("function.condition", function.id, absl::StrCat(on ? "" : "no longer ", to_string(condition), ": ", why),
        function.attachment_id);
}

void Changes::event(absl::string_view type, absl::string_view subject, std::string message,
                    absl::string_view attachment_id) {
  if (message.size() > kMaxText) message.resize(kMaxText);
  EventRecord e;
  e.time = now_;
  e.type = std::string(type);
  e.subject = std::string(subject);
  e.message = std::move(message);
  e.attachment_id = std::string(attachment_id);
  events_.push_back(std::move(e));
}

bool Changes::any() const {
  bool any = !events_.empty() || request_.has_value() || !erased_functions_.empty() || !erased_boxes_.empty() ||
             !erased_hosts_.empty();
  auto mark = [&any](const auto&) { any = true; };
  each_changed(boxes_, inventory_.boxes(), mark);
  each_changed(hosts_, inventory_.hosts(), mark);
  each_changed(functions_, inventory_.functions(), mark);
  each_changed(attachments_, inventory_.attachments(), mark);
  each_changed(operations_, inventory_.operations(), mark);
  return any;
}

absl::Status Changes::write(Transaction& t) const {
  absl::Status status;
  auto put = [&](const auto& record) {
    if (status.ok()) status = t.put(record);
  };
  each_changed(boxes_, inventory_.boxes(), put);  // before the functions that refer to them
  each_changed(hosts_, inventory_.hosts(), put);
  each_changed(functions_, inventory_.functions(), put);
  each_changed(attachments_, inventory_.attachments(), put);
  each_changed(operations_, inventory_.operations(), put);
  DXPU_RETURN_IF_ERROR(status);
  for (const std::string& id : erased_functions_) DXPU_RETURN_IF_ERROR(t.erase_function(id));
  for (const std::string& id : erased_boxes_) DXPU_RETURN_IF_ERROR(t.erase_box(id));
  for (const std::string& id : erased_hosts_) DXPU_RETURN_IF_ERROR(t.erase_host(id));
  if (request_) DXPU_RETURN_IF_ERROR(t.remember(*request_));
  for (const EventRecord& e : events_) DXPU_RETURN_IF_ERROR(t.append(e));
  return absl::OkStatus();
}

void Changes::apply(Inventory& inventory, int64_t version) const {
  auto put = [&](auto record) {
    record.version = version;
    inventory.put(std::move(record));
  };
  // Collected first: the inventory that is compared with is the one that changes.
  auto all = [&](const auto& changed, const auto& known) {
    std::vector<typename std::decay_t<decltype(changed)>::mapped_type> records;
    each_changed(changed, known, [&](const auto& record) { records.push_back(record); });
    for (auto& record : records) put(std::move(record));
  };
  all(boxes_, inventory.boxes());
  all(hosts_, inventory.hosts());
  all(functions_, inventory.functions());
  all(attachments_, inventory.attachments());
  all(operations_, inventory.operations());
  for (const std::string& id : erased_functions_) inventory.erase_function(id);
  for (const std::string& id : erased_boxes_) inventory.erase_box(id);
  for (const std::string& id : erased_hosts_) inventory.erase_host(id);
}

}  // namespace dxpu::poolmgr
