// dxpu operation: attach and detach as they go on in the pool manager.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "cli/waiting.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

void print_operation(const v1::Operation& operation, Invocation& invocation) {
  if (invocation.print_json(operation)) return;
  std::string state = "running";
  if (operation.done()) state = operation.error_code() == 0 ? "done" : "failed";
  print_fields(invocation.out(), {{"operation", operation.id()},
                                  {"kind", operation.kind()},
                                  {"owner", operation.owner()},
                                  {"attachments", absl::StrJoin(operation.attachment_ids(), ", ")},
                                  {"state", state},
                                  {"error", operation.error_message()},
                                  {"created", time_text(operation.created())},
                                  {"time", operation.done() ? seconds_text(time_taken(operation)) : ""}});
  invocation.out() << '\n';
  Table table({"STEP", "STATE", "TIME", "DETAIL"});
  for (const v1::Step& step : operation.steps()) {
    table.add({step.name(), name_of(step.state()),
               step.has_started() && step.has_finished()
                   ? seconds_text(time_of(step.finished()) - time_of(step.started()))
                   : "",
               step.detail()});
  }
  table.print(invocation.out());
}

absl::Status show_operation(const std::string& id, Invocation& invocation) {
  v1::GetOperationRequest request;
  request.set_id(id);
  DXPU_ASSIGN_OR_RETURN(const v1::Operation operation, invocation.pool().get_operation(request));
  print_operation(operation, invocation);
  return absl::OkStatus();
}

// Prints the operation either way; fails as it failed.
absl::Status wait_operation(const std::string& id, absl::Duration timeout, Invocation& invocation) {
  v1::GetOperationRequest request;
  request.set_id(id);
  DXPU_ASSIGN_OR_RETURN(v1::Operation operation, invocation.pool().get_operation(request));
  DXPU_ASSIGN_OR_RETURN(operation, wait_for(invocation, std::move(operation), timeout));
  print_operation(operation, invocation);
  return outcome(operation);
}

}  // namespace

void add_operation(CLI::App& app, Invocation& invocation) {
  CLI::App* group = app.add_subcommand("operation", "Attaching and detaching as it goes on")->require_subcommand(1);
  const auto id = std::make_shared<std::string>();
  CLI::App* show = group->add_subcommand("show", "One operation and its steps");
  show->add_option("operation", *id, "The operation's id")->required();
  show->callback(
      [&invocation, id] { invocation.action = [&invocation, id] { return show_operation(*id, invocation); }; });
  const auto timeout = std::make_shared<absl::Duration>(kDefaultWait);
  CLI::App* wait = group->add_subcommand("wait", "Waits until it is done, shows it, fails as it failed");
  wait->add_option("operation", *id, "The operation's id")->required();
  add_duration(*wait, "--timeout", timeout.get(), "How long to wait (default 5m)");
  wait->callback([&invocation, id, timeout] {
    invocation.action = [&invocation, id, timeout] { return wait_operation(*id, *timeout, invocation); };
  });
}

}  // namespace dxpu::cli
