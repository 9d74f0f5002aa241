// The one place that says which state may follow which, for functions and for attachments.
//
// Everything that changes a lifecycle or an attachment state calls move_to(); nothing else assigns those fields. A step
// that the table does not allow is INTERNAL: a fault of the caller's logic, never of an agent or an operator.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "poolmgr/core/types.h"

namespace dxpu::poolmgr {

// A state never follows itself.
bool may_follow(Lifecycle from, Lifecycle to);
bool may_follow(AttachmentState from, AttachmentState to);

// Sets state, reason, since, and clears the deadline. Changes nothing when it returns an error.
absl::Status move_to(FunctionRecord& function, Lifecycle to, absl::Time now, std::string reason);
absl::Status move_to(AttachmentRecord& attachment, AttachmentState to, absl::Time now, std::string reason);

}  // namespace dxpu::poolmgr
