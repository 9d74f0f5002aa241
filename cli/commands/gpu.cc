// dxpu gpu: the functions that boxes lend.
#include <CLI/CLI.hpp>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

std::string conditions_text(const v1::FunctionStatus& status) {
  std::string text;
  for (const int condition : status.conditions()) {
    absl::StrAppend(&text, text.empty() ? "" : ",", name_of(static_cast<v1::Condition>(condition)));
  }
  return text;
}

struct ListOptions {
  std::string box;
  std::string model;
  std::string state;
};

absl::Status list_gpus(const ListOptions& options, Invocation& invocation) {
  v1::ListFunctionsRequest request;
  request.set_box_id(options.box);
  request.set_model(options.model);
  if (!options.state.empty()) {
    v1::Lifecycle lifecycle = v1::LIFECYCLE_UNSPECIFIED;
    if (!v1::Lifecycle_Parse(absl::StrCat("LIFECYCLE_", absl::AsciiStrToUpper(options.state)), &lifecycle)) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no state '", options.state, "': the states are those that gpu list shows, like free"));
    }
    request.set_lifecycle(lifecycle);
  }
  DXPU_ASSIGN_OR_RETURN(
      v1::ListFunctionsResponse list,
      invocation.pool().all_pages(&PoolClient::list_functions, request, &v1::ListFunctionsResponse::mutable_functions));
  if (invocation.print_json(list)) return absl::OkStatus();
  Table table({"BOX", "SLOT", "MODEL", "MEMORY", "ENGINE", "STATE", "CONDITIONS", "ATTACHMENT"});
  for (const v1::Function& function : list.functions()) {
    table.add({function.spec().box_id(), absl::StrCat(function.spec().slot()), function.spec().model(),
               size_text(function.spec().memory_bytes()), function.spec().engine(),
               name_of(function.status().lifecycle()), conditions_text(function.status()),
               function.status().attachment_id()});
  }
  table.print(invocation.out());
  return absl::OkStatus();
}

absl::Status show_gpu(const std::string& id, Invocation& invocation) {
  DXPU_ASSIGN_OR_RETURN(const FunctionName name, parse_function_name(id));
  v1::ListFunctionsRequest request;
  request.set_box_id(name.box);
  DXPU_ASSIGN_OR_RETURN(
      const v1::ListFunctionsResponse list,
      invocation.pool().all_pages(&PoolClient::list_functions, request, &v1::ListFunctionsResponse::mutable_functions));
  for (const v1::Function& function : list.functions()) {
    if (function.spec().slot() != name.slot) continue;
    if (invocation.print_json(function)) return absl::OkStatus();
    const v1::FunctionSpec& spec = function.spec();
    const v1::FunctionStatus& status = function.status();
    print_fields(invocation.out(), {{"function", function.id()},
                                    {"owner", function.owner()},
                                    {"model", spec.model()},
                                    {"memory", size_text(spec.memory_bytes())},
                                    {"engine", spec.engine()},
                                    {"pci id", absl::StrFormat("%04x:%04x", spec.vendor_id(), spec.device_id())},
                                    {"serial", spec.serial()},
                                    {"state", name_of(status.lifecycle())},
                                    {"reason", status.reason()},
                                    {"since", time_text(status.since())},
                                    {"deadline", time_text(status.deadline())},
                                    {"conditions", conditions_text(status)},
                                    {"attachment", status.attachment_id()},
                                    {"generation", absl::StrCat(status.generation())}});
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("there is no function ", id, " in the pool: see dxpu gpu list"));
}

}  // namespace

void add_gpu(CLI::App& app, Invocation& invocation) {
  CLI::App* group = app.add_subcommand("gpu", "The GPU functions that boxes lend")->require_subcommand(1);

  const auto options = std::make_shared<ListOptions>();
  CLI::App* list = group->add_subcommand("list", "Every function: where it is, what it is, who has it");
  list->add_option("--box", options->box, "Only those of this box")->type_name("BOX");
  list->add_option("--model", options->model, "Only this model")->type_name("MODEL");
  list->add_option("--state", options->state, "Only those in this state, like free")->type_name("STATE");
  list->callback([&invocation, options] {
    invocation.action = [&invocation, options] { return list_gpus(*options, invocation); };
  });

  const auto id = std::make_shared<std::string>();
  CLI::App* show = group->add_subcommand("show", "One function in full");
  show->add_option("function", *id, "BOX/SLOT")->required();
  show->callback([&invocation, id] { invocation.action = [&invocation, id] { return show_gpu(*id, invocation); }; });
}

}  // namespace dxpu::cli
