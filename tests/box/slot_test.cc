// The slot's machine against a fake world, in one thread and no time.
#include "proxy/box/slot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"

namespace dxpu::box {
namespace {

using fabric::TerminateReason;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

SlotRecord record_of(uint32_t slot) {
  SlotRecord record;
  record.slot = slot;
  return record;
}

class FakeWorld : public SlotWorld {
 public:
  void start_scrub(uint32_t) override { calls.push_back("scrub"); }
  void start_validate(uint32_t) override { calls.push_back("validate"); }
  void start_worker(uint32_t, const SlotTicket& t) override { calls.push_back("worker " + t.attachment_id); }
  void stop_worker(uint32_t) override { calls.push_back("stop"); }
  void kill_child(uint32_t) override { calls.push_back("kill"); }
  absl::Status save(const SlotRecord& record) override {
    if (disk.ok()) saved = record;
    return disk;
  }
  void changed(uint32_t) override { ++changes; }
  void event(const std::string& type, uint32_t, const std::string&, const std::string& attachment) override {
    events.push_back(type + " " + attachment);
  }
  std::vector<std::string> take() { return std::exchange(calls, {}); }

  std::vector<std::string> calls, events;
  absl::Status disk;
  SlotRecord saved;
  int changes = 0;
};

SlotTicket ticket(const std::string& attachment, uint64_t generation, unsigned char fill = 7) {
  SlotTicket t;
  t.host_id = "h1";
  t.attachment_id = attachment;
  t.generation = generation;
  t.token.fill(std::byte{fill});
  return t;
}

fabric::Ticket shown(const SlotTicket& t) {
  fabric::Ticket out;
  out.host_id = t.host_id;
  out.box_id = "b1";
  out.slot = 3;
  out.attachment_id = t.attachment_id;
  out.generation = t.generation;
  out.token = t.token;
  return out;
}

class SlotTest : public ::testing::Test {
 protected:
  SlotTest() { fresh(record_of(3)); }
  void fresh(SlotRecord record) {
    slot = std::make_unique<Slot>("b1", std::move(record), SlotDeadlines{}, world, clock);
    world.calls.clear();
    world.events.clear();
  }
  void to_idle() {
    slot->begin();
    slot->job_ended(absl::OkStatus());
    slot->job_ended(absl::OkStatus());
    ASSERT_EQ(slot->state(), SlotState::kIdle);
    world.take();
  }
  WorkerStatus up(const SlotTicket& t, uint64_t epoch = 0, bool session = false) {
    WorkerStatus s;
    s.box_id = "b1";
    s.slot = 3;
    s.attachment_id = t.attachment_id;
    s.generation = t.generation;
    s.pid = 4711;
    s.epoch = epoch;
    s.session_up = session;
    return s;
  }
  void to_serving(const SlotTicket& t) {
    slot->want(t);
    slot->worker_status(up(t));
    ASSERT_EQ(slot->state(), SlotState::kServing);
    world.take();
  }
  TerminateReason admit(const fabric::Ticket& t) {
    std::string detail;
    return slot->admit(t, &epoch, &detail);
  }

