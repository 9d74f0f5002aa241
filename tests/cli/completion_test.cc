// The completion script, run by a real bash: it knows every command and option that the parser knows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <set>
#include <sstream>

#include "tests/cli/run_dxpu.h"

namespace dxpu::cli {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Not;

// What bash offers after these words; the last one is being typed.
std::set<std::string> complete(const std::vector<std::string>& words) {
  static const std::string script = run_dxpu({"completion", "bash"}, "").out;
  FakeMachine directory;
  std::string program = script + "\nCOMP_WORDS=(dxpu";
  for (const std::string& word : words) program += " '" + word + "'";
  program += ")\nCOMP_CWORD=" + std::to_string(words.size()) + "\n_dxpu\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n";
  directory.write("/script", program);
  std::set<std::string> offered;
  FILE* pipe = popen(("bash -eu " + directory.root() + "/script 2>&1").c_str(), "r");
  if (pipe == nullptr) return offered;
  char line[512];
  while (fgets(line, sizeof line, pipe) != nullptr) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    if (!text.empty()) offered.insert(text);
  }
  pclose(pipe);
  return offered;
}

TEST(Completion, OffersEveryCommandAtTheTop) {
  const std::string help = run_dxpu({"--help"}, "").out;
  std::istringstream lines(help.substr(help.find("Subcommands:") + 12));
  const std::set<std::string> offered = complete({""});
  int commands = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    if (std::string name; words >> name) {
      EXPECT_THAT(offered, Contains(name));
      ++commands;
    }
  }
  EXPECT_EQ(commands, 12);
  EXPECT_EQ(offered.size(), 12u);
}

TEST(Completion, OffersSubCommandsOptionsAndFormats) {
  EXPECT_EQ(complete({"box", ""}), (std::set<std::string>{"list", "show", "cordon", "uncordon", "remove"}));
  EXPECT_EQ(complete({"box", "un"}), (std::set<std::string>{"uncordon"}));
  EXPECT_THAT(complete({"attach", "--same"}), Contains("--same-box"));
  EXPECT_THAT(complete({"attach", "--"}), Contains("--pool"));
  EXPECT_EQ(complete({"gpu", "list", "-o", "j"}), (std::set<std::string>{"json"}));
}

TEST(Completion, AValueIsNotMistakenForACommand) {
  // The host is called "box": what follows is still about attach.
  EXPECT_THAT(complete({"attach", "--host", "box", "--co"}), Contains("--count"));
  EXPECT_THAT(complete({"--pool", "gpu", ""}), Contains("attach"));
  EXPECT_TRUE(complete({"attach", "--host", ""}).empty());
  // --wait takes none.
  EXPECT_THAT(complete({"attach", "--wait", "--co"}), Contains("--count"));
}

}  // namespace
}  // namespace dxpu::cli
