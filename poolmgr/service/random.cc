#include "poolmgr/service/random.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace dxpu::poolmgr {
namespace {

class KernelRandom : public Random {
 public:
  std::string bytes(size_t count) override {
    std::string out(count, '\0');
    size_t have = 0;
    while (have < count) {
      const ssize_t got = ::getrandom(out.data() + have, count - have, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        spdlog::critical("random=unavailable error=\"{}\"", std::strerror(errno));
        std::abort();
      }
      have += static_cast<size_t>(got);
    }
    return out;
  }
};

}  // namespace

Random& Random::real() {
  static KernelRandom random;
  return random;
}

}  // namespace dxpu::poolmgr
