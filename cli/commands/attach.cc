// dxpu attach: joins free functions to ports of a host.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "cli/waiting.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

struct AttachOptions {
  std::string host;
  uint32_t count = 1;
  std::string model;
  uint64_t memory = 0;
  bool same_box = false;
  std::string gpu;
  std::string owner;
  bool wait = false;
  absl::Duration timeout = absl::ZeroDuration();
  std::string request_id;
};

absl::Status attach(const AttachOptions& options, Invocation& invocation) {
  v1::AttachRequest request;
  request.set_request_id(options.request_id.empty() ? new_request_id() : options.request_id);
  request.set_host_id(options.host);
  request.set_count(options.count);
  request.set_model(options.model);
  request.set_min_memory_bytes(options.memory);
  request.set_same_box(options.same_box);
  request.set_owner(options.owner);
  if (!options.gpu.empty()) {
    DXPU_RETURN_IF_ERROR(parse_function_name(options.gpu).status());
    if (options.count != 1) return absl::InvalidArgumentError("--gpu names exactly one function: leave --count out");
    request.set_function_id(options.gpu);
  }
  if (options.timeout > absl::ZeroDuration()) *request.mutable_timeout() = to_proto(options.timeout);

  absl::StatusOr<v1::AttachResponse> response = invocation.pool().attach(request);
  if (!response.ok()) {
    const absl::Status& status = response.status();
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
    return absl::Status(
        status.code(),
        absl::StrCat(status.message(), ". Should the request have arrived all the same, a repeat with --request-id ",
                     request.request_id(), " returns its answer instead of attaching twice"));
  }
  if (options.wait) {
    const absl::Duration budget = (options.timeout > absl::ZeroDuration() ? options.timeout : kDefaultWait) + kUndoTime;
    DXPU_ASSIGN_OR_RETURN(*response->mutable_operation(), wait_for(invocation, response->operation(), budget));
    DXPU_RETURN_IF_ERROR(outcome(response->operation()));
    DXPU_ASSIGN_OR_RETURN(const std::vector<v1::Attachment> attachments,
                          attachments_of(invocation, response->operation()));
    response->mutable_attachments()->Assign(attachments.begin(), attachments.end());
  }
  if (invocation.print_json(*response)) return absl::OkStatus();
  print_attachments(invocation.out(), {response->attachments().begin(), response->attachments().end()},
                    response->operation());
  if (!response->operation().done()) {
    invocation.out() << "operation " << printable(response->operation().id()) << " goes on: dxpu operation wait "
                     << printable(response->operation().id()) << '\n';
  }
  // A repeat of a request whose operation failed gets that answer again.
  return outcome(response->operation());
}

}  // namespace

void add_attach(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("attach", "Joins free functions to ports of a host, all or none");
  const auto options = std::make_shared<AttachOptions>();
  command->add_option("--host", options->host, "The host that borrows")->required()->type_name("HOST");
  command->add_option("--count", options->count, "How many functions")
      ->check(CLI::Range(1u, 1024u))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--model", options->model, "Only this model")->type_name("MODEL");
  add_size(*command, "--memory", &options->memory, "At least this much device memory each, like 200MiB");
  command->add_flag("--same-box", options->same_box, "All from one box");
  command->add_option("--gpu", options->gpu, "Exactly this function")->type_name("BOX/SLOT");
  command->add_option("--owner", options->owner, "Whom it is for")->type_name("NAME");
  command->add_flag("--wait", options->wait, "Return when the host sees the functions, or it has failed");
  add_duration(*command, "--timeout", &options->timeout, "Give up and undo after this long, like 60s");
  command->add_option("--request-id", options->request_id, "A repeat with the same id returns the first answer")
      ->type_name("ID");
  command->callback(
      [&invocation, options] { invocation.action = [&invocation, options] { return attach(*options, invocation); }; });
}

}  // namespace dxpu::cli
