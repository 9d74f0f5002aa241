// Attach: the happy life, and each step failing.
#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "fake_pool.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AttachTest : public PoolTest {
 protected:
  AttachTest() {
    pool.add_boxes(2, 4);
    pool.add_host("h1", 6);
    pool.settle();
  }
  // Every function is FREE, every port is empty, nothing is under way.
  void expect_all_free() {
    for (const v1::Function& f : pool.functions()) {
      EXPECT_EQ(f.status().lifecycle(), v1::LIFECYCLE_FREE) << f.id() << " " << f.status().reason();
    }
    EXPECT_TRUE(pool.store->load()->attachments.empty());
    EXPECT_TRUE(pool.store->load()->operations.empty());
    for (const auto& [number, port] : pool.host("h1").ports) EXPECT_FALSE(port.intent.attach());
  }
};

TEST_F(AttachTest, TheWholeLife) {
  v1::AttachResponse r = pool.attach(1);
  ASSERT_EQ(r.attachments_size(), 1);
  const std::string id = r.attachments(0).id();
  EXPECT_EQ(r.attachments(0).state(), v1::ATTACHMENT_STATE_PLACED);
  pool.settle();
  v1::Attachment a = pool.attachment(id);
  EXPECT_EQ(a.state(), v1::ATTACHMENT_STATE_ATTACHED);
  EXPECT_EQ(a.bus_address(), "0001:01:00.0");
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_ATTACHED);
  EXPECT_EQ(pool.function("b1/0").status().attachment_id(), id);
  v1::Operation op = pool.operation(r.operation().id());
  EXPECT_TRUE(op.done());
  EXPECT_EQ(op.error_code(), 0);
  for (const v1::Step& step : op.steps()) EXPECT_EQ(step.state(), v1::STEP_STATE_DONE) << step.name();
  EXPECT_THAT(pool.history(id),
              ElementsAre("REQUESTED → PLACED", "PLACED → LINKING", "LINKING → PLUGGING", "PLUGGING → ATTACHED"));
  EXPECT_THAT(pool.history("b1/0"), ElementsAre("DISCOVERED → VALIDATING", "VALIDATING → FREE", "FREE → RESERVED",
                                                "RESERVED → ATTACHING", "ATTACHING → ATTACHED"));
  // Both sides were given the same ticket.
  const v1::Ticket& host_ticket = pool.host("h1").ports[1].intent.ticket();
  EXPECT_EQ(host_ticket.SerializeAsString(), pool.box("b1").slots[0].intent.ticket().SerializeAsString());
  EXPECT_EQ(host_ticket.token().size(), 32u);
  EXPECT_EQ(host_ticket.generation(), 1u);
}

TEST_F(AttachTest, TheHostIsToldOnlyWhenTheBoxServes) {
  pool.box("b1").serves = false;
  pool.attach(1);
  pool.settle();
  EXPECT_TRUE(pool.box("b1").slots[0].intent.serve());
  EXPECT_FALSE(pool.host("h1").ports[1].intent.attach());
}

TEST_F(AttachTest, StopsInNoStepForEver) {
  struct Case {
    const char* step;
    std::function<void()> block;
    const char* says;
  };
  const std::vector<Case> cases = {
      {"serve", [&] { pool.box("b1").serves = false; }, "did not serve slot 0"},
      {"link", [&] { pool.host("h1").stop_at = v1::PORT_PHASE_CONNECTING; }, "did not connect"},
      {"plug", [&] { pool.host("h1").stop_at = v1::PORT_PHASE_PLUGGING; }, "did not show"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.step);
    c.block();
    v1::AttachResponse r = pool.attach(1);
    pool.settle();
    EXPECT_FALSE(pool.operation(r.operation().id()).done());
    pool.pass(absl::Minutes(3));
    v1::Operation op = pool.operation(r.operation().id());
    EXPECT_TRUE(op.done());
    EXPECT_EQ(op.error_code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
    EXPECT_THAT(op.error_message(), HasSubstr(c.says));
    for (const v1::Step& step : op.steps()) {
      if (step.name() == c.step) {
        EXPECT_EQ(step.state(), v1::STEP_STATE_FAILED);
      }
      if (step.name() == "undo") {
        EXPECT_EQ(step.state(), v1::STEP_STATE_DONE);
      }
    }
    EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_FAILED);
    EXPECT_THAT(pool.attachment(r.attachments(0).id()).reason(), HasSubstr(c.says));
    pool.box("b1").serves = true;
    pool.host("h1").stop_at = v1::PORT_PHASE_ATTACHED;
    expect_all_free();
  }
  // What was served is scrubbed; what never was is not said to be.
  EXPECT_THAT(
      pool.history("b1/0"),
      ElementsAre("DISCOVERED → VALIDATING", "VALIDATING → FREE", "FREE → RESERVED", "RESERVED → ATTACHING",
                  "ATTACHING → DETACHING", "DETACHING → VALIDATING", "VALIDATING → FREE", "FREE → RESERVED",
                  "RESERVED → ATTACHING", "ATTACHING → DETACHING", "DETACHING → SCRUBBING", "SCRUBBING → VALIDATING",
                  "VALIDATING → FREE", "FREE → RESERVED", "RESERVED → ATTACHING", "ATTACHING → DETACHING",
                  "DETACHING → SCRUBBING", "SCRUBBING → VALIDATING", "VALIDATING → FREE"));
}

