// The port's machine against a fake attach point and a fake box.
#include "proxy/host/port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "absl/strings/str_cat.h"

namespace dxpu::host {
namespace {

using attach::PortState;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FakeAttach : public attach::AttachPoint {
 public:
  absl::Status plug(function::Function&) override {
    calls.push_back("plug");
    if (plug_result.ok()) status_.state = PortState::kPlugging;
    return plug_result;
  }
  absl::Status unplug(const std::string&) override {
    calls.push_back("unplug");
    if (status_.state != PortState::kEmpty)
      status_.state = status_.holder.empty() ? PortState::kEmpty : PortState::kGone;
    return absl::OkStatus();
  }
  absl::Status request_release() override {
    calls.push_back("request_release");
    return absl::OkStatus();
  }
  attach::PortStatus status() const override { return status_; }
  void set_status_callback(absl::AnyInvocable<void()>) override {}
  void dma_read(uint64_t, std::span<std::byte>, function::Done done) override {
    done(function::Outcome::kUnsupportedRequest);
  }
  void dma_write(uint64_t, std::span<const std::byte>) override {}
  void dma_atomic(function::AtomicOp, uint64_t, unsigned, uint64_t, uint64_t, function::ReadDone done) override {
    done(function::Outcome::kUnsupportedRequest, {});
  }
  void raise_msix(unsigned) override {}

  std::vector<std::string> calls;
  attach::PortStatus status_;
  absl::Status plug_result;
};

class FakeRemote : public fabric::RemoteFunction {
 public:
  FakeRemote(uint64_t epoch, std::vector<std::string>& calls) : epoch_(epoch), calls_(calls) {}
  uint64_t epoch() const override { return epoch_; }
  bool alive() const override { return true; }
  fabric::SessionStats stats() const override { return {}; }
  void close() override { calls_.push_back("close"); }
  function::Outcome bar_read_wait(unsigned, uint64_t, std::span<std::byte>) override {
    return function::Outcome::kLinkDown;
  }
  function::Identity identity() const override { return {}; }
  pcie::ConfigSpace config() const override { return *pcie::ConfigSpace::build({}); }
  void config_write(uint32_t, unsigned, uint32_t, function::Done done) override { done(function::Outcome::kLinkDown); }
  void config_read(uint32_t, unsigned, function::ReadDone done) override { done(function::Outcome::kLinkDown, {}); }
  void bar_read(unsigned, uint64_t, uint32_t, function::ReadDone done) override {
    done(function::Outcome::kLinkDown, {});
  }
  void bar_write(unsigned, uint64_t, std::span<const std::byte>) override {}
  void connect(function::Upstream*) override {}
  void reset(function::Done done) override { done(function::Outcome::kLinkDown); }
  absl::Status scrub() override { return absl::FailedPreconditionError("remote"); }

 private:
  const uint64_t epoch_;
  std::vector<std::string>& calls_;
};

class FakeBox : public Connector {
 public:
  explicit FakeBox(base::FakeClock& clock) : clock_(clock) {}
  absl::StatusOr<std::unique_ptr<fabric::RemoteFunction>> connect(
      const std::string& path, const fabric::Ticket& ticket, absl::Duration,
      absl::AnyInvocable<void(absl::Status)> on_loss) override {
    tried.push_back(absl::StrCat(path, " g", ticket.generation));
    clock_.advance(absl::Seconds(1));
    if (before_answer) before_answer();
    absl::Status answer = absl::OkStatus();
    if (!answers.empty()) {
      answer = answers.front();
      answers.pop_front();
    }
    if (!answer.ok()) return answer;
    losses.push_back(std::move(on_loss));
    return std::unique_ptr<fabric::RemoteFunction>(new FakeRemote(losses.size(), calls));
  }
  void lose(size_t session) { losses[session](absl::UnavailableError("connection reset")); }

  std::deque<absl::Status> answers;  // then OK
  std::function<void()> before_answer;
  std::vector<std::string> tried, calls;
  std::vector<absl::AnyInvocable<void(absl::Status)>> losses;