  FakeWorld world;
  base::FakeClock clock;
  std::unique_ptr<Slot> slot;
  uint64_t epoch = 0;
};

TEST(SlotTable, OnlyValidatingLeadsToIdle) {
  const std::vector<SlotState> all = {SlotState::kScrubbing, SlotState::kValidating, SlotState::kIdle,
                                      SlotState::kStarting,  SlotState::kServing,    SlotState::kStopping,
                                      SlotState::kFailed};
  std::set<std::string> legal;
  for (SlotState from : all) {
    for (SlotState to : all) {
      if (allowed(from, to)) legal.insert(absl::StrCat(name_of(from), ">", name_of(to)));
    }
  }
  EXPECT_EQ(legal, (std::set<std::string>{"scrubbing>validating", "scrubbing>failed", "validating>idle",
                                          "validating>failed", "idle>starting", "starting>serving", "starting>stopping",
                                          "starting>scrubbing", "serving>stopping", "serving>scrubbing",
                                          "stopping>scrubbing", "failed>scrubbing", "failed>serving"}));
}

TEST_F(SlotTest, BeginsDirty) {
  slot->begin();
  EXPECT_EQ(slot->state(), SlotState::kScrubbing);
  slot->want(ticket("a", 1));
  EXPECT_THAT(world.take(), ElementsAre("scrub")) << "no worker on memory that is not wiped";
  slot->job_ended(absl::OkStatus());
  EXPECT_THAT(world.take(), ElementsAre("validate"));
  slot->job_ended(absl::OkStatus());
  EXPECT_THAT(world.take(), ElementsAre("worker a"));
  EXPECT_EQ(slot->state(), SlotState::kStarting);
}

TEST_F(SlotTest, AFailedValidationIsNotIdleAndIsTriedAgain) {
  slot->begin();
  slot->job_ended(absl::OkStatus());
  slot->job_ended(absl::DataLossError("byte 7 is not zero"));
  EXPECT_EQ(slot->state(), SlotState::kFailed);
  EXPECT_THAT(slot->detail(), HasSubstr("byte 7"));
  slot->want(ticket("a", 1));
  EXPECT_EQ(slot->state(), SlotState::kFailed);
  world.take();
  clock.advance(slot->tick());
  slot->tick();
  EXPECT_EQ(slot->state(), SlotState::kScrubbing);
  EXPECT_THAT(world.take(), ElementsAre("scrub"));
}

TEST_F(SlotTest, AJobThatHangsIsKilled) {
  slot->begin();
  world.take();
  clock.advance(slot->tick());
  slot->tick();
  EXPECT_THAT(world.take(), ElementsAre("kill"));
  slot->job_ended(absl::InternalError("signal 9"));
  EXPECT_EQ(slot->state(), SlotState::kFailed);
}

TEST_F(SlotTest, ServesAndReleases) {
  to_idle();
  to_serving(ticket("a", 1));
  slot->want_nothing();
  EXPECT_EQ(slot->state(), SlotState::kStopping);
  EXPECT_THAT(world.take(), ElementsAre("stop"));
  clock.advance(absl::Seconds(3));
  slot->tick();
  EXPECT_THAT(world.take(), ElementsAre("kill")) << "a worker that does not stop is killed";
  slot->worker_ended(WorkerEnd::kDied, "signal 9");
  EXPECT_EQ(slot->state(), SlotState::kScrubbing);
  EXPECT_EQ(slot->record().served_attachment, "a");
}

TEST_F(SlotTest, ADeadWorkersAttachmentIsNeverServedAgain) {
  to_idle();
  to_serving(ticket("a", 1));
  slot->worker_ended(WorkerEnd::kDied, "signal 9");
  EXPECT_THAT(world.events, ElementsAre("worker.died a"));
  slot->want(ticket("a", 2));
  slot->job_ended(absl::OkStatus());
  slot->job_ended(absl::OkStatus());
  EXPECT_EQ(slot->state(), SlotState::kIdle);
  slot->want(ticket("a", 3));
  EXPECT_EQ(slot->state(), SlotState::kIdle) << "its memory is gone";
  slot->want(ticket("b", 4));
  EXPECT_EQ(slot->state(), SlotState::kStarting);
}

TEST_F(SlotTest, AWorkerThatDiesAtItsStartIsNotStartedForEver) {
  to_idle();
  slot->want(ticket("a", 1));
  slot->worker_ended(WorkerEnd::kDied, "exit status 1");
  slot->job_ended(absl::OkStatus());
  slot->job_ended(absl::OkStatus());
  EXPECT_EQ(slot->state(), SlotState::kIdle);
  EXPECT_EQ(slot->record().served_attachment, "a") << "the pool manager sees that it is over";
}

TEST_F(SlotTest, AnotherAttachmentMeansScrubBetween) {
  to_idle();
  to_serving(ticket("a", 1));
  slot->want(ticket("b", 2));
  EXPECT_THAT(world.take(), ElementsAre("stop"));
  slot->worker_ended(WorkerEnd::kStopped, "");
  slot->job_ended(absl::OkStatus());
  slot->job_ended(absl::OkStatus());
  EXPECT_THAT(world.take(), ElementsAre("scrub", "validate", "worker b"));
}

TEST_F(SlotTest, IntentChangesWhileTheWorkerStarts) {
  to_idle();
  slot->want(ticket("a", 1));
  slot->want_nothing();
  EXPECT_EQ(slot->state(), SlotState::kStopping);
  slot->worker_status(up(ticket("a", 1)));
  EXPECT_EQ(slot->state(), SlotState::kStopping) << "a late hello of the worker changes nothing";
  slot->worker_ended(WorkerEnd::kStopped, "");
  EXPECT_EQ(slot->state(), SlotState::kScrubbing);
}

TEST_F(SlotTest, TicketIsGoodOnce) {
  to_idle();
  const SlotTicket t = ticket("a", 5);
  slot->want(t);
  EXPECT_EQ(admit(shown(t)), TerminateReason::kBusy) << "no worker yet";
  slot->worker_status(up(t));
  EXPECT_EQ(admit(shown(t)), TerminateReason::kNone);
  EXPECT_EQ(epoch, 1u);
  EXPECT_TRUE(world.saved.wanted->used) << "recorded before it is admitted";
  EXPECT_EQ(admit(shown(t)), TerminateReason::kTicketStale);
  slot->want(t);
  EXPECT_EQ(admit(shown(t)), TerminateReason::kTicketStale) << "the same intent again does not renew it";
}

TEST_F(SlotTest, NothingElseOpensTheDoor) {
  to_idle();
  const SlotTicket t = ticket("a", 5);
  to_serving(t);
  fabric::Ticket s = shown(t);
  s.token[31] = std::byte{8};
  EXPECT_EQ(admit(s), TerminateReason::kTicketUnknown);
  s = shown(t);
  s.host_id = "h2";
  EXPECT_EQ(admit(s), TerminateReason::kTicketUnknown);
  s = shown(t);
  s.box_id = "b2";
  EXPECT_EQ(admit(s), TerminateReason::kTicketUnknown);
  s = shown(t);
  s.attachment_id = "b";
  EXPECT_EQ(admit(s), TerminateReason::kTicketUnknown);
  s = shown(t);
  s.generation = 6;
  EXPECT_EQ(admit(s), TerminateReason::kTicketUnknown);
  s = shown(t);
  s.generation = 4;
  EXPECT_EQ(admit(s), TerminateReason::kTicketStale);
  EXPECT_EQ(admit(shown(t)), TerminateReason::kNone) << "refusals use nothing up";
}

TEST_F(SlotTest, ExpiredTicketIsStale) {
  to_idle();
  SlotTicket t = ticket("a", 5);
  t.expires = clock.now() + absl::Seconds(10);
  to_serving(t);
  clock.advance(absl::Seconds(10));
  EXPECT_EQ(admit(shown(t)), TerminateReason::kTicketStale);
}

TEST_F(SlotTest, AFullDiskAdmitsNobody) {
  to_idle();
  to_serving(ticket("a", 1));
  world.disk = absl::ResourceExhaustedError("No space left on device");
  EXPECT_EQ(admit(shown(ticket("a", 1))), TerminateReason::kFunctionFailed);
}

TEST_F(SlotTest, ANewGenerationKeepsTheWorkerAndBringsANewEpoch) {
  to_idle();
  to_serving(ticket("a", 1));
  ASSERT_EQ(admit(shown(ticket("a", 1))), TerminateReason::kNone);
  slot->worker_status(up(ticket("a", 1), 1, true));
  EXPECT_TRUE(slot->session_up());
  slot->want(ticket("a", 2, 9));
  EXPECT_EQ(slot->state(), SlotState::kServing);
  EXPECT_THAT(world.take(), IsEmpty());
  EXPECT_FALSE(slot->session_up()) << "the session that is up is of the generation before";
  EXPECT_EQ(slot->record().served_generation, 2u);
  EXPECT_EQ(admit(shown(ticket("a", 1))), TerminateReason::kTicketStale);
  ASSERT_EQ(admit(shown(ticket("a", 2, 9))), TerminateReason::kNone);
  EXPECT_EQ(epoch, 2u);
  slot->want(ticket("a", 1));
  EXPECT_EQ(slot->record().wanted->generation, 2u) << "a late intent";
}

TEST_F(SlotTest, RestartWithALiveWorkerServesOn) {
  SlotRecord record = record_of(3);
  record.wanted = ticket("a", 5);
  record.wanted->used = true;
  record.epoch = 4;
  record.served_attachment = "a";
  record.served_generation = 5;
  fresh(record);
  slot->adopt(up(ticket("a", 5), 4, true));
  EXPECT_EQ(slot->state(), SlotState::kServing);
  EXPECT_TRUE(slot->session_up());
  EXPECT_THAT(world.take(), IsEmpty());
  EXPECT_THAT(world.events, ElementsAre("worker.adopted a"));
  EXPECT_EQ(admit(shown(ticket("a", 5))), TerminateReason::kTicketStale) << "a used ticket stays used across a restart";
  slot->want(ticket("a", 6));
  EXPECT_EQ(admit(shown(ticket("a", 6))), TerminateReason::kNone);
  EXPECT_EQ(epoch, 5u);
}

TEST_F(SlotTest, RestartAfterTheWorkerDiedScrubsAndForgets) {
  SlotRecord record = record_of(3);
  record.wanted = ticket("a", 5);
  record.wanted->used = true;
  record.served_attachment = "a";
  record.served_generation = 5;
  fresh(record);
  slot->begin();
  EXPECT_EQ(slot->state(), SlotState::kScrubbing);
  EXPECT_THAT(world.events, ElementsAre("worker.died a"));
  slot->job_ended(absl::OkStatus());
  slot->job_ended(absl::OkStatus());
  EXPECT_EQ(slot->state(), SlotState::kIdle);
}

TEST_F(SlotTest, RestartBeforeTheWorkerServedStartsIt) {
  SlotRecord record = record_of(3);
  record.wanted = ticket("a", 5);
  fresh(record);
  slot->begin();
  slot->job_ended(absl::OkStatus());
  slot->job_ended(absl::OkStatus());
  EXPECT_THAT(world.take(), ElementsAre("scrub", "validate", "worker a"));
}

TEST_F(SlotTest, LeaseExpiryIsSaid) {
  to_idle();
  to_serving(ticket("a", 1));
  slot->worker_ended(WorkerEnd::kLeaseExpired, "nothing heard for 15s");
  EXPECT_TRUE(slot->record().lease_expired);
  EXPECT_THAT(world.events, ElementsAre("lease.expired a"));
  EXPECT_EQ(slot->state(), SlotState::kScrubbing);
}

// Whatever comes in whatever order: every state is left as the table says, and a worker runs only on validated memory.
TEST_F(SlotTest, RandomOrdersStayLegal) {
  uint64_t seed = 42;
  auto next = [&](uint64_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % n;
  };
  for (int run = 0; run < 300; ++run) {
    fresh(record_of(3));
    slot->begin();
    bool validated = false;
    for (int i = 0; i < 60; ++i) {
      switch (next(7)) {
        case 0:
          slot->want(ticket(std::string(1, static_cast<char>('a' + next(3))), next(5)));
          break;
        case 1:
          slot->want_nothing();
          break;
        case 2:
          slot->job_ended(absl::OkStatus());
          break;
        case 3:
          slot->job_ended(absl::InternalError("no"));
          break;
        case 4:
          slot->worker_status(up(ticket(slot->worker().attachment_id, 1)));
          break;
        case 5:
          slot->worker_ended(static_cast<WorkerEnd>(next(3)), "x");
          break;
        case 6:
          clock.advance(absl::Seconds(1 + next(200)));
          slot->tick();
          break;
      }
      for (const std::string& call : world.take()) {
        if (call == "scrub") validated = false;
        if (call == "validate") validated = true;  // its good end is the only way on from here
        if (call.starts_with("worker")) {
          EXPECT_TRUE(validated) << "run " << run << " step " << i;
          validated = false;
        }
      }
      if (slot->state() == SlotState::kFailed) validated = false;
    }
  }
}

}  // namespace
}  // namespace dxpu::box
