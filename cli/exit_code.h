// The exit codes of dxpu, one per kind of outcome; docs/operations.md lists them and scripts rely on them.
#pragma once

#include "absl/status/status.h"

namespace dxpu::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitInternal = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;
inline constexpr int kExitRefused = 4;  // no capacity, or a precondition does not hold
inline constexpr int kExitConflict = 5;
inline constexpr int kExitDeadline = 6;
inline constexpr int kExitUnavailable = 7;
inline constexpr int kExitPermission = 8;

// The only place where a canonical status code becomes an exit code.
int exit_code(absl::StatusCode code);

}  // namespace dxpu::cli
