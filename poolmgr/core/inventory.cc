#include "poolmgr/core/inventory.h"

namespace dxpu::poolmgr {
namespace {

template <typename Table>
void erase_id(Table& table, absl::string_view id) {
  auto it = table.find(id);
  if (it != table.end()) table.erase(it);
}

}  // namespace

std::vector<const FunctionRecord*> Inventory::functions_of(absl::string_view box_id) const {
  std::vector<const FunctionRecord*> out;
  auto it = slots_of_box_.find(box_id);
  if (it == slots_of_box_.end()) return out;
  out.reserve(it->second.size());
  for (const auto& [slot, id] : it->second) out.push_back(&functions_.at(id));
  return out;
}

std::vector<const AttachmentRecord*> Inventory::attachments_of_box(absl::string_view box_id) const {
  std::vector<const AttachmentRecord*> out;
  auto it = of_box_.find(box_id);
  if (it == of_box_.end()) return out;
  for (const std::string& id : it->second) out.push_back(&attachments_.at(id));
  return out;
}

std::vector<const AttachmentRecord*> Inventory::attachments_of_host(absl::string_view host_id) const {
  std::vector<const AttachmentRecord*> out;
  auto it = of_host_.find(host_id);
  if (it == of_host_.end()) return out;
  for (const std::string& id : it->second) out.push_back(&attachments_.at(id));
  return out;
}

const AttachmentRecord* Inventory::holder_of_port(absl::string_view host_id, uint32_t port) const {
  auto it = of_port_.find(std::make_pair(std::string(host_id), port));
  return it == of_port_.end() ? nullptr : attachment(it->second);
}

const AttachmentRecord* Inventory::holder_of_function(absl::string_view function_id) const {
  auto it = of_function_.find(function_id);
  return it == of_function_.end() ? nullptr : attachment(it->second);
}

void Inventory::put(FunctionRecord record) {
  slots_of_box_[record.box_id][record.slot] = record.id;
  functions_.insert_or_assign(record.id, std::move(record));
}

void Inventory::put(BoxRecord record) { boxes_.insert_or_assign(record.id, std::move(record)); }
void Inventory::put(HostRecord record) { hosts_.insert_or_assign(record.id, std::move(record)); }

void Inventory::put(OperationRecord record) {
  if (record.done) {
    operations_.erase(record.id);
    return;
  }
  operations_.insert_or_assign(record.id, std::move(record));
}

void Inventory::unindex(const AttachmentRecord& record) {
  auto drop = [&](auto& index, const auto& key) {
    auto it = index.find(key);
    if (it == index.end()) return;
    it->second.erase(record.id);
    if (it->second.empty()) index.erase(it);
  };
  drop(of_box_, record.box_id);
  drop(of_host_, record.host_id);
  auto port = of_port_.find(std::make_pair(record.host_id, record.port));
  if (port != of_port_.end() && port->second == record.id) of_port_.erase(port);
  auto function = of_function_.find(record.function());
  if (function != of_function_.end() && function->second == record.id) of_function_.erase(function);
}

void Inventory::put(AttachmentRecord record) {
  if (auto old = attachments_.find(record.id); old != attachments_.end()) {
    unindex(old->second);
    attachments_.erase(old);
  }
  if (record.terminal()) return;
  of_box_[record.box_id].insert(record.id);
  of_host_[record.host_id].insert(record.id);
  if (!record.host_released) of_port_[std::make_pair(record.host_id, record.port)] = record.id;
  if (!record.box_released) of_function_[record.function()] = record.id;
  attachments_.insert_or_assign(record.id, std::move(record));
}

void Inventory::erase_function(absl::string_view id) {
  auto it = functions_.find(id);
  if (it == functions_.end()) return;
  auto slots = slots_of_box_.find(it->second.box_id);
  if (slots != slots_of_box_.end()) {
    slots->second.erase(it->second.slot);
    if (slots->second.empty()) slots_of_box_.erase(slots);
  }
  functions_.erase(it);
}

void Inventory::erase_box(absl::string_view id) { erase_id(boxes_, id); }
void Inventory::erase_host(absl::string_view id) { erase_id(hosts_, id); }

}  // namespace dxpu::poolmgr
