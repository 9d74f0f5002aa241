// Records to rows and back. All of the pool's SQL that is about records is here.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "poolmgr/core/types.h"
#include "poolmgr/store/sqlite.h"
#include "poolmgr/store/store.h"

namespace dxpu::poolmgr::sqlite {

// `version` is written in place of the record's own.
absl::Status write(Connection& c, const BoxRecord& r, int64_t version);
absl::Status write(Connection& c, const HostRecord& r, int64_t version);
absl::Status write(Connection& c, const FunctionRecord& r, int64_t version);
absl::Status write(Connection& c, const AttachmentRecord& r, int64_t version);
absl::Status write(Connection& c, const OperationRecord& r, int64_t version);
absl::Status write(Connection& c, const EventRecord& r);
absl::Status write(Connection& c, const RequestRecord& r);

absl::StatusOr<std::vector<BoxRecord>> read_boxes(Connection& c);
absl::StatusOr<std::vector<HostRecord>> read_hosts(Connection& c);
absl::StatusOr<std::vector<FunctionRecord>> read_functions(Connection& c);
absl::StatusOr<std::vector<AttachmentRecord>> read_attachments(Connection& c, const AttachmentFilter& filter);
absl::StatusOr<std::vector<OperationRecord>> read_running_operations(Connection& c);
absl::StatusOr<std::optional<OperationRecord>> read_operation(Connection& c, absl::string_view id);
absl::StatusOr<std::vector<EventRecord>> read_events(Connection& c, int64_t since, absl::string_view attachment_id,
                                                     uint32_t limit);
absl::StatusOr<std::optional<RequestRecord>> read_request(Connection& c, absl::string_view request_id);

}  // namespace dxpu::poolmgr::sqlite
