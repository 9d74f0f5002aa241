// dxpu attachment: who is joined to whom.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

struct ListOptions {
  std::string host;
  std::string box;
  bool all = false;
};

absl::Status list_attachments(const ListOptions& options, Invocation& invocation) {
  v1::ListAttachmentsRequest request;
  request.set_host_id(options.host);
  request.set_box_id(options.box);
  request.set_include_ended(options.all);
  DXPU_ASSIGN_OR_RETURN(v1::ListAttachmentsResponse list,
                        invocation.pool().all_pages(&PoolClient::list_attachments, request,
                                                    &v1::ListAttachmentsResponse::mutable_attachments));
  if (invocation.print_json(list)) return absl::OkStatus();
  Table table({"ATTACHMENT", "HOST", "PORT", "BOX", "SLOT", "STATE", "ADDRESS", "LEASE", "REASON"});
  for (const v1::Attachment& attachment : list.attachments()) {
    const std::string lease =
        attachment.has_lease_renewed()
            ? absl::StrCat(age_text(invocation.env.clock.now() - time_of(attachment.lease_renewed())), " ago")
            : "";
    table.add({attachment.id(), attachment.host_id(), absl::StrCat(attachment.port()), attachment.box_id(),
               absl::StrCat(attachment.slot()), name_of(attachment.state()), attachment.bus_address(), lease,
               attachment.reason()});
  }
  table.print(invocation.out());
  return absl::OkStatus();
}

absl::Status show_attachment(const std::string& id, Invocation& invocation) {
  v1::ListAttachmentsRequest request;
  request.set_id(id);
  request.set_include_ended(true);
  DXPU_ASSIGN_OR_RETURN(const v1::ListAttachmentsResponse list, invocation.pool().list_attachments(request));
  if (list.attachments().empty()) {
    return absl::NotFoundError(absl::StrCat("there is no attachment ", id, ": see dxpu attachment list --all"));
  }
  const v1::Attachment& attachment = list.attachments(0);
  if (invocation.print_json(attachment)) return absl::OkStatus();
  print_fields(invocation.out(), {{"attachment", attachment.id()},
                                  {"owner", attachment.owner()},
                                  {"host", absl::StrCat(attachment.host_id(), " port ", attachment.port())},
                                  {"function", absl::StrCat(attachment.box_id(), "/", attachment.slot())},
                                  {"address", attachment.bus_address()},
                                  {"paths", absl::StrJoin(attachment.paths(), ", ")},
                                  {"state", name_of(attachment.state())},
                                  {"reason", attachment.reason()},
                                  {"since", time_text(attachment.since())},
                                  {"deadline", time_text(attachment.deadline())},
                                  {"generation", absl::StrCat(attachment.generation())},
                                  {"lease renewed", time_text(attachment.lease_renewed())},
                                  {"created", time_text(attachment.created())},
                                  {"operation", attachment.operation_id()}});
  return absl::OkStatus();
}

}  // namespace

void add_attachment(CLI::App& app, Invocation& invocation) {
  CLI::App* group = app.add_subcommand("attachment", "Who is joined to whom")->require_subcommand(1);

  const auto options = std::make_shared<ListOptions>();
  CLI::App* list = group->add_subcommand("list", "Every attachment that holds something");
  list->add_option("--host", options->host, "Only those of this host")->type_name("HOST");
  list->add_option("--box", options->box, "Only those of this box")->type_name("BOX");
  list->add_flag("--all", options->all, "Those that have ended or failed, too");
  list->callback([&invocation, options] {
    invocation.action = [&invocation, options] { return list_attachments(*options, invocation); };
  });

  const auto id = std::make_shared<std::string>();
  CLI::App* show = group->add_subcommand("show", "One attachment in full");
  show->add_option("attachment", *id, "The attachment's id")->required();
  show->callback(
      [&invocation, id] { invocation.action = [&invocation, id] { return show_attachment(*id, invocation); }; });
}

}  // namespace dxpu::cli
