#include "poolmgr/store/schema.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr::sqlite {
namespace {

// Never edit a step that has been released: add one. Times are microseconds since 1970; the extremes of the type mean
// never and no deadline.
constexpr const char* kSteps[] = {
    R"sql(
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('revision', 0), ('compacted', 0);

CREATE TABLE boxes (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  slot_count INTEGER NOT NULL,
  cordoned INTEGER NOT NULL CHECK (cordoned IN (0, 1)),
  software_version TEXT NOT NULL,
  boot_id TEXT NOT NULL,
  last_seen INTEGER NOT NULL,
  version INTEGER NOT NULL
) STRICT;
CREATE TABLE box_paths (
  box_id TEXT NOT NULL REFERENCES boxes (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  path TEXT NOT NULL,
  PRIMARY KEY (box_id, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE box_gpus (
  box_id TEXT NOT NULL REFERENCES boxes (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  pci_address TEXT NOT NULL,
  vendor_id INTEGER NOT NULL,
  device_id INTEGER NOT NULL,
  name TEXT NOT NULL,
  PRIMARY KEY (box_id, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE hosts (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  port_count INTEGER NOT NULL,
  attach_point TEXT NOT NULL,
  software_version TEXT NOT NULL,
  boot_id TEXT NOT NULL,
  last_seen INTEGER NOT NULL,
  version INTEGER NOT NULL
) STRICT;

CREATE TABLE functions (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  box_id TEXT NOT NULL REFERENCES boxes (id),
  slot INTEGER NOT NULL,
  model TEXT NOT NULL,
  memory_bytes INTEGER NOT NULL,
  engine TEXT NOT NULL,
  vendor_id INTEGER NOT NULL,
  device_id INTEGER NOT NULL,
  serial TEXT NOT NULL,
  lifecycle INTEGER NOT NULL CHECK (lifecycle BETWEEN 1 AND 10),
  conditions INTEGER NOT NULL,
  reason TEXT NOT NULL,
  since INTEGER NOT NULL,
  deadline INTEGER NOT NULL,
  attachment_id TEXT NOT NULL,
  generation INTEGER NOT NULL,
  version INTEGER NOT NULL,
  UNIQUE (box_id, slot),
  -- A function that nobody holds and one that is lent can not be the same.
  CHECK (lifecycle <> 3 OR attachment_id = '')
) STRICT;

CREATE TABLE attachments (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  host_id TEXT NOT NULL,
  port INTEGER NOT NULL,
  box_id TEXT NOT NULL,
  slot INTEGER NOT NULL,
  state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 11),
  reason TEXT NOT NULL,
  since INTEGER NOT NULL,
  deadline INTEGER NOT NULL,
  created INTEGER NOT NULL,
  lease_renewed INTEGER NOT NULL,
  bus_address TEXT NOT NULL,
  operation_id TEXT NOT NULL,
  generation INTEGER NOT NULL,
  token BLOB NOT NULL,
  ticket_expires INTEGER NOT NULL,
  host_generation INTEGER NOT NULL,
  host_token BLOB NOT NULL,
  host_ticket_expires INTEGER NOT NULL,
  ending INTEGER NOT NULL,
  force INTEGER NOT NULL,
  failed INTEGER NOT NULL,
  box_stop INTEGER NOT NULL,
  box_served INTEGER NOT NULL,
  box_released INTEGER NOT NULL,
  host_released INTEGER NOT NULL,
  version INTEGER NOT NULL,
  -- Over means that nothing is held.
  CHECK (state NOT IN (9, 10) OR (box_released = 1 AND host_released = 1))
) STRICT;
-- One holder per function and per port: the last line of defence behind the placer.
CREATE UNIQUE INDEX one_holder_of_function ON attachments (box_id, slot) WHERE box_released = 0;
CREATE UNIQUE INDEX one_holder_of_port ON attachments (host_id, port) WHERE host_released = 0;
CREATE INDEX attachments_live ON attachments (id) WHERE state NOT IN (9, 10);
CREATE INDEX attachments_over ON attachments (version) WHERE state IN (9, 10);
CREATE TABLE attachment_paths (
  attachment_id TEXT NOT NULL REFERENCES attachments (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  path TEXT NOT NULL,
  PRIMARY KEY (attachment_id, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE operations (
  id TEXT PRIMARY KEY,
  kind TEXT NOT NULL,
  owner TEXT NOT NULL,
  request_id TEXT NOT NULL,
  done INTEGER NOT NULL CHECK (done IN (0, 1)),
  error_code INTEGER NOT NULL,
  error_message TEXT NOT NULL,
  created INTEGER NOT NULL,
  deadline INTEGER NOT NULL,
  finished INTEGER NOT NULL,
  version INTEGER NOT NULL
) STRICT;
CREATE INDEX operations_running ON operations (id) WHERE done = 0;
CREATE INDEX operations_done ON operations (version) WHERE done = 1;
CREATE TABLE operation_attachments (
  operation_id TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  attachment_id TEXT NOT NULL,
  PRIMARY KEY (operation_id, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE operation_steps (
  operation_id TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  name TEXT NOT NULL,
  state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 5),
  detail TEXT NOT NULL,
  started INTEGER NOT NULL,
  finished INTEGER NOT NULL,
  PRIMARY KEY (operation_id, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE requests (
  request_id TEXT PRIMARY KEY,
  method TEXT NOT NULL,
  fingerprint BLOB NOT NULL,
  operation_id TEXT NOT NULL,
  time INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX requests_by_time ON requests (time);

CREATE TABLE events (
  revision INTEGER PRIMARY KEY,
  time INTEGER NOT NULL,
  type TEXT NOT NULL,
  subject TEXT NOT NULL,
  message TEXT NOT NULL,
  attachment_id TEXT NOT NULL
) STRICT;
CREATE INDEX events_of_attachment ON events (attachment_id, revision) WHERE attachment_id <> '';
)sql",
};

}  // namespace

int64_t newest_schema() { return static_cast<int64_t>(std::size(kSteps)); }

absl::Status check_ours(Connection& connection, const std::string& path) {
  DXPU_ASSIGN_OR_RETURN(int64_t application, connection.pragma("PRAGMA application_id"));
  DXPU_ASSIGN_OR_RETURN(int64_t version, connection.pragma("PRAGMA user_version"));
  DXPU_ASSIGN_OR_RETURN(int64_t tables, connection.pragma("SELECT count(*) FROM sqlite_schema"));
  if (application != kApplicationId && (tables != 0 || application != 0 || version != 0)) {
    return absl::FailedPreconditionError(absl::StrCat("database ", path, " belongs to another program (application id ",
                                                      application, "); name another file"));
  }
  if (version > newest_schema()) {
    return absl::FailedPreconditionError(absl::StrCat("database ", path, " has schema ", version,
                                                      ", this program knows up to ", newest_schema(),
                                                      "; it was left as it is: run a newer dxpu-poolmgr"));
  }
  return absl::OkStatus();
}

absl::Status migrate(Connection& connection) {
  DXPU_ASSIGN_OR_RETURN(int64_t version, connection.pragma("PRAGMA user_version"));
  for (int64_t step = version; step < newest_schema(); ++step) {
    const std::string sql = absl::StrCat("BEGIN IMMEDIATE;", kSteps[step], "PRAGMA application_id = ", kApplicationId,
                                         "; PRAGMA user_version = ", step + 1, "; COMMIT;");
    if (absl::Status status = connection.execute(sql.c_str()); !status.ok()) {
      if (connection.in_transaction()) connection.execute("ROLLBACK").IgnoreError();
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace dxpu::poolmgr::sqlite
