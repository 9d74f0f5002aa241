// Every live record of the pool in memory, indexed: what placement and the reconciler look at.
//
// What this is not: the truth. That is the store; the inventory is loaded from it and then follows each committed
// transaction. Pure: no clock, no I/O. Not thread-safe; its owner guards it.
//
// Attachments that are over (terminal) are dropped from it; the store keeps them. Operations that are done likewise.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "poolmgr/core/types.h"

namespace dxpu::poolmgr {

class Inventory {
 public:
  template <typename T>
  using Table = std::map<std::string, T, std::less<>>;

  const Table<FunctionRecord>& functions() const { return functions_; }
  const Table<BoxRecord>& boxes() const { return boxes_; }
  const Table<HostRecord>& hosts() const { return hosts_; }
  const Table<AttachmentRecord>& attachments() const { return attachments_; }
  const Table<OperationRecord>& operations() const { return operations_; }

  // nullptr when there is none.
  const FunctionRecord* function(absl::string_view id) const { return find(functions_, id); }
  const BoxRecord* box(absl::string_view id) const { return find(boxes_, id); }
  const HostRecord* host(absl::string_view id) const { return find(hosts_, id); }
  const AttachmentRecord* attachment(absl::string_view id) const { return find(attachments_, id); }
  const OperationRecord* operation(absl::string_view id) const { return find(operations_, id); }

  // In order of slot.
  std::vector<const FunctionRecord*> functions_of(absl::string_view box_id) const;
  // Attachments that still hold something of the box, the host, the port.
  std::vector<const AttachmentRecord*> attachments_of_box(absl::string_view box_id) const;
  std::vector<const AttachmentRecord*> attachments_of_host(absl::string_view host_id) const;
  // The one that holds this port or this function; nullptr when it is not held.
  const AttachmentRecord* holder_of_port(absl::string_view host_id, uint32_t port) const;
  const AttachmentRecord* holder_of_function(absl::string_view function_id) const;

  void put(FunctionRecord record);
  void put(BoxRecord record);
  void put(HostRecord record);
  void put(AttachmentRecord record);
  void put(OperationRecord record);
  void erase_function(absl::string_view id);
  void erase_box(absl::string_view id);
  void erase_host(absl::string_view id);

 private:
  template <typename T>
  static const T* find(const Table<T>& table, absl::string_view id) {
    auto it = table.find(id);
    return it == table.end() ? nullptr : &it->second;
  }
  void unindex(const AttachmentRecord& record);

  Table<FunctionRecord> functions_;
  Table<BoxRecord> boxes_;
  Table<HostRecord> hosts_;
  Table<AttachmentRecord> attachments_;
  Table<OperationRecord> operations_;
  std::map<std::string, std::map<uint32_t, std::string>, std::less<>> slots_of_box_;
  std::map<std::string, std::set<std::string>, std::less<>> of_box_;
  std::map<std::string, std::set<std::string>, std::less<>> of_host_;
  std::map<std::pair<std::string, uint32_t>, std::string> of_port_;
  std::map<std::string, std::string, std::less<>> of_function_;
};

}  // namespace dxpu::poolmgr
