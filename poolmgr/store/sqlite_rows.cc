#include "poolmgr/store/sqlite_rows.h"

#include "proxy/base/status.h"

namespace dxpu::poolmgr::sqlite {
namespace {

int64_t number(uint64_t value) { return static_cast<int64_t>(value); }

// A list of texts that hangs on a row: removed and written again with it.
absl::Status write_texts(Connection& c, const char* erase, const char* insert, const std::string& id,
                         const std::vector<std::string>& texts) {
  {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare(erase));
    DXPU_RETURN_IF_ERROR(run.bind(id).finish());
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare(insert));
    DXPU_RETURN_IF_ERROR(run.bind(id).bind(number(i)).bind(texts[i]).finish());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> read_texts(Connection& c, const char* select, const std::string& id) {
  std::vector<std::string> out;
  DXPU_ASSIGN_OR_RETURN(Run run, c.prepare(select));
  run.bind(id);
  while (true) {
    DXPU_ASSIGN_OR_RETURN(bool row, run.step());
    if (!row) return out;
    out.push_back(run.text(0));
  }
}

AttachmentRecord attachment_of(const Run& run) {
  AttachmentRecord r;
  int i = 0;
  r.id = run.text(i++);
  r.owner = run.text(i++);
  r.host_id = run.text(i++);
  r.port = static_cast<uint32_t>(run.integer(i++));
  r.box_id = run.text(i++);
  r.slot = static_cast<uint32_t>(run.integer(i++));
  r.state = static_cast<AttachmentState>(run.integer(i++));
  r.reason = run.text(i++);
  r.since = run.time(i++);
  r.deadline = run.time(i++);
  r.created = run.time(i++);
  r.lease_renewed = run.time(i++);
  r.bus_address = run.text(i++);
  r.operation_id = run.text(i++);
  r.generation = static_cast<uint64_t>(run.integer(i++));
  r.token = run.text(i++);
  r.ticket_expires = run.time(i++);
  r.host_generation = static_cast<uint64_t>(run.integer(i++));
  r.host_token = run.text(i++);
  r.host_ticket_expires = run.time(i++);
  r.ending = run.integer(i++) != 0;
  r.force = run.integer(i++) != 0;
  r.failed = run.integer(i++) != 0;
  r.box_stop = run.integer(i++) != 0;
  r.box_served = run.integer(i++) != 0;
  r.box_released = run.integer(i++) != 0;
  r.host_released = run.integer(i++) != 0;
  r.version = run.integer(i++);
  return r;
}

constexpr char kSelectOperation[] =
    "SELECT id, kind, owner, request_id, done, error_code, error_message, created, deadline, finished, version "
    "FROM operations WHERE id = ?";
constexpr char kSelectRunningOperations[] =
    "SELECT id, kind, owner, request_id, done, error_code, error_message, created, deadline, finished, version "
    "FROM operations WHERE done = 0 ORDER BY id";

OperationRecord operation_of(const Run& run) {
  OperationRecord r;
  r.id = run.text(0);
  r.kind = run.text(1);
  r.owner = run.text(2);
  r.request_id = run.text(3);
  r.done = run.integer(4) != 0;
  r.error_code = static_cast<int>(run.integer(5));
  r.error_message = run.text(6);
  r.created = run.time(7);
  r.deadline = run.time(8);
  r.finished = run.time(9);
  r.version = run.integer(10);
  return r;
}

absl::Status read_operation_rest(Connection& c, OperationRecord& r) {
  DXPU_ASSIGN_OR_RETURN(
      r.attachment_ids,
      read_texts(c, "SELECT attachment_id FROM operation_attachments WHERE operation_id = ? ORDER BY position", r.id));
  DXPU_ASSIGN_OR_RETURN(
      Run run, c.prepare("SELECT name, state, detail, started, finished FROM operation_steps WHERE operation_id = ? "
                         "ORDER BY position"));
  run.bind(r.id);
  while (true) {
    DXPU_ASSIGN_OR_RETURN(bool row, run.step());
    if (!row) return absl::OkStatus();
    r.steps.push_back({run.text(0), static_cast<StepState>(run.integer(1)), run.text(2), run.time(3), run.time(4)});
  }
}

}  // namespace

absl::Status write(Connection& c, const BoxRecord& r, int64_t version) {
  {
    DXPU_ASSIGN_OR_RETURN(
        Run run,
        c.prepare("INSERT INTO boxes (id, owner, slot_count, cordoned, software_version, boot_id, last_seen, version) "
                  "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, "
                  "slot_count = excluded.slot_count, cordoned = excluded.cordoned, software_version = "
                  "excluded.software_version, boot_id = excluded.boot_id, last_seen = excluded.last_seen, version = "
                  "excluded.version"));
    run.bind(r.id).bind(r.owner).bind(number(r.slot_count)).bind(number(r.cordoned)).bind(r.software_version);
    DXPU_RETURN_IF_ERROR(run.bind(r.boot_id).bind(r.last_seen).bind(version).finish());
  }
  DXPU_RETURN_IF_ERROR(write_texts(c, "DELETE FROM box_paths WHERE box_id = ?",
                                   "INSERT INTO box_paths (box_id, position, path) VALUES (?, ?, ?)", r.id, r.paths));
  {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("DELETE FROM box_gpus WHERE box_id = ?"));
    DXPU_RETURN_IF_ERROR(run.bind(r.id).finish());
  }
  for (size_t i = 0; i < r.physical_gpus.size(); ++i) {
    const PhysicalGpuRecord& gpu = r.physical_gpus[i];
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("INSERT INTO box_gpus (box_id, position, pci_address, vendor_id, "
                                             "device_id, name) VALUES (?, ?, ?, ?, ?, ?)"));
    run.bind(r.id).bind(number(i)).bind(gpu.pci_address).bind(number(gpu.vendor_id)).bind(number(gpu.device_id));
    DXPU_RETURN_IF_ERROR(run.bind(gpu.name).finish());
  }
  return absl::OkStatus();
}

