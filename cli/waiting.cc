#include "cli/waiting.h"

#include <algorithm>
#include <ostream>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/format.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

// One question to the pool manager waits this long there: short where a person watches the steps.
constexpr absl::Duration kSliceWatched = absl::Milliseconds(500);
constexpr absl::Duration kSlice = absl::Seconds(20);
constexpr absl::Duration kRetryDelay = absl::Milliseconds(500);

// Tells each step once per state.
class Progress {
 public:
  Progress(std::ostream& err, bool shown) : err_(err), shown_(shown) {}

  void show(const v1::Operation& operation) {
    if (!shown_) return;
    told_.resize(static_cast<size_t>(operation.steps_size()), v1::STEP_STATE_PENDING);
    for (int i = 0; i < operation.steps_size(); ++i) {
      const v1::Step& step = operation.steps(i);
      auto& told = told_[static_cast<size_t>(i)];
      if (step.state() == told || step.state() == v1::STEP_STATE_UNSPECIFIED) continue;
      told = step.state();
      err_ << absl::StrFormat("  [%d/%d] %-12s %s", i + 1, operation.steps_size(), printable(step.name()),
                              name_of(step.state()));
      if (step.has_started() && step.has_finished()) {
        err_ << "  " << seconds_text(time_of(step.finished()) - time_of(step.started()));
      }
      if (!step.detail().empty()) err_ << "  " << printable(step.detail());
      err_ << std::endl;
    }
  }

 private:
  std::ostream& err_;
  const bool shown_;
  std::vector<v1::StepState> told_;
};

}  // namespace

absl::StatusOr<v1::Operation> wait_for(Invocation& invocation, v1::Operation operation, absl::Duration budget) {
  Environment& env = invocation.env;
  const absl::Duration end = env.clock.monotonic() + budget;
  Progress progress(env.err, env.err_is_terminal);
  progress.show(operation);
  bool told_unreachable = false;
  while (!operation.done()) {
    const absl::Duration left = end - env.clock.monotonic();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrFormat("operation %s is not done after %s; it goes on: dxpu operation wait %s", operation.id(),
                          absl::FormatDuration(budget), operation.id()));
    }
    v1::WaitOperationRequest request;
    request.set_id(operation.id());
    *request.mutable_timeout() = to_proto(std::min(left, env.err_is_terminal ? kSliceWatched : kSlice));
    absl::StatusOr<v1::Operation> answer = invocation.pool().wait_operation(request);
    if (answer.ok()) {
      operation = *std::move(answer);
      progress.show(operation);
    } else if (absl::IsUnavailable(answer.status()) && left > kRetryDelay) {
      // Its state is durable and the agents go on by themselves: a restart in between is no failure of the operation.
      if (!std::exchange(told_unreachable, true) && env.err_is_terminal) {
        env.err << "  the pool manager does not answer; still waiting" << std::endl;
      }
      absl::SleepFor(kRetryDelay);
    } else {
      return answer.status();
    }
  }
  return operation;
}

absl::Status outcome(const v1::Operation& operation) {
  if (!operation.done() || operation.error_code() == 0) return absl::OkStatus();
  std::string step;
  for (const v1::Step& candidate : operation.steps()) {
    if (candidate.state() == v1::STEP_STATE_FAILED) step = absl::StrCat(" at step ", candidate.name());
  }
  return absl::Status(static_cast<absl::StatusCode>(operation.error_code()),
                      absl::StrCat(operation.kind(), " failed", step, ": ", operation.error_message(), " (operation ",
                                   operation.id(), ")"));
}

absl::Duration time_taken(const v1::Operation& operation) {
  return time_of(operation.finished()) - time_of(operation.created());
}

absl::StatusOr<std::vector<v1::Attachment>> attachments_of(Invocation& invocation, const v1::Operation& operation) {
  std::vector<v1::Attachment> found;
  for (const std::string& id : operation.attachment_ids()) {
    v1::ListAttachmentsRequest request;
    request.set_id(id);
    request.set_include_ended(true);
    DXPU_ASSIGN_OR_RETURN(const v1::ListAttachmentsResponse list, invocation.pool().list_attachments(request));
    found.insert(found.end(), list.attachments().begin(), list.attachments().end());
  }
  return found;
}

void print_attachments(std::ostream& out, const std::vector<v1::Attachment>& attachments,
                       const v1::Operation& operation) {
  Table table({"ATTACHMENT", "HOST", "PORT", "FUNCTION", "ADDRESS", "STATE", "TIME"});
  for (const v1::Attachment& attachment : attachments) {
    table.add({attachment.id(), attachment.host_id(), absl::StrCat(attachment.port()),
               absl::StrCat(attachment.box_id(), "/", attachment.slot()), attachment.bus_address(),
               name_of(attachment.state()), operation.done() ? seconds_text(time_taken(operation)) : ""});
  }
  table.print(out);
}

std::string new_request_id() {
  std::random_device random;
  return absl::StrFormat("cli-%08x%08x%08x%08x", random(), random(), random(), random());
}

google::protobuf::Duration to_proto(absl::Duration duration) {
  google::protobuf::Duration result;
  result.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  result.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return result;
}

}  // namespace dxpu::cli
