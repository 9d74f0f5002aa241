// dxpu host: the machines that borrow.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

absl::Status list_hosts(Invocation& invocation) {
  DXPU_ASSIGN_OR_RETURN(v1::ListHostsResponse list,
                        invocation.pool().all_pages(&PoolClient::list_hosts, v1::ListHostsRequest(),
                                                    &v1::ListHostsResponse::mutable_hosts));
  if (invocation.print_json(list)) return absl::OkStatus();
  Table table({"HOST", "CONNECTED", "SEEN", "PORTS", "USED", "ATTACH-POINT", "VERSION"});
  for (const v1::Host& host : list.hosts()) {
    const auto used = std::count_if(host.ports().begin(), host.ports().end(),
                                    [](const v1::HostPort& port) { return !port.attachment_id().empty(); });
    table.add({host.id(), host.agent().connected() ? "yes" : "no",
               age_text(invocation.env.clock.now() - time_of(host.agent().last_seen())),
               absl::StrCat(host.spec().port_count()), absl::StrCat(used), host.spec().attach_point(),
               host.agent().software_version()});
  }
  table.print(invocation.out());
  return absl::OkStatus();
}

absl::Status show_host(const std::string& id, Invocation& invocation) {
  v1::ListHostsRequest request;
  request.set_id(id);
  DXPU_ASSIGN_OR_RETURN(const v1::ListHostsResponse list, invocation.pool().list_hosts(request));
  if (list.hosts().empty()) {
    return absl::NotFoundError(absl::StrCat("there is no host ", id, " in the pool: see dxpu host list"));
  }
  const v1::Host& host = list.hosts(0);
  if (invocation.print_json(host)) return absl::OkStatus();
  print_fields(invocation.out(), {{"host", host.id()},
                                  {"owner", host.owner()},
                                  {"connected", host.agent().connected() ? "yes" : "no"},
                                  {"last seen", time_text(host.agent().last_seen())},
                                  {"version", host.agent().software_version()},
                                  {"boot id", host.agent().boot_id()},
                                  {"attach point", host.spec().attach_point()}});
  invocation.out() << '\n';
  Table table({"PORT", "ATTACHMENT", "PHASE", "ADDRESS", "HOLDER"});
  for (const v1::HostPort& port : host.ports()) {
    table.add({absl::StrCat(port.port()), port.attachment_id(), port.phase(), port.bus_address(), port.holder()});
  }
  table.print(invocation.out());
  return absl::OkStatus();
}

absl::Status remove_host(const std::string& id, Invocation& invocation) {
  v1::RemoveHostRequest request;
  request.set_id(id);
  DXPU_ASSIGN_OR_RETURN(const v1::RemoveHostResponse response, invocation.pool().remove_host(request));
  if (!invocation.print_json(response)) invocation.out() << "host " << id << " is out of the pool\n";
  return absl::OkStatus();
}

}  // namespace

void add_host(CLI::App& app, Invocation& invocation) {
  CLI::App* group = app.add_subcommand("host", "The hosts that borrow functions")->require_subcommand(1);
  const auto id = std::make_shared<std::string>();

  group->add_subcommand("list", "Every host")->callback([&invocation] {
    invocation.action = [&invocation] { return list_hosts(invocation); };
  });
  CLI::App* show = group->add_subcommand("show", "One host and its ports: what is plugged in, who has it open");
  show->add_option("host", *id, "The host's id")->required();
  show->callback([&invocation, id] { invocation.action = [&invocation, id] { return show_host(*id, invocation); }; });
  CLI::App* remove = group->add_subcommand("remove", "Takes a host that holds nothing out of the pool");
  remove->add_option("host", *id, "The host's id")->required();
  remove->callback(
      [&invocation, id] { invocation.action = [&invocation, id] { return remove_host(*id, invocation); }; });
}

}  // namespace dxpu::cli
