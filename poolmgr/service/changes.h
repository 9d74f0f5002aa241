// What one transaction is about to change: copies of records taken from the inventory, and the events that go with
// them.
//
// Nothing is visible to anybody before Reconciler::commit() has made it durable. Not thread-safe.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "poolmgr/core/inventory.h"
#include "poolmgr/store/store.h"

namespace dxpu::poolmgr {

class Changes {
 public:
  Changes(const Inventory& inventory, absl::Time now) : inventory_(inventory), now_(now) {}

  absl::Time now() const { return now_; }

  // A copy to change; nullptr when there is none. Pointers stay valid as long as this does.
  FunctionRecord* function(absl::string_view id) { return get(functions_, inventory_.function(id), id); }
  BoxRecord* box(absl::string_view id) { return get(boxes_, inventory_.box(id), id); }
  HostRecord* host(absl::string_view id) { return get(hosts_, inventory_.host(id), id); }
  AttachmentRecord* attachment(absl::string_view id) { return get(attachments_, inventory_.attachment(id), id); }
  OperationRecord* operation(absl::string_view id) { return get(operations_, inventory_.operation(id), id); }

  FunctionRecord& add(FunctionRecord record) {
    return functions_.insert_or_assign(record.id, std::move(record)).first->second;
  }
  BoxRecord& add(BoxRecord record) { return boxes_.insert_or_assign(record.id, std::move(record)).first->second; }
  HostRecord& add(HostRecord record) { return hosts_.insert_or_assign(record.id, std::move(record)).first->second; }
  AttachmentRecord& add(AttachmentRecord record) {
    return attachments_.insert_or_assign(record.id, std::move(record)).first->second;
  }
  OperationRecord& add(OperationRecord record) {
    return operations_.insert_or_assign(record.id, std::move(record)).first->second;
  }
  void erase_box(const BoxRecord& box);  // with its functions
  void erase_host(absl::string_view id) { erased_hosts_.insert(std::string(id)); }
  void remember(RequestRecord request) { request_ = std::move(request); }

  // The guarded steps, each with its event.
  absl::Status move(FunctionRecord& function, Lifecycle to, std::string reason);
  absl::Status move(AttachmentRecord& attachment, AttachmentState to, std::string reason);
  void set_condition(FunctionRecord& function, Condition condition, bool on, absl::string_view why);
  void event(absl::string_view type, absl::string_view subject, std::string message,
             absl::string_view attachment_id = "");
  void event(EventRecord event) { events_.push_back(std::move(event)); }

  // Whether anything differs from the inventory.
  bool any() const;
  absl::Status write(Transaction& transaction) const;
  // After the commit.
  void apply(Inventory& inventory, int64_t version) const;
  // Names of the steps taken, for sync points ("attachment.LINKING").
  const std::vector<std::string>& steps() const { return steps_; }

 private:
  template <typename T>
  using Table = Inventory::Table<T>;

  template <typename T>
  static T* get(Table<T>& changed, const T* known, absl::string_view id) {
    if (auto it = changed.find(id); it != changed.end()) return &it->second;
    if (known == nullptr) return nullptr;
    return &changed.emplace(std::string(id), *known).first->second;
  }
  template <typename T, typename F>
  static void each_changed(const Table<T>& changed, const Table<T>& known, F&& f) {
    for (const auto& [id, record] : changed) {
      auto it = known.find(id);
      if (it == known.end() || !(it->second == record)) f(record);
    }
  }

  const Inventory& inventory_;
  const absl::Time now_;
  Table<FunctionRecord> functions_;
  Table<BoxRecord> boxes_;
  Table<HostRecord> hosts_;
  Table<AttachmentRecord> attachments_;
  Table<OperationRecord> operations_;
  std::set<std::string> erased_functions_, erased_boxes_, erased_hosts_;
  std::vector<EventRecord> events_;
  std::vector<std::string> steps_;
  std::optional<RequestRecord> request_;
};

}  // namespace dxpu::poolmgr