absl::Status write(Connection& c, const HostRecord& r, int64_t version) {
  DXPU_ASSIGN_OR_RETURN(
      Run run,
      c.prepare(
          "INSERT INTO hosts (id, owner, port_count, attach_point, software_version, boot_id, last_seen, version) "
          "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, port_count = "
          "excluded.port_count, attach_point = excluded.attach_point, software_version = "
          "excluded.software_version, boot_id = excluded.boot_id, last_seen = excluded.last_seen, version = "
          "excluded.version"));
  run.bind(r.id).bind(r.owner).bind(number(r.port_count)).bind(r.attach_point).bind(r.software_version);
  return run.bind(r.boot_id).bind(r.last_seen).bind(version).finish();
}

absl::Status write(Connection& c, const FunctionRecord& r, int64_t version) {
  DXPU_ASSIGN_OR_RETURN(
      Run run,
      c.prepare("INSERT INTO functions (id, owner, box_id, slot, model, memory_bytes, engine, vendor_id, device_id, "
                "serial, lifecycle, conditions, reason, since, deadline, attachment_id, generation, version) VALUES "
                "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET owner = "
                "excluded.owner, model = excluded.model, memory_bytes = excluded.memory_bytes, engine = "
                "excluded.engine, vendor_id = excluded.vendor_id, device_id = excluded.device_id, serial = "
                "excluded.serial, lifecycle = excluded.lifecycle, conditions = excluded.conditions, reason = "
                "excluded.reason, since = excluded.since, deadline = excluded.deadline, attachment_id = "
                "excluded.attachment_id, generation = excluded.generation, version = excluded.version"));
  run.bind(r.id).bind(r.owner).bind(r.box_id).bind(number(r.slot)).bind(r.model).bind(number(r.memory_bytes));
  run.bind(r.engine).bind(number(r.vendor_id)).bind(number(r.device_id)).bind(r.serial);
  run.bind(static_cast<int64_t>(r.lifecycle)).bind(number(r.conditions.bits())).bind(r.reason).bind(r.since);
  return run.bind(r.deadline).bind(r.attachment_id).bind(number(r.generation)).bind(version).finish();
}

