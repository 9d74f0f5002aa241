// Waiting for an operation, shared by attach, detach and operation wait.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/invocation.h"

namespace dxpu::cli {

// How long the commands wait when no --timeout says otherwise, and how much longer than that for the undo of what
// failed.
inline constexpr absl::Duration kDefaultWait = absl::Minutes(5);
inline constexpr absl::Duration kUndoTime = absl::Seconds(60);

// The operation once it is done. On a terminal each step is told on stderr as it changes. A pool manager that restarts
// in between is waited for. DEADLINE_EXCEEDED with how to go on waiting when it is not done after `budget`.
absl::StatusOr<v1::Operation> wait_for(Invocation& invocation, v1::Operation operation, absl::Duration budget);

// OK, or the error that the operation ended with, naming its failed step.
absl::Status outcome(const v1::Operation& operation);

// From its creation to its end.
absl::Duration time_taken(const v1::Operation& operation);

// The attachments as they are now, in the order of the ids.
absl::StatusOr<std::vector<v1::Attachment>> attachments_of(Invocation& invocation, const v1::Operation& operation);

// One row an attachment, with what a user needs next: id, host port, bus address, time taken.
void print_attachments(std::ostream& out, const std::vector<v1::Attachment>& attachments,
                       const v1::Operation& operation);

// A name for this request, so that a repeat of it is recognised by the pool manager.
std::string new_request_id();

google::protobuf::Duration to_proto(absl::Duration duration);

}  // namespace dxpu::cli
