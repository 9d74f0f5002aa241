// dxpu detach: takes an attachment apart.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "cli/waiting.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

struct DetachOptions {
  std::string attachment;
  bool force = false;
  bool wait = false;
  absl::Duration timeout = absl::ZeroDuration();
  std::string request_id;
};

absl::Status detach(const DetachOptions& options, Invocation& invocation) {
  v1::DetachRequest request;
  request.set_request_id(options.request_id.empty() ? new_request_id() : options.request_id);
  request.set_attachment_id(options.attachment);
  request.set_force(options.force);
  if (options.timeout > absl::ZeroDuration()) *request.mutable_timeout() = to_proto(options.timeout);
  DXPU_ASSIGN_OR_RETURN(v1::DetachResponse response, invocation.pool().detach(request));
  if (options.wait) {
    const absl::Duration budget = (options.timeout > absl::ZeroDuration() ? options.timeout : kDefaultWait) + kUndoTime;
    DXPU_ASSIGN_OR_RETURN(*response.mutable_operation(), wait_for(invocation, response.operation(), budget));
    DXPU_RETURN_IF_ERROR(outcome(response.operation()));
  }
  if (invocation.print_json(response)) return absl::OkStatus();
  DXPU_ASSIGN_OR_RETURN(const std::vector<v1::Attachment> attachments,
                        attachments_of(invocation, response.operation()));
  print_attachments(invocation.out(), attachments, response.operation());
  if (!response.operation().done()) {
    invocation.out() << "operation " << printable(response.operation().id()) << " goes on: dxpu operation wait "
                     << printable(response.operation().id()) << '\n';
  }
  return outcome(response.operation());
}

}  // namespace

void add_detach(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      app.add_subcommand("detach", "Takes an attachment apart; its function is scrubbed before it is free");
  const auto options = std::make_shared<DetachOptions>();
  command->add_option("attachment", options->attachment, "The attachment's id")->required();
  command->add_flag("--force", options->force, "Do not wait for users: to them it is a surprise removal");
  command->add_flag("--wait", options->wait, "Return when the function is free again, or it has failed");
  add_duration(*command, "--timeout", &options->timeout,
               "Give up on a user that does not let go after this long, like 60s");
  command->add_option("--request-id", options->request_id, "A repeat with the same id returns the first answer")
      ->type_name("ID");
  command->callback(
      [&invocation, options] { invocation.action = [&invocation, options] { return detach(*options, invocation); }; });
}

}  // namespace dxpu::cli