absl::Status write(Connection& c, const AttachmentRecord& r, int64_t version) {
  {
    // Binding never changes: host, port, box, slot, owner and creation are left alone by an update.
    DXPU_ASSIGN_OR_RETURN(
        Run run,
        c.prepare("INSERT INTO attachments (id, owner, host_id, port, box_id, slot, state, reason, since, deadline, "
                  "created, lease_renewed, bus_address, operation_id, generation, token, ticket_expires, "
                  "host_generation, host_token, host_ticket_expires, ending, force, failed, box_stop, box_served, "
                  "box_released, host_released, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, "
                  "?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, reason = "
                  "excluded.reason, since = excluded.since, deadline = excluded.deadline, lease_renewed = "
                  "excluded.lease_renewed, bus_address = excluded.bus_address, operation_id = excluded.operation_id, "
                  "generation = excluded.generation, token = excluded.token, ticket_expires = "
                  "excluded.ticket_expires, host_generation = excluded.host_generation, host_token = "
                  "excluded.host_token, host_ticket_expires = excluded.host_ticket_expires, ending = excluded.ending, "
                  "force = excluded.force, failed = excluded.failed, box_stop = excluded.box_stop, box_served = "
                  "excluded.box_served, box_released = excluded.box_released, host_released = "
                  "excluded.host_released, version = excluded.version"));
    run.bind(r.id).bind(r.owner).bind(r.host_id).bind(number(r.port)).bind(r.box_id).bind(number(r.slot));
    run.bind(static_cast<int64_t>(r.state)).bind(r.reason).bind(r.since).bind(r.deadline).bind(r.created);
    run.bind(r.lease_renewed).bind(r.bus_address).bind(r.operation_id).bind(number(r.generation)).bind_blob(r.token);
    run.bind(r.ticket_expires).bind(number(r.host_generation)).bind_blob(r.host_token).bind(r.host_ticket_expires);
    run.bind(number(r.ending)).bind(number(r.force)).bind(number(r.failed)).bind(number(r.box_stop));
    run.bind(number(r.box_served)).bind(number(r.box_released)).bind(number(r.host_released));
    DXPU_RETURN_IF_ERROR(run.bind(version).finish());
  }
  return write_texts(c, "DELETE FROM attachment_paths WHERE attachment_id = ?",
                     "INSERT INTO attachment_paths (attachment_id, position, path) VALUES (?, ?, ?)", r.id, r.paths);
}

absl::Status write(Connection& c, const OperationRecord& r, int64_t version) {
  {
    DXPU_ASSIGN_OR_RETURN(
        Run run,
        c.prepare(
            "INSERT INTO operations (id, kind, owner, request_id, done, error_code, error_message, created, "
            "deadline, finished, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "done = excluded.done, error_code = excluded.error_code, error_message = excluded.error_message, "
            "deadline = excluded.deadline, finished = excluded.finished, version = excluded.version"));
    run.bind(r.id).bind(r.kind).bind(r.owner).bind(r.request_id).bind(number(r.done)).bind(int64_t{r.error_code});
    run.bind(r.error_message).bind(r.created).bind(r.deadline).bind(r.finished);
    DXPU_RETURN_IF_ERROR(run.bind(version).finish());
  }
  DXPU_RETURN_IF_ERROR(
      write_texts(c, "DELETE FROM operation_attachments WHERE operation_id = ?",
                  "INSERT INTO operation_attachments (operation_id, position, attachment_id) VALUES (?, ?, ?)", r.id,
                  r.attachment_ids));
  {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("DELETE FROM operation_steps WHERE operation_id = ?"));
    DXPU_RETURN_IF_ERROR(run.bind(r.id).finish());
  }
  for (size_t i = 0; i < r.steps.size(); ++i) {
    const StepRecord& s = r.steps[i];
    DXPU_ASSIGN_OR_RETURN(Run run,
                          c.prepare("INSERT INTO operation_steps (operation_id, position, name, state, detail, "
                                    "started, finished) VALUES (?, ?, ?, ?, ?, ?, ?)"));
    run.bind(r.id).bind(number(i)).bind(s.name).bind(static_cast<int64_t>(s.state)).bind(s.detail).bind(s.started);
    DXPU_RETURN_IF_ERROR(run.bind(s.finished).finish());
  }
  return absl::OkStatus();
}

absl::Status write(Connection& c, const EventRecord& r) {
  DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("INSERT INTO events (revision, time, type, subject, message, attachment_id) "
                                           "VALUES (?, ?, ?, ?, ?, ?)"));
  return run.bind(r.revision).bind(r.time).bind(r.type).bind(r.subject).bind(r.message).bind(r.attachment_id).finish();
}

