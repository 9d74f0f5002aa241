// The database's schema as numbered steps, forward only.
#pragma once

#include "absl/status/status.h"
#include "poolmgr/store/sqlite.h"

namespace dxpu::poolmgr::sqlite {

// "dxpu" in ASCII, in the file's header: tells our databases from others.
inline constexpr int64_t kApplicationId = 0x64787075;

// The number of steps this program knows.
int64_t newest_schema();

// FAILED_PRECONDITION when the file is newer than this program or is somebody else's database. Changes nothing.
absl::Status check_ours(Connection& connection, const std::string& path);

// Brings the database up to newest_schema(), each step in a transaction of its own.
absl::Status migrate(Connection& connection);

}  // namespace dxpu::poolmgr::sqlite
