// The box's door: accepts fabric connections, reads one hello from each, hands both on.
//
// What this is: a bounded crowd of strangers, each with a deadline. What it is not: it judges no ticket. Each hello is
// read on a thread of its own, so a slow or silent peer delays nobody else; when kMaxStrangers wait already, a new one
// is closed at once.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proxy/fabric/session.h"

namespace dxpu::box {

class Gate {
 public:
  static constexpr size_t kMaxStrangers = 64;
  // Runs on any thread.
  using Handler = std::function<void(std::unique_ptr<fabric::Transport>, fabric::Hello)>;

  static absl::StatusOr<std::unique_ptr<Gate>> open(const std::string& endpoint, absl::Duration hello_deadline,
                                                    Handler handler);
  virtual ~Gate() = default;
  virtual std::string endpoint() const = 0;
  // Joins; the handler is not called after it.
  virtual void close() = 0;
};

}  // namespace dxpu::box
