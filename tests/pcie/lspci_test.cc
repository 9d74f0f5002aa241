// The configuration space as lspci decodes it: an oracle that knows nothing of our code.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

#include "proxy/pcie/bar_map.h"
#include "tests/pcie/config_samples.h"

namespace dxpu::pcie {
namespace {

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen((command + " 2>/dev/null").c_str(), "r"), pclose);
  std::string out;
  char chunk[4096];
  while (pipe != nullptr) {
    const size_t bytes = fread(chunk, 1, sizeof(chunk), pipe.get());
    if (bytes == 0) break;
    out.append(chunk, bytes);
  }
  return out;
}

// Reading from a file, lspci 3.9 shows the upper half of a 64-bit BAR as one more, unassigned region.
std::string without_upper_halves(const std::string& text) {
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("<unassigned>") == std::string::npos) kept += line + "\n";
  }
  return kept;
}

// The text that `lspci -xxxx` prints and `lspci -F` reads.
std::string dump(const ConfigSpace& c) {
  std::string text = "01:00.0 dxpu\n";
  char field[16];
  for (uint32_t offset = 0; offset < kConfigSpaceBytes; offset += 16) {
    std::snprintf(field, sizeof(field), offset < 0x100 ? "%02x:" : "%03x:", offset);
    text += field;
    for (uint32_t i = 0; i < 16; ++i) {
      std::snprintf(field, sizeof(field), " %02x", c.read(offset + i, 1));
      text += field;
    }
    text += "\n";
  }
  return text + "\n";
}

TEST(Lspci, DecodesEveryCapabilityAsMeant) {
  const std::string lspci = output_of("PATH=$PATH:/usr/sbin:/sbin:/usr/bin command -v lspci").substr(0, 200);
  if (lspci.empty()) GTEST_SKIP() << "lspci is not installed (package pciutils)";
  const std::string path = lspci.substr(0, lspci.find('\n'));
  const std::string version = output_of(path + " --version");
  if (version.find("version 3.9.") == std::string::npos) {
    GTEST_SKIP() << "the golden text is that of lspci 3.9, this is " << version;
  }

  ConfigSpace c = *ConfigSpace::build(full_description());
  const auto addresses = BarMap::assign(c, 0xe0000000);
  for (unsigned i = 0; i < kBarCount; ++i) {
    if (c.bar(i).size == 0) continue;
    c.write(0x10 + 4 * i, 4, static_cast<uint32_t>(addresses[i]));
    if (c.bar(i).is_64bit) c.write(0x14 + 4 * i, 4, static_cast<uint32_t>(addresses[i] >> 32));
  }
  c.write(0x04, 2, 6);
  c.write(*c.find_capability(0x11) + 2, 2, 0x8000);

  const std::string dump_path = testing::TempDir() + "dxpu_lspci_" + std::to_string(getpid()) + ".txt";
  std::ofstream(dump_path) << dump(c);
  const std::string text = without_upper_halves(output_of(path + " -n -vvv -F " + dump_path + " -s 01:00.0"));
  std::remove(dump_path.c_str());

  const std::string golden_path = std::string(DXPU_GOLDEN_DIR) + "/lspci_full.txt";
  if (std::getenv("DXPU_WRITE_GOLDEN") != nullptr) std::ofstream(golden_path) << text;
  std::stringstream golden;
  golden << std::ifstream(golden_path).rdbuf();
  EXPECT_EQ(text, golden.str()) << "if the change is meant: DXPU_WRITE_GOLDEN=1, and read the difference";
}

}  // namespace
}  // namespace dxpu::pcie
