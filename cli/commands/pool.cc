// dxpu pool: one look at the whole pool.
#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "cli/format.h"
#include "cli/invocation.h"
#include "proxy/base/status.h"

namespace dxpu::cli {
namespace {

absl::Status show_pool(Invocation& invocation) {
  DXPU_ASSIGN_OR_RETURN(const v1::GetPoolResponse pool, invocation.pool().get_pool({}));
  if (invocation.print_json(pool)) return absl::OkStatus();
  // In the order of a function's life, not of the map.
  std::string functions;
  uint32_t total = 0;
  for (int value = v1::Lifecycle_MIN + 1; value <= v1::Lifecycle_MAX; ++value) {
    if (!v1::Lifecycle_IsValid(value)) continue;
    const auto counted = pool.functions_by_lifecycle().find(name_of(static_cast<v1::Lifecycle>(value)));
    if (counted == pool.functions_by_lifecycle().end() || counted->second == 0) continue;
    total += counted->second;
    absl::StrAppend(&functions, functions.empty() ? "" : ", ", counted->second, " ", counted->first);
  }
  print_fields(invocation.out(),
               {{"pool manager", absl::StrCat(invocation.pool_address, ", version ", pool.software_version())},
                {"database", pool.database()},
                {"revision", absl::StrCat(pool.revision())},
                {"boxes", absl::StrCat(pool.boxes(), ", ", pool.boxes_connected(), " connected")},
                {"hosts", absl::StrCat(pool.hosts(), ", ", pool.hosts_connected(), " connected")},
                {"functions", absl::StrCat(total, functions.empty() ? "" : ": ", functions)},
                {"attachments", absl::StrCat(pool.attachments())}});
  return absl::OkStatus();
}

}  // namespace

void add_pool(CLI::App& app, Invocation& invocation) {
  CLI::App* group = app.add_subcommand("pool", "The pool as a whole")->require_subcommand(1);
  group->add_subcommand("show", "Counts, connections, where the state is kept")->callback([&invocation] {
    invocation.action = [&invocation] { return show_pool(invocation); };
  });
}

}  // namespace dxpu::cli
