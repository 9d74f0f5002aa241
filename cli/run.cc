#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cli/exit_code.h"
#include "cli/format.h"
#include "cli/invocation.h"

namespace dxpu::cli {
namespace {

// A usage error must be reported in the chosen format although parsing failed, maybe before -o was reached.
Format wanted_format(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "-ojson" || argument == "-o=json" || argument == "--output=json") return Format::kJson;
    if ((argument == "-o" || argument == "--output") && i + 1 < arguments.size() && arguments[i + 1] == "json") {
      return Format::kJson;
    }
  }
  return Format::kTable;
}

// "dxpu box cordon": the deepest command that was named, for the hint.
std::string named_command(const CLI::App& app) {
  std::string path = "dxpu";
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    absl::StrAppend(&path, " ", at->get_name());
  }
  return path;
}

int parse_and_run(const std::vector<std::string>& arguments, Environment& env) {
  Invocation invocation(env);
  CLI::App app{
      "dxpu: borrows GPU functions from boxes and plugs them into hosts.\n"
      "Exit codes: 0 ok, 1 internal, 2 usage, 3 not found, 4 refused, 5 conflict, 6 deadline, 7 unavailable, 8 "
      "permission.",
      "dxpu"};
  app.set_version_flag("--version", "dxpu " DXPU_VERSION);
  app.require_subcommand(1);
  app.fallthrough();  // -o and --pool are understood after the command, too
  app.add_option("--pool", invocation.pool_address, "Address of the pool manager")
      ->envname("DXPU_POOL")
      ->type_name("ADDR")
      ->capture_default_str();
  const std::map<std::string, Format> formats = {{"table", Format::kTable}, {"json", Format::kJson}};
  app.add_option_function<std::string>(
         "-o,--output", [&](const std::string& name) { invocation.format = formats.at(name); },
         "Format of what is printed: table or json")
      ->check(CLI::IsMember({"table", "json"}))
      ->type_name("FORMAT");

  add_pool(app, invocation);
  add_gpu(app, invocation);
  add_host(app, invocation);
  add_box(app, invocation);
  add_attachment(app, invocation);
  add_attach(app, invocation);
  add_detach(app, invocation);
  add_operation(app, invocation);
  add_events(app, invocation);
  add_table(app, invocation);
  add_doctor(app, invocation);
  add_completion(app, invocation);

  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // the order CLI11 takes
  try {
    app.parse(reversed);
  } catch (const CLI::Success& help) {  // --help, --version
    return app.exit(help, env.out, env.err);
  } catch (const CLI::ParseError& error) {
    const std::string message(absl::StripSuffix(error.what(), "\n"));
    print_error(env.err, wanted_format(arguments),
                absl::InvalidArgumentError(absl::StrCat(message, "; see ", named_command(app), " --help")));
    return kExitUsage;
  }
  const absl::Status status = invocation.action();
  if (!status.ok()) print_error(env.err, invocation.format, status);
  env.out.flush();
  if (status.ok() && !env.out) {
    print_error(env.err, invocation.format, absl::InternalError("could not write the output: is the disk full?"));
    return kExitInternal;
  }
  return exit_code(status.code());
}

}  // namespace

int run(const std::vector<std::string>& arguments, Environment& env) {
  try {
    return parse_and_run(arguments, env);
  } catch (const std::exception& error) {  // out of memory, a defect in a library: never a silent abort
    print_error(env.err, wanted_format(arguments), absl::InternalError(error.what()));
    return kExitInternal;
  }
}

bool Invocation::print_json(const google::protobuf::Message& message) const {
  if (!json()) return false;
  out() << to_json(message) << '\n';
  return true;
}

CLI::Option* add_duration(CLI::App& app, const std::string& names, absl::Duration* value, const std::string& help) {
  return app
      .add_option_function<std::string>(
          names,
          [names, value](const std::string& text) {
            const absl::StatusOr<absl::Duration> parsed = parse_duration(text);
            if (!parsed.ok()) throw CLI::ValidationError(names, std::string(parsed.status().message()));
            *value = *parsed;
          },
          help)
      ->type_name("DURATION");
}

CLI::Option* add_size(CLI::App& app, const std::string& names, uint64_t* value, const std::string& help) {
  return app
      .add_option_function<std::string>(
          names,
          [names, value](const std::string& text) {
            const absl::StatusOr<uint64_t> parsed = parse_size(text);
            if (!parsed.ok()) throw CLI::ValidationError(names, std::string(parsed.status().message()));
            *value = *parsed;
          },
          help)
      ->type_name("SIZE");
}

}  // namespace dxpu::cli
