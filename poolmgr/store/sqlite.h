// The little of SQLite's C interface that the store uses, with owners.
//
// Not thread-safe: a connection and its statements belong to one thread at a time.
// Errors: absl::Status with a code a caller can act on; the message names the file.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dxpu::poolmgr::sqlite {

class Connection;

// One run of a prepared statement; resets it when it goes. Bind in order, then step.
class Run {
 public:
  Run(Connection& connection, sqlite3_stmt* statement);
  ~Run();
  Run(Run&& other) noexcept;
  Run& operator=(Run&&) = delete;

  Run& bind(absl::string_view text);
  Run& bind_blob(absl::string_view bytes);
  Run& bind(int64_t value);
  Run& bind(absl::Time time);

  // true: there is a row. false: there is none (any more).
  absl::StatusOr<bool> step();
  // For statements without rows.
  absl::Status finish();

  int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  std::string text(int column) const;  // or the bytes of a blob
  absl::Time time(int column) const;

 private:
  Connection& connection_;
  sqlite3_stmt* statement_;
  int next_ = 1;
  int error_ = SQLITE_OK;
};

class Connection {
 public:
  enum class Mode { kReadWrite, kRead };
  static absl::StatusOr<std::unique_ptr<Connection>> open(const std::string& path, Mode mode);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // One or more statements without parameters.
  absl::Status execute(const char* sql);
  // `sql` must be a literal: its address is the key under which the prepared statement is kept.
  absl::StatusOr<Run> prepare(const char* sql);
  absl::StatusOr<int64_t> pragma(const char* sql);

  bool in_transaction() const { return sqlite3_get_autocommit(db_) == 0; }
  // The canonical error for SQLite's `code` ("doing": what was being done).
  absl::Status error(int code, absl::string_view doing) const;

 private:
  Connection(sqlite3* db, std::string path) : db_(db), path_(std::move(path)) {}

  sqlite3* db_;
  std::string path_;
  std::map<const char*, sqlite3_stmt*> statements_;
};

}  // namespace dxpu::poolmgr::sqlite