 private:
  base::FakeClock& clock_;
};

// What a box's Terminate(kTicketStale) becomes on this side.
absl::Status refused(fabric::TerminateReason reason) {
  absl::Status status = absl::FailedPreconditionError(absl::StrCat("refused: ", fabric::name_of(reason)));
  status.SetPayload("type.dxpu/fabric.TerminateReason", absl::Cord(absl::StrCat(static_cast<unsigned>(reason))));
  return status;
}

PortWant want(const std::string& attachment, uint64_t generation, std::vector<std::string> paths = {"p1", "p2"}) {
  PortWant w;
  w.attach = true;
  w.ticket.attachment_id = attachment;
  w.ticket.generation = generation;
  w.ticket.host_id = "h1";
  w.ticket.box_id = "b1";
  w.paths = std::move(paths);
  return w;
}

class PortTest : public ::testing::Test {
 protected:
  PortTest()
      : box(clock),
        port(2, point, box, PortDeadlines{.retry = absl::Milliseconds(1)}, clock,
             {[this] { phases_.push_back(port.snapshot()); },
              [this](const std::string& type, const std::string&, const std::string& attachment) {
                events.push_back(type + " " + attachment);
              }}) {}
  PortPhase phase() { return port.snapshot().phase; }
  void attach(const std::string& attachment = "a", uint64_t generation = 1) {
    port.want(want(attachment, generation));
    port.step();
    ASSERT_EQ(phase(), PortPhase::kPlugging);
    point.status_.state = PortState::kAttached;
    point.status_.bus_address = "0001:01:00.0";
    port.step();
    ASSERT_EQ(phase(), PortPhase::kAttached);
    point.calls.clear();
    box.tried.clear();
  }

  base::FakeClock clock;
  FakeAttach point;
  FakeBox box;
  std::vector<PortSnapshot> phases_;
  std::vector<std::string> events;
  Port port;
};

TEST(PortTable, LegalChanges) {
  const std::vector<PortPhase> all = {PortPhase::kEmpty,    PortPhase::kConnecting, PortPhase::kPlugging,
                                      PortPhase::kAttached, PortPhase::kGone,       PortPhase::kRemoving,
                                      PortPhase::kFailed};
  std::set<std::string> legal;
  for (PortPhase from : all) {
    for (PortPhase to : all) {
      if (allowed(from, to)) legal.insert(absl::StrCat(name_of(from), ">", name_of(to)));
    }
  }
  EXPECT_EQ(legal, (std::set<std::string>{"empty>connecting", "empty>gone", "empty>removing", "connecting>plugging",
                                          "connecting>empty", "connecting>failed", "plugging>attached", "plugging>gone",
                                          "attached>gone", "gone>removing", "gone>empty", "gone>failed",
                                          "removing>empty", "removing>failed", "failed>connecting", "failed>empty"}));
}

TEST_F(PortTest, AttachDetach) {
  attach();
  PortSnapshot s = port.snapshot();
  EXPECT_EQ(s.attachment_id, "a");
  EXPECT_EQ(s.epoch, 1u);
  EXPECT_EQ(s.bus_address, "0001:01:00.0");
  port.want({});
  port.step();
  EXPECT_EQ(phase(), PortPhase::kEmpty);
  EXPECT_THAT(point.calls, ElementsAre("unplug"));
  EXPECT_THAT(box.calls, ElementsAre("close"));
  EXPECT_EQ(port.snapshot().attachment_id, "a") << "the last one is kept";
  EXPECT_FALSE(port.snapshot().wants_ticket);
  EXPECT_THAT(events, IsEmpty());
}

TEST_F(PortTest, EmptyIsNeverSaidOfTheNewAttachmentWhileItComes) {
  attach();
  port.want({});
  port.step();
  attach("b", 2);
  for (const PortSnapshot& s : phases_) {
    EXPECT_FALSE(s.attachment_id == "b" && s.phase == PortPhase::kEmpty);
  }
}

TEST_F(PortTest, PathsAreTriedInOrderAndAgain) {
  box.answers = {absl::UnavailableError("no route"), absl::UnavailableError("no route"),
                 absl::UnavailableError("no route")};
  port.want(want("a", 1));
  port.step();
  EXPECT_THAT(box.tried, ElementsAre("p1 g1", "p2 g1", "p1 g1", "p2 g1"));
  EXPECT_EQ(phase(), PortPhase::kPlugging);
}

TEST_F(PortTest, NoPathInTimeIsFailedWithTheReasonAndNothingIsHeld) {
  for (int i = 0; i < 100; ++i) box.answers.push_back(absl::UnavailableError("no route to host"));
  port.want(want("a", 1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kFailed);
  EXPECT_THAT(port.snapshot().detail, HasSubstr("no route to host"));
  EXPECT_THAT(point.calls, IsEmpty());
  EXPECT_LE(box.tried.size(), 11u) << "the connect deadline is 10 s and each try took one";
  const size_t tries = box.tried.size();
  port.step();
  EXPECT_EQ(box.tried.size(), tries) << "the same intent is not tried again";
  box.answers.clear();
  port.want(want("a", 2));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kPlugging) << "a new generation is";
}

TEST_F(PortTest, BusyIsTriedAgainStaleAsksForATicket) {
  box.answers = {refused(fabric::TerminateReason::kBusy), refused(fabric::TerminateReason::kTicketUnknown),
                 refused(fabric::TerminateReason::kTicketStale)};
  port.want(want("a", 1, {"p1"}));
  port.step();
  EXPECT_EQ(box.tried.size(), 3u);
  PortSnapshot s = port.snapshot();
  EXPECT_EQ(s.phase, PortPhase::kEmpty);
  EXPECT_TRUE(s.wants_ticket);
  EXPECT_EQ(s.generation, 1u);
  for (const PortSnapshot& seen : phases_) {
    EXPECT_FALSE(seen.phase == PortPhase::kEmpty && seen.attachment_id == "a" && !seen.wants_ticket);
  }
  port.want(want("a", 2, {"p1"}));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kPlugging);
  EXPECT_FALSE(port.snapshot().wants_ticket);
}

TEST_F(PortTest, LinkLossIsRemovalAtOnceAndSaysWhoHoldsIt) {
  attach();
  point.status_.holder = "pid 7 (prog)";
  box.lose(0);
  port.step();
  PortSnapshot s = port.snapshot();
  EXPECT_EQ(s.phase, PortPhase::kGone);
  EXPECT_EQ(s.holder, "pid 7 (prog)");
  EXPECT_TRUE(s.wants_ticket) << "the epoch is over, the attachment wanted still";
  EXPECT_THAT(events, ElementsAre("link.lost a"));
  EXPECT_THAT(point.calls, ElementsAre("unplug"));
  port.want({});
  port.step();
  EXPECT_EQ(phase(), PortPhase::kGone) << "users have not closed";
  EXPECT_FALSE(port.snapshot().wants_ticket);
  point.status_ = {};
  point.status_.state = PortState::kRemoving;
  port.step();
  EXPECT_EQ(phase(), PortPhase::kRemoving);
  point.status_.state = PortState::kEmpty;
  port.step();
  EXPECT_EQ(phase(), PortPhase::kEmpty);
}

TEST_F(PortTest, ANewTicketAfterLossComesBackOnlyWhenThePortIsEmpty) {
  attach();
  point.status_.holder = "pid 7 (prog)";
  box.lose(0);
  port.step();
  port.want(want("a", 2));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kGone);
  EXPECT_FALSE(port.snapshot().wants_ticket) << "it has one";
  EXPECT_THAT(box.tried, IsEmpty());
  point.status_ = {};
  port.step();
  EXPECT_EQ(phase(), PortPhase::kPlugging);
  EXPECT_EQ(port.snapshot().generation, 2u);
}

