// Runs one dxpu command line in this process, against a fake pool and a machine made of files.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cli/invocation.h"

namespace dxpu::cli {

// A machine that is a directory; removed with it.
class FakeMachine : public Machine {
 public:
  FakeMachine() {
    std::string name = (std::filesystem::temp_directory_path() / "dxpu-machine-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) root_ = name;
  }
  ~FakeMachine() override {
    std::error_code ignored;
    if (!root_.empty()) std::filesystem::remove_all(root_, ignored);
  }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
  }

  std::string root() const override { return root_; }
  std::string kernel_release() const override { return "6.1.0-57-amd64"; }
  uint64_t memlock_limit() const override { return memlock; }
  bool is_root() const override { return root_user; }
  std::vector<PciDisplay> display_controllers() const override { return displays; }
  bool has_library(const std::string& soname) const override { return libraries.contains(soname); }
  std::string find_program(const std::string& name) const override {
    return programs.contains(name) ? "/usr/bin/" + name : "";
  }

  uint64_t memlock = std::numeric_limits<uint64_t>::max();
  bool root_user = true;
  std::vector<PciDisplay> displays;
  std::set<std::string> libraries;
  std::set<std::string> programs;

 private:
  std::string root_;
};

struct Ran {
  int exit = -1;
  std::string out;
  std::string err;
};

struct RunOptions {
  bool terminal = false;
  base::Clock* clock = nullptr;  // a clock that stands still when not given
  Machine* machine = nullptr;
};

inline Ran run_dxpu(std::vector<std::string> arguments, const std::string& pool, RunOptions options = {}) {
  if (!pool.empty()) {
    arguments.push_back("--pool");
    arguments.push_back(pool);
  }
  base::FakeClock still;
  FakeMachine bare;
  std::ostringstream out;
  std::ostringstream err;
  Environment environment{.out = out,
                          .err = err,
                          .err_is_terminal = options.terminal,
                          .clock = options.clock != nullptr ? *options.clock : still,
                          .machine = options.machine != nullptr ? *options.machine : static_cast<Machine&>(bare)};
  Ran ran;
  ran.exit = run(arguments, environment);
  ran.out = out.str();
  ran.err = err.str();
  return ran;
}

}  // namespace dxpu::cli
