// dxpu completion: a shell script that completes dxpu's commands and options, made from the parser itself, so that it
// can not know less or more than the parser does.
#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "cli/invocation.h"

namespace dxpu::cli {
namespace {

// The long and short names of the options of one command, and those of them that take a value.
void collect_options(const CLI::App& command, std::vector<std::string>& names, std::vector<std::string>& with_value) {
  for (const CLI::Option* option : command.get_options()) {
    for (const absl::string_view name : absl::StrSplit(option->get_name(false, true), ',', absl::SkipEmpty())) {
      if (name.front() != '-') continue;  // a positional
      names.emplace_back(name);
      if (option->get_expected_min() > 0) with_value.emplace_back(name);
    }
  }
}

// One line of the script's table a command: its sub-commands, its options, and those of them that take a value.
void describe(const CLI::App& command, const std::string& path, std::string& cases) {
  std::vector<std::string> words;
  for (const CLI::App* sub : command.get_subcommands({})) words.push_back(sub->get_name());
  std::vector<std::string> options;
  std::vector<std::string> with_value;
  collect_options(command, options, with_value);
  absl::StrAppend(&cases, "    '", path, "') words='", absl::StrJoin(words, " "), "' options='",
                  absl::StrJoin(options, " "), "' values=' ", absl::StrJoin(with_value, " "), " ' ;;\n");
  for (const CLI::App* sub : command.get_subcommands({})) {
    describe(*sub, absl::StrCat(path, path.empty() ? "" : " ", sub->get_name()), cases);
  }
}

std::string bash_script(const CLI::App& app) {
  std::string cases;
  describe(app, "", cases);
  return absl::StrCat(R"bash(# bash completion for dxpu; made by: dxpu completion bash
# To use it now: source <(dxpu completion bash)
# To keep it: dxpu completion bash > /etc/bash_completion.d/dxpu
_dxpu_command() {
  case $1 in
)bash",
                      cases, R"bash(    *) return 1 ;;
  esac
}
_dxpu() {
  local word path='' skip='' words options values global global_values i
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
  _dxpu_command ''
  global=$options global_values=$values
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ -n $skip ]]; then
      skip=''
    elif [[ $word == -* ]]; then
      [[ $values$global_values == *" $word "* ]] && skip=1
    else
      _dxpu_command "${path:+$path }$word" && path=${path:+$path }$word
    fi
  done
  COMPREPLY=()
  if [[ $previous == -o || $previous == --output ]]; then
    words='table json'
  elif [[ -n $skip ]]; then
    return
  elif [[ $current == -* ]]; then
    words="$options $([[ -z $path ]] || echo "$global")"
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current" | sort -u)
}
complete -F _dxpu dxpu
)bash");
}

}  // namespace

void add_completion(CLI::App& app, Invocation& invocation) {
  CLI::App* group =
      app.add_subcommand("completion", "A script that teaches your shell dxpu's commands")->require_subcommand(1);
  group->add_subcommand("bash", "For bash: source <(dxpu completion bash)")->callback([&app, &invocation] {
    // The parser lives until the action has run.
    invocation.action = [&app, &invocation] {
      invocation.out() << bash_script(app);
      return absl::OkStatus();
    };
  });
}

}  // namespace dxpu::cli
