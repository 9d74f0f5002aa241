#include "poolmgr/store/sqlite.h"

#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace dxpu::poolmgr::sqlite {
namespace {

constexpr int kBusyMilliseconds = 2000;

int64_t to_integer(absl::Time time) {
  if (time == absl::InfinitePast()) return std::numeric_limits<int64_t>::min();
  if (time == absl::InfiniteFuture()) return std::numeric_limits<int64_t>::max();
  return absl::ToUnixMicros(time);
}

}  // namespace

Run::Run(Connection& connection, sqlite3_stmt* statement) : connection_(connection), statement_(statement) {}

Run::Run(Run&& other) noexcept
    : connection_(other.connection_), statement_(other.statement_), next_(other.next_), error_(other.error_) {
  other.statement_ = nullptr;
}

Run::~Run() {
  if (statement_ == nullptr) return;
  sqlite3_reset(statement_);  // repeats the error of the last step, which step() has already reported
  sqlite3_clear_bindings(statement_);
}

Run& Run::bind(absl::string_view text) {
  int rc = sqlite3_bind_text64(statement_, next_++, text.data() != nullptr ? text.data() : "", text.size(),
                               SQLITE_TRANSIENT, SQLITE_UTF8);
  if (error_ == SQLITE_OK) error_ = rc;
  return *this;
}

Run& Run::bind_blob(absl::string_view bytes) {
  int rc = sqlite3_bind_blob64(statement_, next_++, bytes.data() != nullptr ? bytes.data() : "", bytes.size(),
                               SQLITE_TRANSIENT);
  if (error_ == SQLITE_OK) error_ = rc;
  return *this;
}

Run& Run::bind(int64_t value) {
  int rc = sqlite3_bind_int64(statement_, next_++, value);
  if (error_ == SQLITE_OK) error_ = rc;
  return *this;
}

Run& Run::bind(absl::Time time) { return bind(to_integer(time)); }

absl::StatusOr<bool> Run::step() {
  if (error_ != SQLITE_OK) return connection_.error(error_, "binding a value");
  int rc = sqlite3_step(statement_);
  if (rc == SQLITE_ROW) return true;
  if (rc == SQLITE_DONE) return false;
  return connection_.error(rc, "running a statement");
}

absl::Status Run::finish() {
  absl::StatusOr<bool> row = step();
  return row.ok() ? absl::OkStatus() : row.status();
}

std::string Run::text(int column) const {
  const void* bytes = sqlite3_column_blob(statement_, column);
  const int size = sqlite3_column_bytes(statement_, column);
  return bytes == nullptr ? std::string() : std::string(static_cast<const char*>(bytes), static_cast<size_t>(size));
}

absl::Time Run::time(int column) const {
  const int64_t micros = integer(column);
  if (micros == std::numeric_limits<int64_t>::min()) return absl::InfinitePast();
  if (micros == std::numeric_limits<int64_t>::max()) return absl::InfiniteFuture();
  return absl::FromUnixMicros(micros);
}

absl::StatusOr<std::unique_ptr<Connection>> Connection::open(const std::string& path, Mode mode) {
  sqlite3* db = nullptr;
  const int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE |
                    (mode == Mode::kRead ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE);
  const int rc = sqlite3_open_v2(path.c_str(), &db, flags, nullptr);
  if (db == nullptr) return absl::ResourceExhaustedError("no memory to open a database");
  std::unique_ptr<Connection> connection(new Connection(db, path));
  if (rc != SQLITE_OK) return connection->error(rc, "opening");
  sqlite3_busy_timeout(db, kBusyMilliseconds);
  return connection;
}

Connection::~Connection() {
  for (auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(db_);
}

absl::Status Connection::execute(const char* sql) {
  int rc = sqlite3_exec(db_, sql, nullptr, nullptr, nullptr);
  return rc == SQLITE_OK ? absl::OkStatus() : error(rc, "executing");
}

absl::StatusOr<Run> Connection::prepare(const char* sql) {
  sqlite3_stmt*& statement = statements_[sql];
  if (statement == nullptr) {
    int rc = sqlite3_prepare_v3(db_, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
    if (rc != SQLITE_OK) return error(rc, "preparing a statement");
  }
  return Run(*this, statement);
}

absl::StatusOr<int64_t> Connection::pragma(const char* sql) {
  sqlite3_stmt* statement = nullptr;
  int rc = sqlite3_prepare_v2(db_, sql, -1, &statement, nullptr);
  if (rc != SQLITE_OK) return error(rc, sql);
  rc = sqlite3_step(statement);
  const int64_t value = rc == SQLITE_ROW ? sqlite3_column_int64(statement, 0) : 0;
  sqlite3_finalize(statement);
  if (rc != SQLITE_ROW && rc != SQLITE_DONE) return error(rc, sql);
  return value;
}

absl::Status Connection::error(int code, absl::string_view doing) const {
  const std::string what = absl::StrCat("database ", path_, ": ", doing, ": ", sqlite3_errmsg(db_));
  switch (code & 0xff) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(absl::StrCat(
          "database ", path_,
          ": the disk is full; nothing was changed. Free space on its file system, then repeat the request"));
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
      return absl::DataLossError(
          absl::StrCat(what,
                       ". The file is damaged or is no database: restore it from a backup, or move it away to start "
                       "with an empty pool "
                       "(boxes and hosts register again; what they hold is taken apart after the orphan grace)"));
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::UnavailableError(absl::StrCat(what, ". Another program holds it: close that program"));
    case SQLITE_CANTOPEN:
      return absl::FailedPreconditionError(absl::StrCat(
          what, ". Its directory must exist and be writable (errno: ", std::strerror(sqlite3_system_errno(db_)), ")"));
    case SQLITE_READONLY:
    case SQLITE_PERM:
      return absl::FailedPreconditionError(absl::StrCat(what, ". It must be writable for the pool manager's user"));
    case SQLITE_NOMEM:
      return absl::ResourceExhaustedError(what);
    case SQLITE_IOERR:
      return absl::UnavailableError(absl::StrCat(what, " (", std::strerror(sqlite3_system_errno(db_)), ")"));
    default:
      return absl::InternalError(absl::StrCat(what, " (SQLite code ", code, ")"));
  }
}

}  // namespace dxpu::poolmgr::sqlite
