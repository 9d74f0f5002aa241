// dxpu table: the two mapping tables as the agents last reported them.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

struct TableOptions {
  std::string host;
  std::string box;
  CLI::Option* host_option = nullptr;
  CLI::Option* box_option = nullptr;
};

absl::Status show_tables(const TableOptions& options, Invocation& invocation) {
  const bool only_hosts = options.host_option->count() > 0 && options.box_option->count() == 0;
  const bool only_boxes = options.box_option->count() > 0 && options.host_option->count() == 0;
  v1::GetTablesRequest request;
  request.set_host_id(options.host);
  request.set_box_id(options.box);
  DXPU_ASSIGN_OR_RETURN(v1::GetTablesResponse tables, invocation.pool().get_tables(request));
  if (only_hosts) tables.clear_box_rows();
  if (only_boxes) tables.clear_host_rows();
  if (invocation.print_json(tables)) return absl::OkStatus();
  if (!only_boxes) {
    Table table({"HOST", "PORT", "ADDRESS", "BOX", "SLOT", "PATHS", "ATTACHMENT", "GENERATION", "PHASE"});
    for (const v1::HostTableRow& row : tables.host_rows()) {
      const bool used = !row.box_id().empty();
      table.add({row.host_id(), absl::StrCat(row.port()), row.bus_address(), row.box_id(),
                 used ? absl::StrCat(row.slot()) : "", absl::StrJoin(row.paths(), ","), row.attachment_id(),
                 used ? absl::StrCat(row.generation()) : "", row.phase()});
    }
    table.print(invocation.out());
  }
  if (!only_boxes && !only_hosts) invocation.out() << '\n';
  if (!only_hosts) {
    Table table({"BOX", "SLOT", "HOST", "PATHS", "ATTACHMENT", "GENERATION", "EPOCH", "WORKER", "PHASE"});
    for (const v1::BoxTableRow& row : tables.box_rows()) {
      const bool used = !row.host_id().empty();
      table.add({row.box_id(), absl::StrCat(row.slot()), row.host_id(), absl::StrJoin(row.paths(), ","),
                 row.attachment_id(), used ? absl::StrCat(row.generation()) : "", used ? absl::StrCat(row.epoch()) : "",
                 row.worker_pid() != 0 ? absl::StrCat(row.worker_pid()) : "", row.phase()});
    }
    table.print(invocation.out());
  }
  return absl::OkStatus();
}

}  // namespace

void add_table(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      app.add_subcommand("table", "The mapping tables of hosts (port to box, slot) and boxes (slot to host)");
  const auto options = std::make_shared<TableOptions>();
  options->host_option =
      command->add_option("--host", options->host, "Only the hosts' table, or the one of this host")->expected(0, 1);
  options->host_option->type_name("[HOST]");
  options->box_option =
      command->add_option("--box", options->box, "Only the boxes' table, or the one of this box")->expected(0, 1);
  options->box_option->type_name("[BOX]");
  command->callback([&invocation, options] {
    invocation.action = [&invocation, options] { return show_tables(*options, invocation); };
  });
}

}  // namespace dxpu::cli