absl::Status write(Connection& c, const RequestRecord& r) {
  DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("INSERT INTO requests (request_id, method, fingerprint, operation_id, time) "
                                           "VALUES (?, ?, ?, ?, ?)"));
  return run.bind(r.request_id).bind(r.method).bind_blob(r.fingerprint).bind(r.operation_id).bind(r.time).finish();
}

absl::StatusOr<std::vector<BoxRecord>> read_boxes(Connection& c) {
  std::vector<BoxRecord> out;
  {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("SELECT id, owner, slot_count, cordoned, software_version, boot_id, "
                                             "last_seen, version FROM boxes ORDER BY id"));
    while (true) {
      DXPU_ASSIGN_OR_RETURN(bool row, run.step());
      if (!row) break;
      BoxRecord r;
      r.id = run.text(0);
      r.owner = run.text(1);
      r.slot_count = static_cast<uint32_t>(run.integer(2));
      r.cordoned = run.integer(3) != 0;
      r.software_version = run.text(4);
      r.boot_id = run.text(5);
      r.last_seen = run.time(6);
      r.version = run.integer(7);
      out.push_back(std::move(r));
    }
  }
  for (BoxRecord& r : out) {
    DXPU_ASSIGN_OR_RETURN(r.paths,
                          read_texts(c, "SELECT path FROM box_paths WHERE box_id = ? ORDER BY position", r.id));
    DXPU_ASSIGN_OR_RETURN(Run run,
                          c.prepare("SELECT pci_address, vendor_id, device_id, name FROM box_gpus WHERE box_id = "
                                    "? ORDER BY position"));
    run.bind(r.id);
    while (true) {
      DXPU_ASSIGN_OR_RETURN(bool row, run.step());
      if (!row) break;
      r.physical_gpus.push_back(
          {run.text(0), static_cast<uint32_t>(run.integer(1)), static_cast<uint32_t>(run.integer(2)), run.text(3)});
    }
  }
  return out;
}

absl::StatusOr<std::vector<HostRecord>> read_hosts(Connection& c) {
  std::vector<HostRecord> out;
  DXPU_ASSIGN_OR_RETURN(Run run, c.prepare("SELECT id, owner, port_count, attach_point, software_version, boot_id, "
                                           "last_seen, version FROM hosts ORDER BY id"));
  while (true) {
    DXPU_ASSIGN_OR_RETURN(bool row, run.step());
    if (!row) return out;
    HostRecord r;
    r.id = run.text(0);
    r.owner = run.text(1);
    r.port_count = static_cast<uint32_t>(run.integer(2));
    r.attach_point = run.text(3);
    r.software_version = run.text(4);
    r.boot_id = run.text(5);
    r.last_seen = run.time(6);
    r.version = run.integer(7);
    out.push_back(std::move(r));
  }
}

absl::StatusOr<std::vector<FunctionRecord>> read_functions(Connection& c) {
  std::vector<FunctionRecord> out;
  DXPU_ASSIGN_OR_RETURN(
      Run run,
      c.prepare("SELECT id, owner, box_id, slot, model, memory_bytes, engine, vendor_id, device_id, serial, lifecycle, "
                "conditions, reason, since, deadline, attachment_id, generation, version FROM functions ORDER BY id"));
  while (true) {
    DXPU_ASSIGN_OR_RETURN(bool row, run.step());
    if (!row) return out;
    FunctionRecord r;
    r.id = run.text(0);
    r.owner = run.text(1);
    r.box_id = run.text(2);
    r.slot = static_cast<uint32_t>(run.integer(3));
    r.model = run.text(4);
    r.memory_bytes = static_cast<uint64_t>(run.integer(5));
    r.engine = run.text(6);
    r.vendor_id = static_cast<uint32_t>(run.integer(7));
    r.device_id = static_cast<uint32_t>(run.integer(8));
    r.serial = run.text(9);
    r.lifecycle = static_cast<Lifecycle>(run.integer(10));
    r.conditions = Conditions::from_bits(static_cast<uint32_t>(run.integer(11)));
    r.reason = run.text(12);
    r.since = run.time(13);
    r.deadline = run.time(14);
    r.attachment_id = run.text(15);
    r.generation = static_cast<uint64_t>(run.integer(16));
    r.version = run.integer(17);
    out.push_back(std::move(r));
  }
}

