// What operators look at: records, with what is known of the agents right now laid over them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "poolmgr/service/convert.h"
#include "poolmgr/service/reconciler.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {
namespace {

// The token is the id of the last item of the page before: stable when items come and go between pages.
absl::StatusOr<size_t> page_size(uint32_t asked) {
  if (asked == 0) return kDefaultPage;
  return std::min(asked, kMaxPage);
}

// Walks `table` from the token on, calling `add` for those that `want` says yes to; sets the next token when there is
// more.
template <typename Table, typename Want, typename Add>
absl::Status page(const Table& table, uint32_t asked, const std::string& token, Want want, Add add, std::string* next) {
  DXPU_ASSIGN_OR_RETURN(size_t size, page_size(asked));
  size_t count = 0;
  std::string last;
  for (auto it = token.empty() ? table.begin() : table.upper_bound(token); it != table.end(); ++it) {
    if (!want(it->second)) continue;
    if (count == size) {
      *next = last;
      return absl::OkStatus();
    }
    add(it->second);
    last = it->first;
    ++count;
  }
  return absl::OkStatus();
}

template <typename Live>
void fill_agent(const Live* live, const std::string& version, const std::string& boot_id, absl::Time last_seen,
                v1::AgentStatus* out) {
  out->set_connected(live != nullptr && live->link != nullptr);
  const absl::Time seen = live != nullptr ? std::max(live->last_seen, last_seen) : last_seen;
  if (seen != absl::InfinitePast()) set_time(seen, out->mutable_last_seen());
  out->set_software_version(version);
  out->set_boot_id(boot_id);
}

}  // namespace

v1::Function Reconciler::view(const FunctionRecord& f) const {
  v1::Function out;
  out.set_id(f.id);
  out.set_owner(f.attachment_id.empty() ? "" : f.owner);
  v1::FunctionSpec& spec = *out.mutable_spec();
  spec.set_box_id(f.box_id);
  spec.set_slot(f.slot);
  spec.set_model(f.model);
  spec.set_memory_bytes(f.memory_bytes);
  spec.set_engine(f.engine);
  spec.set_vendor_id(f.vendor_id);
  spec.set_device_id(f.device_id);
  spec.set_serial(f.serial);
  v1::FunctionStatus& status = *out.mutable_status();
  status.set_lifecycle(static_cast<v1::Lifecycle>(f.lifecycle));
  // What is true of its box is true of it.
  Conditions conditions = f.conditions;
  const BoxRecord* box = inventory_.box(f.box_id);
  const BoxLive* live = box_live(f.box_id);
  if (box != nullptr && box->cordoned) conditions.set(Condition::kCordoned, true);
  if (live == nullptr || live->link == nullptr) conditions.set(Condition::kMissing, true);
  for (Condition c : kEveryCondition) {
    if (conditions.has(c)) status.add_conditions(static_cast<v1::Condition>(c));
  }
  status.set_reason(f.reason);
  if (f.since != absl::InfinitePast()) set_time(f.since, status.mutable_since());
  status.set_attachment_id(f.attachment_id);
  status.set_generation(f.generation);
  if (const AttachmentRecord* a = inventory_.attachment(f.attachment_id);
      a != nullptr && a->deadline != absl::InfiniteFuture()) {
    set_time(a->deadline, status.mutable_deadline());
  }
  out.set_version(f.version);
  return out;
}

v1::Box Reconciler::view(const BoxRecord& b) const {
  v1::Box out;
  out.set_id(b.id);
  out.set_owner(b.owner);
  for (const std::string& path : b.paths) out.mutable_spec()->add_paths(path);
  out.mutable_spec()->set_slot_count(b.slot_count);
  for (const PhysicalGpuRecord& gpu : b.physical_gpus) {
    v1::PhysicalGpu& to = *out.mutable_spec()->add_physical_gpus();
    to.set_pci_address(gpu.pci_address);
    to.set_vendor_id(gpu.vendor_id);
    to.set_device_id(gpu.device_id);
    to.set_name(gpu.name);
  }
  fill_agent(box_live(b.id), b.software_version, b.boot_id, b.last_seen, out.mutable_agent());
  out.set_cordoned(b.cordoned);
  out.set_version(b.version);
  return out;
}

