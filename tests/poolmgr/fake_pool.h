// A pool in one thread: a real store and reconciler, boxes and hosts that are a few lines each, a clock that stands
// still.
//
// settle() lets everybody act until nobody has anything more to say. What a box or a host does not do by itself is a
// knob.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "poolmgr/service/reconciler.h"
#include "poolmgr/store/sqlite_store.h"
#include "proxy/base/clock.h"

namespace dxpu::poolmgr {

class FakeLink : public AgentLink {
 public:
  uint64_t send(v1::ManagerMessage message) override {
    message.set_sequence(++sequence_);
    sent.push_back(std::move(message));
    return sequence_;
  }
  void close(absl::Status why) override { closed = std::move(why); }
  std::string peer() const override { return "fake"; }

  std::vector<v1::ManagerMessage> sent;  // not looked at yet
  absl::Status closed;

 private:
  uint64_t sequence_ = 0;
};

struct SeededRandom : Random {
  std::string bytes(size_t count) override;
  uint64_t state = 42;
};

class FakePool;

class FakeBox {
 public:
  FakeBox(FakePool& pool, std::string id, uint32_t slots);
  absl::Status connect();
  void disconnect();
  bool connected() const { return link != nullptr; }
  // Looks at its intents, does what they say as far as the knobs let it, publishes. True when anything happened.
  bool act();
  void publish();
  void die(uint32_t slot, const std::string& detail);  // the worker dies; the box scrubs

  struct Slot {
    v1::SlotFact fact;
    v1::SlotIntent intent;
    std::set<std::string> tokens;  // every token it was given
  };
  const std::string id;
  std::string boot = "boot-1";
  std::string model = "dxpu-soft";
  uint64_t memory = 256 << 20;
  std::map<uint32_t, Slot> slots;
  std::shared_ptr<FakeLink> link;
  uint64_t applied = 0;
  // Knobs.
  bool deaf = false;   // does not look at intents
  bool quick = false;  // scrubs and validates without reporting the phases
  bool scrubs = true;  // false: stays SCRUBBING
  bool serves = true;  // false: never says SERVING
  bool scrub_fails = false;

 private:
  FakePool& pool_;
};

class FakeHost {
 public:
  FakeHost(FakePool& pool, std::string id, uint32_t ports);
  absl::Status connect();
  void disconnect();
  bool connected() const { return link != nullptr; }
  bool act();
  void publish();

  struct Port {
    v1::PortFact fact;
    v1::PortIntent intent;
  };
  const std::string id;
  std::string boot = "boot-1";
  std::map<uint32_t, Port> ports;
  std::shared_ptr<FakeLink> link;
  uint64_t applied = 0;
  // Knobs.
  bool deaf = false;
  v1::PortPhase stop_at = v1::PORT_PHASE_ATTACHED;  // how far it goes when it attaches
  std::string fails;                                // not empty: attaching ends as FAILED with this detail
  std::map<uint32_t, std::string> holders;          // who has the port open: keeps it in GONE

 private:
  FakePool& pool_;
};

class FakePool {
 public:
  FakePool();
  ~FakePool();

  void add_boxes(int count, uint32_t slots);
  FakeHost& add_host(const std::string& id, uint32_t ports);
  FakeBox& box(const std::string& id) { return *boxes.at(id); }
  FakeHost& host(const std::string& id) { return *hosts.at(id); }

  void start();    // the reconciler, on the store as it is
  void restart();  // destroys store and reconciler; agents lose their streams and come back
  void settle();
  void pass(absl::Duration time);  // in steps, with ticks and live agents
  // Lets everybody act once; for stopping in the middle. True when anything happened.
  bool step();

  v1::AttachResponse attach(uint32_t count, bool same_box = false);
  absl::StatusOr<v1::AttachResponse> try_attach(const v1::AttachRequest& request) {
    return reconciler->attach(request);
  }
  absl::StatusOr<v1::DetachResponse> try_detach(const std::string& id, bool force = false);
  v1::Attachment attachment(const std::string& id);
  v1::Function function(const std::string& id);
  v1::Operation operation(const std::string& id);
  std::vector<std::string> history(const std::string& subject);  // event messages up to the colon
  std::vector<v1::Function> functions();

  // Invariants that hold at every moment.
  void check_legal();

  std::string dir;
  Options options;
  int64_t max_pages = 0;
  base::FakeClock clock;
  SeededRandom random;
  std::map<std::string, std::unique_ptr<FakeBox>> boxes;
  std::map<std::string, std::unique_ptr<FakeHost>> hosts;
  std::unique_ptr<Store> store;
  std::unique_ptr<Reconciler> reconciler;
};

class PoolTest : public ::testing::Test {
 protected:
  void TearDown() override { pool.check_legal(); }
  FakePool pool;
};

}  // namespace dxpu::poolmgr
