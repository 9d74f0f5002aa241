#include "proxy/base/clock.h"

#include <ctime>

namespace dxpu::base {
namespace {

class RealClock : public Clock {
 public:
  absl::Time now() override { return absl::Now(); }
  absl::Duration monotonic() override {
    timespec ts{};
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return absl::DurationFromTimespec(ts);
  }
};

}  // namespace

Clock& Clock::real() {
  static RealClock clock;
  return clock;
}

}  // namespace dxpu::base