v1::Host Reconciler::view(const HostRecord& h) const {
  v1::Host out;
  out.set_id(h.id);
  out.set_owner(h.owner);
  out.mutable_spec()->set_port_count(h.port_count);
  out.mutable_spec()->set_attach_point(h.attach_point);
  const HostLive* live = host_live(h.id);
  fill_agent(live, h.software_version, h.boot_id, h.last_seen, out.mutable_agent());
  if (live != nullptr) {
    for (const auto& [number, place] : live->places) {
      v1::HostPort& port = *out.add_ports();
      port.set_port(number);
      if (const AttachmentRecord* a = inventory_.holder_of_port(h.id, number)) port.set_attachment_id(a->id);
      port.set_phase(phase_name(place.fact.phase()));
      port.set_holder(place.fact.holder());
      port.set_bus_address(place.fact.bus_address());
    }
  }
  out.set_version(h.version);
  return out;
}

v1::Attachment Reconciler::view(const AttachmentRecord& a) const {
  v1::Attachment out;
  out.set_id(a.id);
  out.set_owner(a.owner);
  out.set_host_id(a.host_id);
  out.set_port(a.port);
  out.set_box_id(a.box_id);
  out.set_slot(a.slot);
  out.set_generation(a.generation);
  for (const std::string& path : a.paths) out.add_paths(path);
  out.set_state(static_cast<v1::AttachmentState>(a.state));
  out.set_reason(a.reason);
  if (a.since != absl::InfinitePast()) set_time(a.since, out.mutable_since());
  if (a.deadline != absl::InfiniteFuture()) set_time(a.deadline, out.mutable_deadline());
  set_time(a.created, out.mutable_created());
  // Renewals are between box and host and come often: they are shown, not stored.
  const BoxLive* box = box_live(a.box_id);
  if (box != nullptr && !a.terminal()) {
    auto it = box->places.find(a.slot);
    if (it != box->places.end() && it->second.fact.attachment_id() == a.id && it->second.fact.has_lease_renewed()) {
      *out.mutable_lease_renewed() = it->second.fact.lease_renewed();
    }
  }
  out.set_bus_address(a.bus_address);
  out.set_operation_id(a.operation_id);
  out.set_version(a.version);
  return out;
}

absl::StatusOr<v1::GetPoolResponse> Reconciler::pool() const {
  absl::MutexLock lock(&mutex_);
  v1::GetPoolResponse out;
  out.set_revision(store_.revision());
  out.set_database(store_.location());
  out.set_software_version(DXPU_VERSION);
  for (const auto& [id, f] : inventory_.functions()) {
    ++(*out.mutable_functions_by_lifecycle())[std::string(to_string(f.lifecycle))];
  }
  uint32_t boxes = 0, hosts = 0;
  for (const auto& [id, box] : boxes_) boxes += box.link != nullptr;
  for (const auto& [id, host] : hosts_) hosts += host.link != nullptr;
  out.set_boxes(static_cast<uint32_t>(inventory_.boxes().size()));
  out.set_boxes_connected(boxes);
  out.set_hosts(static_cast<uint32_t>(inventory_.hosts().size()));
  out.set_hosts_connected(hosts);
  out.set_attachments(static_cast<uint32_t>(inventory_.attachments().size()));
  return out;
}

