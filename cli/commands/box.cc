// dxpu box: the machines that lend.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

absl::Status list_boxes(Invocation& invocation) {
  DXPU_ASSIGN_OR_RETURN(v1::ListBoxesResponse list,
                        invocation.pool().all_pages(&PoolClient::list_boxes, v1::ListBoxesRequest(),
                                                    &v1::ListBoxesResponse::mutable_boxes));
  if (invocation.print_json(list)) return absl::OkStatus();
  Table table({"BOX", "CONNECTED", "SEEN", "SLOTS", "GPUS", "CORDONED", "PATHS", "VERSION"});
  for (const v1::Box& box : list.boxes()) {
    table.add({box.id(), box.agent().connected() ? "yes" : "no",
               age_text(invocation.env.clock.now() - time_of(box.agent().last_seen())),
               absl::StrCat(box.spec().slot_count()), absl::StrCat(box.spec().physical_gpus_size()),
               box.cordoned() ? "yes" : "no", absl::StrJoin(box.spec().paths(), ","), box.agent().software_version()});
  }
  table.print(invocation.out());
  return absl::OkStatus();
}

absl::Status show_box(const std::string& id, Invocation& invocation) {
  v1::ListBoxesRequest request;
  request.set_id(id);
  DXPU_ASSIGN_OR_RETURN(const v1::ListBoxesResponse list, invocation.pool().list_boxes(request));
  if (list.boxes().empty()) {
    return absl::NotFoundError(absl::StrCat("there is no box ", id, " in the pool: see dxpu box list"));
  }
  const v1::Box& box = list.boxes(0);
  if (invocation.print_json(box)) return absl::OkStatus();
  print_fields(invocation.out(), {{"box", box.id()},
                                  {"owner", box.owner()},
                                  {"connected", box.agent().connected() ? "yes" : "no"},
                                  {"last seen", time_text(box.agent().last_seen())},
                                  {"version", box.agent().software_version()},
                                  {"boot id", box.agent().boot_id()},
                                  {"cordoned", box.cordoned() ? "yes" : "no"},
                                  {"slots", absl::StrCat(box.spec().slot_count())},
                                  {"paths", absl::StrJoin(box.spec().paths(), ", ")}});
  if (!box.spec().physical_gpus().empty()) {
    invocation.out() << '\n';
    Table table({"GPU", "PCI-ID", "NAME"});
    for (const v1::PhysicalGpu& gpu : box.spec().physical_gpus()) {
      table.add({gpu.pci_address(), absl::StrFormat("%04x:%04x", gpu.vendor_id(), gpu.device_id()), gpu.name()});
    }
    table.print(invocation.out());
  }
  return absl::OkStatus();
}

// TARGET is a box or one of its functions.
absl::Status set_cordon(const std::string& target, bool cordoned, Invocation& invocation) {
  v1::SetCordonRequest request;
  request.set_cordoned(cordoned);
  if (target.find('/') == std::string::npos) {
    request.set_box_id(target);
  } else {
    DXPU_RETURN_IF_ERROR(parse_function_name(target).status());
    request.set_function_id(target);
  }
  DXPU_ASSIGN_OR_RETURN(const v1::SetCordonResponse response, invocation.pool().set_cordon(request));
  if (invocation.print_json(response)) return absl::OkStatus();
  invocation.out() << target
                   << (cordoned ? " is cordoned: no new attachment lands on it\n" : " is no longer cordoned\n");
  return absl::OkStatus();
}

absl::Status remove_box(const std::string& id, Invocation& invocation) {
  v1::RemoveBoxRequest request;
  request.set_id(id);
  DXPU_ASSIGN_OR_RETURN(const v1::RemoveBoxResponse response, invocation.pool().remove_box(request));
  if (!invocation.print_json(response)) invocation.out() << "box " << id << " is out of the pool\n";
  return absl::OkStatus();
}

}  // namespace

void add_box(CLI::App& app, Invocation& invocation) {
  CLI::App* group = app.add_subcommand("box", "The boxes that lend functions")->require_subcommand(1);
  const auto id = std::make_shared<std::string>();

  group->add_subcommand("list", "Every box")->callback([&invocation] {
    invocation.action = [&invocation] { return list_boxes(invocation); };
  });
  CLI::App* show = group->add_subcommand("show", "One box and the physical GPUs that its PCI bus shows");
  show->add_option("box", *id, "The box's id")->required();
  show->callback([&invocation, id] { invocation.action = [&invocation, id] { return show_box(*id, invocation); }; });
  CLI::App* cordon = group->add_subcommand("cordon", "No new attachment lands on a box, or on one function of it");
  cordon->add_option("target", *id, "BOX or BOX/SLOT")->required();
  cordon->callback(
      [&invocation, id] { invocation.action = [&invocation, id] { return set_cordon(*id, true, invocation); }; });
  CLI::App* uncordon = group->add_subcommand("uncordon", "Lifts the mark again");
  uncordon->add_option("target", *id, "BOX or BOX/SLOT")->required();
  uncordon->callback(
      [&invocation, id] { invocation.action = [&invocation, id] { return set_cordon(*id, false, invocation); }; });
  CLI::App* remove = group->add_subcommand("remove", "Takes a box that lends nothing out of the pool");
  remove->add_option("box", *id, "The box's id")->required();
  remove->callback(
      [&invocation, id] { invocation.action = [&invocation, id] { return remove_box(*id, invocation); }; });
}

}  // namespace dxpu::cli
