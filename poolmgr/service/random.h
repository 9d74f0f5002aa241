// Randomness as an interface, so that tests can name it: ids and the secrets of tickets.
#pragma once

#include <cstddef>
#include <string>

namespace dxpu::poolmgr {

class Random {
 public:
  virtual ~Random() = default;
  virtual std::string bytes(size_t count) = 0;

  // The kernel's. Ends the process when the kernel has none: a ticket without a secret must not exist.
  static Random& real();
};

}  // namespace dxpu::poolmgr