absl::StatusOr<v1::ListFunctionsResponse> Reconciler::functions(const v1::ListFunctionsRequest& request) const {
  absl::MutexLock lock(&mutex_);
  v1::ListFunctionsResponse out;
  DXPU_RETURN_IF_ERROR(page(
      inventory_.functions(), request.page_size(), request.page_token(),
      [&](const FunctionRecord& f) {
        return (request.box_id().empty() || f.box_id == request.box_id()) &&
               (request.model().empty() || f.model == request.model()) &&
               (request.lifecycle() == v1::LIFECYCLE_UNSPECIFIED ||
                static_cast<int>(f.lifecycle) == request.lifecycle());
      },
      [&](const FunctionRecord& f) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { *out.add_functions() = view(f); },
      out.mutable_next_page_token()));
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::ListBoxesResponse> Reconciler::boxes(const v1::ListBoxesRequest& request) const {
  absl::MutexLock lock(&mutex_);
  v1::ListBoxesResponse out;
  DXPU_RETURN_IF_ERROR(page(
      inventory_.boxes(), request.page_size(), request.page_token(),
      [&](const BoxRecord& b) { return request.id().empty() || b.id == request.id(); },
      [&](const BoxRecord& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { *out.add_boxes() = view(b); },
      out.mutable_next_page_token()));
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::ListHostsResponse> Reconciler::hosts(const v1::ListHostsRequest& request) const {
  absl::MutexLock lock(&mutex_);
  v1::ListHostsResponse out;
  DXPU_RETURN_IF_ERROR(page(
      inventory_.hosts(), request.page_size(), request.page_token(),
      [&](const HostRecord& h) { return request.id().empty() || h.id == request.id(); },
      [&](const HostRecord& h) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { *out.add_hosts() = view(h); },
      out.mutable_next_page_token()));
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::ListAttachmentsResponse> Reconciler::attachments(const v1::ListAttachmentsRequest& request) const {
  absl::MutexLock lock(&mutex_);
  AttachmentFilter filter;
  filter.id = request.id();
  filter.host_id = request.host_id();
  filter.box_id = request.box_id();
  filter.include_ended = request.include_ended() || !request.id().empty();
  filter.after_id = request.page_token();
  DXPU_ASSIGN_OR_RETURN(size_t size, page_size(request.page_size()));
  filter.limit = static_cast<uint32_t>(size) + 1;
  DXPU_ASSIGN_OR_RETURN(std::vector<AttachmentRecord> records, store_.attachments(filter));
  v1::ListAttachmentsResponse out;
  if (records.size() > size) {
    records.resize(size);
    out.set_next_page_token(records.back().id);
  }
  for (const AttachmentRecord& a : records) *out.add_attachments() = view(a);
  out.set_revision(store_.revision());
  return out;
}

absl::StatusOr<v1::GetTablesResponse> Reconciler::tables(const v1::GetTablesRequest& request) const {
  absl::MutexLock lock(&mutex_);
  v1::GetTablesResponse out;
  for (const auto& [host_id, host] : hosts_) {
    if (!request.host_id().empty() && request.host_id() != host_id) continue;
    for (const auto& [number, place] : host.places) {
      const bool holds = place.fact.phase() != v1::PORT_PHASE_EMPTY && place.fact.phase() != v1::PORT_PHASE_FAILED &&
                         place.fact.phase() != v1::PORT_PHASE_UNSPECIFIED;
      if (!holds) continue;
      v1::HostTableRow& row = *out.add_host_rows();
      row.set_host_id(host_id);
      row.set_port(number);
      row.set_bus_address(place.fact.bus_address());
      row.set_attachment_id(place.fact.attachment_id());
      row.set_generation(place.fact.generation());
      row.set_phase(phase_name(place.fact.phase()));
      const AttachmentRecord* a = inventory_.attachment(place.fact.attachment_id());
      if (a == nullptr) continue;
      row.set_box_id(a->box_id);
      row.set_slot(a->slot);
      for (const std::string& path : a->paths) row.add_paths(path);
    }
  }
  for (const auto& [box_id, box] : boxes_) {
    if (!request.box_id().empty() && request.box_id() != box_id) continue;
    for (const auto& [number, place] : box.places) {
      v1::BoxTableRow& row = *out.add_box_rows();
      row.set_box_id(box_id);
      row.set_slot(number);
      row.set_phase(phase_name(place.fact.phase()));
      if (place.fact.phase() != v1::SLOT_PHASE_SERVING) continue;
      row.set_attachment_id(place.fact.attachment_id());
      row.set_generation(place.fact.generation());
      row.set_epoch(place.fact.epoch());
      row.set_worker_pid(place.fact.worker_pid());
      const AttachmentRecord* a = inventory_.attachment(place.fact.attachment_id());
      if (a == nullptr) continue;
      row.set_host_id(a->host_id);
      for (const std::string& path : a->paths) row.add_paths(path);
    }
  }
  out.set_revision(store_.revision());
  return out;
}

}  // namespace dxpu::poolmgr
