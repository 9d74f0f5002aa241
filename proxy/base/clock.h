// Time as an interface, so that tests own it.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dxpu::base {

class Clock {
 public:
  virtual ~Clock() = default;
  // Wall time; may step. For what people and peers read.
  virtual absl::Time now() = 0;
  // Never steps back. For deadlines; only differences mean anything.
  virtual absl::Duration monotonic() = 0;

  static Clock& real();
};

// Stands still until told.
class FakeClock : public Clock {
 public:
  absl::Time now() override { return absl::UnixEpoch() + absl::Hours(24 * 365 * 50) + elapsed_; }
  absl::Duration monotonic() override { return elapsed_; }
  void advance(absl::Duration by) { elapsed_ += by; }

 private:
  absl::Duration elapsed_ = absl::ZeroDuration();
};

}  // namespace dxpu::base
