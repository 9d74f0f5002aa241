// dxpu: what an operator types. See docs/operations.md.
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "cli/invocation.h"

int main(int argc, char** argv) {
  dxpu::cli::Environment environment{.out = std::cout,
                                     .err = std::cerr,
                                     .err_is_terminal = isatty(STDERR_FILENO) == 1,
                                     .clock = dxpu::base::Clock::real(),
                                     .machine = dxpu::cli::Machine::real()};
  return dxpu::cli::run(std::vector<std::string>(argv + 1, argv + argc), environment);
}
