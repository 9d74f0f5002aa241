// One port of a host: its phases, and what each thing that happens does to it.
//
//   EMPTY → CONNECTING → PLUGGING → ATTACHED → GONE → REMOVING → EMPTY      FAILED instead of EMPTY when an attach went
//   wrong
//
// What this is: intent → session → attach point, and back, in two steps: gone at once, removed when the users have
// closed. What it is not: it decides nothing about who gets what, and a dead pool manager changes nothing here.
//
// Threads. step() is called by one thread at a time (PortThread's, or a test's); it may block for as long as the
// deadlines of the connect allow, so every port has a thread of its own and none delays another. Everything else from
// any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proxy/attach/attach_point.h"
#include "proxy/base/clock.h"
#include "proxy/fabric/session.h"

namespace dxpu::host {

enum class PortPhase { kEmpty, kConnecting, kPlugging, kAttached, kGone, kRemoving, kFailed };
const char* name_of(PortPhase phase);
// The whole table of legal changes.
bool allowed(PortPhase from, PortPhase to);

// What the pool manager wants the port to hold.
struct PortWant {
  bool attach = false;
  fabric::Ticket ticket;
  std::vector<std::string> paths;
  bool force = false;  // when !attach
};

// Opens a session over one path. A fake in tests.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual absl::StatusOr<std::unique_ptr<fabric::RemoteFunction>> connect(
      const std::string& path, const fabric::Ticket& ticket, absl::Duration deadline,
      absl::AnyInvocable<void(absl::Status)> on_loss) = 0;
};

struct PortDeadlines {
  absl::Duration connect = absl::Seconds(10);  // all paths, all attempts
  absl::Duration one_path = absl::Seconds(3);
  absl::Duration retry = absl::Milliseconds(50);
  absl::Duration plug = absl::Seconds(60);    // until the host shows it
  absl::Duration release = absl::Seconds(2);  // users that were asked to close
};

struct PortSnapshot {
  PortPhase phase = PortPhase::kEmpty;
  std::string attachment_id;  // what the phase is about; kept for the last one
  uint64_t generation = 0;
  uint64_t epoch = 0;
  std::string box_id;
  uint32_t slot = 0;
  std::string bus_address;
  std::string holder;
  std::string detail;
  bool wants_ticket = false;
};

struct PortCallbacks {
  std::function<void()> changed;  // no lock of the port is held
  std::function<void(const std::string& type, const std::string& message, const std::string& attachment_id)> event;
};

class Port {
 public:
  Port(uint32_t number, attach::AttachPoint& attach, Connector& connector, const PortDeadlines& deadlines,
       base::Clock& clock, PortCallbacks callbacks);
  // unplug() first, and no step() running.
  ~Port();

  void want(const PortWant& want);
  PortSnapshot snapshot() const;

  // Does what can be done now; returns how long until something is due (infinite: only news).
  absl::Duration step();
  // Waits for news, at most `deadline`.
  void wait(absl::Duration deadline);
  void wake();
  // From now on connects are given up and wait() returns at once.
  void stop();
  bool stopping() const;
  // The daemon ends: gone at once, session closed; the box keeps the slot for the rest of the lease.
  void unplug(const std::string& reason);

  uint32_t number() const { return number_; }

 private:
  void move_to(PortPhase to, const std::string& detail);
  void set_detail(const std::string& detail);
  // The epoch is over, its ticket is used up, and the same attachment is wanted still.
  bool wants_ticket() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool advance(absl::Duration* due);  // true: something changed, look again
  void connect();
  void take_away(const std::string& reason, PortPhase after);
  void look_around();
  PortWant wanted() const;
  bool current(const PortWant& want) const;  // what is held is what `want` asks for

  const uint32_t number_;
  attach::AttachPoint& attach_;
  Connector& connector_;
  const PortDeadlines deadlines_;
  base::Clock& clock_;
  const PortCallbacks callbacks_;

  // Touched by the stepping thread only.
  std::unique_ptr<fabric::RemoteFunction> remote_;
  PortPhase after_ = PortPhase::kEmpty;  // where the removal leads
  std::string after_detail_;
  bool release_asked_ = false;
  absl::Duration due_ = absl::InfiniteDuration();  // monotonic, of the phase

  mutable absl::Mutex mutex_;
  PortWant want_ ABSL_GUARDED_BY(mutex_);
  PortSnapshot shown_ ABSL_GUARDED_BY(mutex_);
  bool lost_epoch_ ABSL_GUARDED_BY(mutex_) = false;    // the last session ended without anybody asking
  bool ticket_stale_ ABSL_GUARDED_BY(mutex_) = false;  // the box refused the last ticket as used up
  uint64_t session_ ABSL_GUARDED_BY(mutex_) = 0;       // which connect a loss belongs to
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status loss_ ABSL_GUARDED_BY(mutex_);
  bool news_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

// Steps a port until stopped.
class PortThread {
 public:
  explicit PortThread(Port& port);
  ~PortThread();  // stops the port and joins

 private:
  Port& port_;
  std::thread thread_;
};

}  // namespace dxpu::host
