// One run of dxpu: where it prints, which pool it talks to, and what the parsed command will do.
//
// Command groups (commands/*.cc) each add their part to the parser in an add_* function; a command's callback only
// stores an action, which runs after parsing, outside the parser's exceptions.
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/machine.h"
#include "cli/output.h"
#include "cli/pool_client.h"
#include "proxy/base/clock.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace dxpu::cli {

// What is outside of the program; tests bring their own.
struct Environment {
  std::ostream& out;
  std::ostream& err;
  bool err_is_terminal = false;
  base::Clock& clock;
  Machine& machine;
};

struct Invocation {
  explicit Invocation(Environment& environment) : env(environment) {}

  Environment& env;
  std::string pool_address = "127.0.0.1:7400";
  Format format = Format::kTable;
  std::function<absl::Status()> action;

  bool json() const { return format == Format::kJson; }
  std::ostream& out() const { return env.out; }
  PoolClient& pool() {
    if (!client_) client_ = std::make_unique<PoolClient>(pool_address);
    return *client_;
  }
  // The message as JSON, when that was asked for; says whether it was.
  bool print_json(const google::protobuf::Message& message) const;

 private:
  std::unique_ptr<PoolClient> client_;
};

// Parses and runs one command line (without the program's name); the exit code. Never throws.
int run(const std::vector<std::string>& arguments, Environment& environment);

// The command groups, in the order in which help lists them.
void add_pool(CLI::App& app, Invocation& invocation);
void add_gpu(CLI::App& app, Invocation& invocation);
void add_host(CLI::App& app, Invocation& invocation);
void add_box(CLI::App& app, Invocation& invocation);
void add_attachment(CLI::App& app, Invocation& invocation);
void add_attach(CLI::App& app, Invocation& invocation);
void add_detach(CLI::App& app, Invocation& invocation);
void add_operation(CLI::App& app, Invocation& invocation);
void add_events(CLI::App& app, Invocation& invocation);
void add_table(CLI::App& app, Invocation& invocation);
void add_doctor(CLI::App& app, Invocation& invocation);
void add_completion(CLI::App& app, Invocation& invocation);

// Options whose text is checked while parsing.
CLI::Option* add_duration(CLI::App& app, const std::string& names, absl::Duration* value, const std::string& help);
CLI::Option* add_size(CLI::App& app, const std::string& names, uint64_t* value, const std::string& help);

}  // namespace dxpu::cli
