// The pool in one SQLite file: WAL, synchronous=FULL, foreign keys, STRICT tables.
//
// One writer connection and one reader connection, each behind a lock of its own, so that a long list does not hold up
// a decision. A lock file beside the database keeps a second pool manager away from it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "poolmgr/store/store.h"

namespace dxpu::poolmgr {

struct SqliteOptions {
  std::string path;
  // Pages the file may grow to; 0: no limit but the disk.
  int64_t max_pages = 0;
};

// FAILED_PRECONDITION: another pool manager uses the file, it is newer than this program, it is not ours, or it can not
// be opened. DATA_LOSS: it is damaged. In each case the file is left as it was.
absl::StatusOr<std::unique_ptr<Store>> open_sqlite_store(const SqliteOptions& options);

}  // namespace dxpu::poolmgr