TEST_F(AttachTest, AHostThatSaysNoIsBelievedAtOnce) {
  pool.host("h1").fails = "the window is too small for BAR 2";
  v1::AttachResponse r = pool.attach(1);
  pool.settle();
  v1::Operation op = pool.operation(r.operation().id());
  EXPECT_TRUE(op.done());
  EXPECT_EQ(op.error_code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_THAT(op.error_message(), HasSubstr("window is too small"));
  expect_all_free();
}

TEST_F(AttachTest, AWorkerThatDiesWhileLinkingEndsIt) {
  pool.host("h1").stop_at = v1::PORT_PHASE_CONNECTING;
  v1::AttachResponse r = pool.attach(1);
  pool.settle();
  pool.box("b1").die(0, "signal 9");
  pool.settle();
  EXPECT_THAT(pool.operation(r.operation().id()).error_message(), HasSubstr("signal 9"));
  expect_all_free();
}

TEST_F(AttachTest, AllOrNothing) {
  pool.box("b2").serves = false;
  v1::AttachResponse r = pool.attach(6);  // needs both boxes
  ASSERT_EQ(r.attachments_size(), 6);
  pool.settle();
  pool.pass(absl::Minutes(2));
  EXPECT_TRUE(pool.operation(r.operation().id()).done());
  for (const v1::Attachment& a : r.attachments())
    EXPECT_EQ(pool.attachment(a.id()).state(), v1::ATTACHMENT_STATE_FAILED);
  expect_all_free();
}

TEST_F(AttachTest, AHostThatNeverAnswersIsLeftBehind) {
  v1::AttachResponse r = pool.attach(1);
  pool.host("h1").deaf = true;
  pool.settle();
  pool.pass(absl::Minutes(3));
  EXPECT_EQ(pool.operation(r.operation().id()).error_code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  // The box was revoked and scrubbed without it; its port stays taken until it says that it is empty.
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_UNPLUGGING);
  v1::AttachResponse second = pool.attach(1);
  EXPECT_EQ(second.attachments(0).port(), 2u);
  pool.host("h1").deaf = false;
  pool.settle();
  EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_FAILED);
  EXPECT_EQ(pool.attachment(second.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

TEST_F(AttachTest, FactsOfAnOlderGenerationAreIgnored) {
  v1::AttachResponse r = pool.attach(1);
  pool.host("h1").deaf = true;
  while (pool.step()) {
  }
  v1::PortFact& fact = pool.host("h1").ports[1].fact;
  fact.set_attachment_id(r.attachments(0).id());
  fact.set_generation(0);
  fact.set_phase(v1::PORT_PHASE_FAILED);
  pool.host("h1").publish();
  EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_LINKING);
  fact.set_phase(v1::PORT_PHASE_EMPTY);
  fact.clear_attachment_id();
  pool.host("h1").deaf = false;
  pool.settle();
  EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

TEST_F(AttachTest, TwoAttachesNeverShareASlotOrAPort) {
  std::set<std::string> slots;
  std::set<uint32_t> ports;
  for (int i = 0; i < 3; ++i) {
    v1::AttachResponse r = pool.attach(2);
    for (const v1::Attachment& a : r.attachments()) {
      EXPECT_TRUE(slots.insert(absl::StrCat(a.box_id(), "/", a.slot())).second);
      EXPECT_TRUE(ports.insert(a.port()).second);
    }
  }
  v1::AttachRequest one_more;
  one_more.set_host_id("h1");
  one_more.set_count(1);
  absl::StatusOr<v1::AttachResponse> refused = pool.try_attach(one_more);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("0 free ports of 6"));
  pool.settle();
}

TEST_F(AttachTest, ANewSessionOfTheHostGetsANewTicketForBothSides) {
  v1::AttachResponse r = pool.attach(1);
  pool.settle();
  const std::string id = r.attachments(0).id();
  FakeHost& host = pool.host("h1");
  host.ports[1].fact.set_wants_ticket(true);
  host.ports[1].fact.set_phase(v1::PORT_PHASE_GONE);
  host.publish();
  EXPECT_EQ(pool.attachment(id).generation(), 2u);
  // Until the box has it, the host is still offered the old one, never told to let go.
  host.act();
  EXPECT_TRUE(host.ports[1].intent.attach());
  EXPECT_EQ(host.ports[1].intent.ticket().generation(), 1u);
  // What the host still says about the old one, when the box has the new one already, asks for no third.
  pool.clock.advance(pool.options.ticket_pause * 2);
  pool.box("b1").act();
  host.publish();
  pool.settle();
  EXPECT_EQ(host.ports[1].intent.ticket().generation(), 2u);
  EXPECT_EQ(pool.box("b1").slots[0].fact.generation(), 2u);
  EXPECT_EQ(pool.box("b1").slots[0].tokens.size(), 2u);
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
  EXPECT_EQ(host.ports[1].fact.phase(), v1::PORT_PHASE_ATTACHED);
}

}  // namespace
}  // namespace dxpu::poolmgr
