// Golden files: what a command prints, kept in tests/cli/golden and read by people when it changes.
//
// DXPU_UPDATE_GOLDEN=1 rewrites them (and fails the test, so that nobody leaves it set): look at the diff before
// committing it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

namespace dxpu::cli {

inline void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(DXPU_GOLDEN_DIR) + "/" + name;
  if (std::getenv("DXPU_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary) << text;
    ADD_FAILURE() << "rewrote " << path << ": look at the diff";
    return;
  }
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file) << "no " << path << ": DXPU_UPDATE_GOLDEN=1 makes it";
  const std::string expected((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (path.ends_with(".json")) {  // the order of a map's keys is protobuf's to choose
    EXPECT_EQ(nlohmann::json::parse(text), nlohmann::json::parse(expected)) << "differs from " << path;
    return;
  }
  EXPECT_EQ(text, expected) << "differs from " << path << "; when it should, DXPU_UPDATE_GOLDEN=1 rewrites it";
}

}  // namespace dxpu::cli
