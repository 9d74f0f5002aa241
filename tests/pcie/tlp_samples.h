// TLPs for the tests: hand-written golden vectors, random legal ones, and hex text.
#pragma once

#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "proxy/pcie/tlp.h"

namespace dxpu::pcie {

struct Golden {
  std::string name;
  std::vector<std::byte> wire;
  Tlp tlp;
};

// Written by hand from the header formats of the specification's chapter 2, not by the encoder.
const std::vector<Golden>& goldens();
// "40 0a …", blanks ignored.
std::vector<std::byte> from_hex(const std::string& text);
// Bytes 0, 1, 2, … so that misplaced ones show.
std::vector<std::byte> counting_bytes(size_t count, unsigned first = 0);
// A legal TLP of a random type.
Tlp random_tlp(std::mt19937_64& random);
// From DXPU_TEST_SEED, else from the system; printed, so that a failure can be run again.
uint64_t test_seed();

}  // namespace dxpu::pcie