TEST_F(PortTest, ALateLossOfAnOldSessionIsNotThisOnes) {
  attach();
  port.want({});
  port.step();
  attach("b", 2);
  box.lose(0);
  port.step();
  EXPECT_EQ(phase(), PortPhase::kAttached);
}

TEST_F(PortTest, UsersAreAskedAndWaitedForALittle) {
  attach();
  point.status_.holder = "pid 7 (prog)";
  port.want({});
  absl::Duration due = port.step();
  EXPECT_EQ(phase(), PortPhase::kAttached);
  EXPECT_THAT(point.calls, ElementsAre("request_release"));
  EXPECT_LE(due, absl::Seconds(2));
  EXPECT_THAT(port.snapshot().detail, HasSubstr("pid 7"));
  clock.advance(absl::Seconds(1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kAttached);
  clock.advance(absl::Seconds(1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kGone);
  EXPECT_THAT(point.calls, ElementsAre("request_release", "unplug"));
}

TEST_F(PortTest, UsersThatCloseInTimeEndTheWait) {
  attach();
  point.status_.holder = "pid 7 (prog)";
  port.want({});
  port.step();
  point.status_.holder.clear();
  port.step();
  EXPECT_EQ(phase(), PortPhase::kEmpty);
}

TEST_F(PortTest, ForceDoesNotAsk) {
  attach();
  point.status_.holder = "pid 7 (prog)";
  PortWant nothing;
  nothing.force = true;
  port.want(nothing);
  port.step();
  EXPECT_THAT(point.calls, ElementsAre("unplug"));
  EXPECT_EQ(phase(), PortPhase::kGone);
}

TEST_F(PortTest, APlugThatIsRefusedIsFailed) {
  point.plug_result = absl::InvalidArgumentError("BAR 2 (1 TiB) does not fit the window");
  port.want(want("a", 1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kFailed);
  EXPECT_THAT(port.snapshot().detail, HasSubstr("1 TiB"));
  EXPECT_THAT(box.calls, ElementsAre("close"));
  EXPECT_THAT(events, ElementsAre("port.failed a"));
  port.want({});
  port.step();
  EXPECT_EQ(phase(), PortPhase::kEmpty);
}

TEST_F(PortTest, AHostThatNeverShowsItIsFailedAfterTheDeadline) {
  port.want(want("a", 1));
  absl::Duration due = port.step();
  ASSERT_EQ(phase(), PortPhase::kPlugging);
  ASSERT_LE(due, absl::Minutes(1));
  clock.advance(absl::Minutes(1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kFailed);
}

TEST_F(PortTest, AHigherGenerationWhileAttachedBeginsANewEpoch) {
  attach();
  port.want(want("a", 2));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kPlugging);
  EXPECT_EQ(port.snapshot().generation, 2u);
  port.want(want("a", 1));
  port.step();
  EXPECT_EQ(port.snapshot().generation, 2u) << "a late intent";
}

TEST_F(PortTest, WhatAnEarlierHostdLeftIsWaitedFor) {
  point.status_.state = PortState::kGone;
  point.status_.holder = "pid 9 (qemu)";
  port.want(want("a", 1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kGone);
  EXPECT_EQ(port.snapshot().holder, "pid 9 (qemu)");
  EXPECT_THAT(box.tried, IsEmpty());
  point.status_ = {};
  port.step();
  EXPECT_EQ(phase(), PortPhase::kPlugging);
}

TEST_F(PortTest, AnIntentWithdrawnWhileConnectingIsGivenUp) {
  for (int i = 0; i < 100; ++i) box.answers.push_back(absl::UnavailableError("no"));
  box.before_answer = [this] { port.want({}); };
  port.want(want("a", 1));
  port.step();
  EXPECT_EQ(phase(), PortPhase::kEmpty);
  EXPECT_EQ(box.tried.size(), 1u);
}

TEST_F(PortTest, RemovedOnTheHostItselfIsNotBroughtBack) {
  attach();
  point.status_.state = PortState::kEmpty;
  port.step();
  EXPECT_EQ(phase(), PortPhase::kEmpty);
  EXPECT_FALSE(port.snapshot().wants_ticket);
  EXPECT_THAT(events, ElementsAre("port.removed a"));
}

TEST(PortThreads, ASlowPortDelaysNoOther) {
  class SlowBox : public Connector {
   public:
    absl::StatusOr<std::unique_ptr<fabric::RemoteFunction>> connect(const std::string& path, const fabric::Ticket&,
                                                                    absl::Duration,
                                                                    absl::AnyInvocable<void(absl::Status)>) override {
      if (path == "slow") {
        absl::MutexLock lock(&mutex);
        mutex.AwaitWithTimeout(absl::Condition(&release), absl::Seconds(30));
        return absl::UnavailableError("slow");
      }
      return std::unique_ptr<fabric::RemoteFunction>(new FakeRemote(1, calls));
    }
    absl::Mutex mutex;
    bool release = false;
    std::vector<std::string> calls;
  } box;
  FakeAttach points[2];
  std::vector<std::unique_ptr<Port>> ports;
  for (uint32_t i = 0; i < 2; ++i) {
    ports.push_back(std::make_unique<Port>(i, points[i], box, PortDeadlines{}, base::Clock::real(),
                                           PortCallbacks{[] {}, [](auto&&...) {}}));
  }
  {
    PortThread a(*ports[0]), b(*ports[1]);
    ports[0]->want(want("a", 1, {"slow"}));
    ports[1]->want(want("b", 1, {"fast"}));
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (ports[1]->snapshot().phase != PortPhase::kPlugging && absl::Now() < end)
      absl::SleepFor(absl::Milliseconds(2));
    EXPECT_EQ(ports[1]->snapshot().phase, PortPhase::kPlugging);
    EXPECT_EQ(ports[0]->snapshot().phase, PortPhase::kConnecting);
    absl::MutexLock lock(&box.mutex);
    box.release = true;
  }
  for (auto& port : ports) port->unplug("test ends");
}

}  // namespace
}  // namespace dxpu::host
