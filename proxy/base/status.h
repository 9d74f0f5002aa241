// Status plumbing: early return, errno.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#define DXPU_RETURN_IF_ERROR(expr)                                                   \
  do {                                                                               \
    if (absl::Status dxpu_status_ = (expr); !dxpu_status_.ok()) return dxpu_status_; \
  } while (false)

#define DXPU_CONCAT_INNER_(a, b) a##b
#define DXPU_CONCAT_(a, b) DXPU_CONCAT_INNER_(a, b)
#define DXPU_ASSIGN_OR_RETURN(lhs, expr) DXPU_ASSIGN_OR_RETURN_IMPL_(DXPU_CONCAT_(dxpu_or_, __LINE__), lhs, expr)
#define DXPU_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!tmp.ok()) return std::move(tmp).status();    \
  lhs = *std::move(tmp)

namespace dxpu::base {

// "<what>: <strerror>" with the canonical code of `error`.
inline absl::Status errno_status(const std::string& what, int error = errno) {
  return absl::ErrnoToStatus(error, what);
}

}  // namespace dxpu::base
