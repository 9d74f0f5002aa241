// module_test [GTEST OPTION…]         the tests
// module_test --serve PORT            plugs a function into PORT and waits to be killed: the daemon that dies in a test
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gtest/gtest.h"
#include "spdlog/spdlog.h"
#include "tests/vm/module/served.h"

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::warn);
  if (argc == 3 && std::strcmp(argv[1], "--serve") == 0) {
    dxpu::vm::Served served(static_cast<unsigned>(std::atoi(argv[2])));
    if (absl::Status status = served.plug(); !status.ok()) {
      std::fprintf(stderr, "serve: %s\n", status.ToString().c_str());
      return 1;
    }
    std::puts("ready");
    std::fflush(stdout);
    ::alarm(120);
    while (true) ::pause();
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