absl::StatusOr<std::vector<AttachmentRecord>> read_attachments(Connection& c, const AttachmentFilter& filter) {
  std::vector<AttachmentRecord> out;
  {
    DXPU_ASSIGN_OR_RETURN(
        Run run,
        c.prepare("SELECT id, owner, host_id, port, box_id, slot, state, reason, since, deadline, created, "
                  "lease_renewed, bus_address, operation_id, generation, token, ticket_expires, host_generation, "
                  "host_token, host_ticket_expires, ending, force, failed, box_stop, box_served, box_released, "
                  "host_released, version FROM attachments WHERE id > ?1 AND (?2 = '' OR id = ?2) AND (?3 = '' OR "
                  "host_id = ?3) AND (?4 = '' OR box_id = ?4) AND (?5 = 1 OR state NOT IN (9, 10)) ORDER BY id "
                  "LIMIT ?6"));
    run.bind(filter.after_id).bind(filter.id).bind(filter.host_id).bind(filter.box_id);
    run.bind(number(filter.include_ended)).bind(number(filter.limit));
    while (true) {
      DXPU_ASSIGN_OR_RETURN(bool row, run.step());
      if (!row) break;
      out.push_back(attachment_of(run));
    }
  }
  for (AttachmentRecord& r : out) {
    DXPU_ASSIGN_OR_RETURN(
        r.paths, read_texts(c, "SELECT path FROM attachment_paths WHERE attachment_id = ? ORDER BY position", r.id));
  }
  return out;
}

absl::StatusOr<std::vector<OperationRecord>> read_running_operations(Connection& c) {
  std::vector<OperationRecord> out;
  {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare(kSelectRunningOperations));
    while (true) {
      DXPU_ASSIGN_OR_RETURN(bool row, run.step());
      if (!row) break;
      out.push_back(operation_of(run));
    }
  }
  for (OperationRecord& r : out) DXPU_RETURN_IF_ERROR(read_operation_rest(c, r));
  return out;
}

absl::StatusOr<std::optional<OperationRecord>> read_operation(Connection& c, absl::string_view id) {
  std::optional<OperationRecord> out;
  {
    DXPU_ASSIGN_OR_RETURN(Run run, c.prepare(kSelectOperation));
    DXPU_ASSIGN_OR_RETURN(bool row, run.bind(id).step());
    if (!row) return out;
    out = operation_of(run);
  }
  DXPU_RETURN_IF_ERROR(read_operation_rest(c, *out));
  return out;
}

absl::StatusOr<std::vector<EventRecord>> read_events(Connection& c, int64_t since, absl::string_view attachment_id,
                                                     uint32_t limit) {
  std::vector<EventRecord> out;
  DXPU_ASSIGN_OR_RETURN(
      Run run,
      attachment_id.empty()
          ? c.prepare(
                "SELECT revision, time, type, subject, message, attachment_id FROM events WHERE revision > ? ORDER "
                "BY revision LIMIT ?")
          : c.prepare("SELECT revision, time, type, subject, message, attachment_id FROM events WHERE revision > ? AND "
                      "attachment_id = ? AND attachment_id <> '' ORDER BY revision LIMIT ?"));
  run.bind(since);
  if (!attachment_id.empty()) run.bind(attachment_id);
  run.bind(number(limit));
  while (true) {
    DXPU_ASSIGN_OR_RETURN(bool row, run.step());
    if (!row) return out;
    out.push_back({run.integer(0), run.time(1), run.text(2), run.text(3), run.text(4), run.text(5)});
  }
}

absl::StatusOr<std::optional<RequestRecord>> read_request(Connection& c, absl::string_view request_id) {
  DXPU_ASSIGN_OR_RETURN(
      Run run,
      c.prepare("SELECT request_id, method, fingerprint, operation_id, time FROM requests WHERE request_id = ?"));
  DXPU_ASSIGN_OR_RETURN(bool row, run.bind(request_id).step());
  if (!row) return std::optional<RequestRecord>();
  return RequestRecord{run.text(0), run.text(1), run.text(2), run.text(3), run.time(4)};
}

}  // namespace dxpu::poolmgr::sqlite
