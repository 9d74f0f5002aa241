// Detach: graceful, refused, forced, without the host, with a holder that never closes.
#include <gmock/gmock.h>

#include <algorithm>

#include "fake_pool.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DetachTest : public PoolTest {
 protected:
  DetachTest() {
    pool.add_boxes(1, 2);
    pool.add_host("h1", 2);
    pool.settle();
    id = pool.attach(1).attachments(0).id();
    pool.settle();
    EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
    attached_history = pool.history("b1/0").size();
  }
  std::vector<std::string> tail(const std::string& subject, size_t from) {
    std::vector<std::string> all = pool.history(subject);
    return {all.begin() + static_cast<ptrdiff_t>(from), all.end()};
  }
  std::string id;
  size_t attached_history;
};

TEST_F(DetachTest, TheWholeLife) {
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(id);
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_QUIESCING);
  EXPECT_TRUE(pool.box("b1").slots[0].intent.serve());
  pool.settle();
  v1::Operation op = pool.operation(r->operation().id());
  EXPECT_TRUE(op.done());
  EXPECT_EQ(op.error_code(), 0) << op.error_message();
  for (const v1::Step& step : op.steps()) EXPECT_EQ(step.state(), v1::STEP_STATE_DONE) << step.name();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
  EXPECT_THAT(tail("b1/0", attached_history),
              ElementsAre("ATTACHED → DRAINING", "DRAINING → DETACHING", "DETACHING → SCRUBBING",
                          "SCRUBBING → VALIDATING", "VALIDATING → FREE"));
  EXPECT_THAT(tail(id, 4), ElementsAre("ATTACHED → QUIESCING", "QUIESCING → UNPLUGGING", "UNPLUGGING → UNLINKING",
                                       "UNLINKING → ENDED"));
  // Who asks for the attachment's events sees the proof that nothing of it survives.
  absl::StatusOr<std::vector<EventRecord>> events = pool.store->events(0, id, 1'000);
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(std::count_if(events->begin(), events->end(),
                          [](const EventRecord& e) { return e.message.starts_with("VALIDATING → FREE"); }),
            1);
  absl::StatusOr<v1::DetachResponse> again = pool.try_detach(id);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool.try_detach("att-none").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(DetachTest, ABoxQuickerThanItsReportsLeavesTheSameHistory) {
  pool.box("b1").quick = true;
  ASSERT_TRUE(pool.try_detach(id).ok());
  pool.settle();
  EXPECT_THAT(tail("b1/0", attached_history),
              ElementsAre("ATTACHED → DRAINING", "DRAINING → DETACHING", "DETACHING → SCRUBBING",
                          "SCRUBBING → VALIDATING", "VALIDATING → FREE"));
}

TEST_F(DetachTest, InUseIsRefusedWithTheHoldersName) {
  pool.host("h1").holders[1] = "pid 123 (qemu-system-x86)";
  pool.host("h1").publish();
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(id);
  EXPECT_EQ(r.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(r.status().message()), HasSubstr("pid 123 (qemu-system-x86)"));
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

TEST_F(DetachTest, ForcedWithAHolderThatNeverCloses) {
  pool.host("h1").holders[1] = "pid 123 (qemu-system-x86)";
  pool.host("h1").publish();
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(id, true);
  ASSERT_TRUE(r.ok()) << r.status();
  pool.settle();
  // The function is back, scrubbed; the port is not.
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_THAT(tail("b1/0", attached_history), ElementsAre("ATTACHED → DETACHING", "DETACHING → SCRUBBING",
                                                          "SCRUBBING → VALIDATING", "VALIDATING → FREE"));
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_UNPLUGGING);
  EXPECT_THAT(pool.attachment(id).reason(), HasSubstr("pid 123"));
  EXPECT_TRUE(pool.operation(r->operation().id()).done());
  EXPECT_EQ(pool.operation(r->operation().id()).error_code(), 0);
  v1::AttachResponse next = pool.attach(1);
  EXPECT_EQ(next.attachments(0).port(), 2u);
  EXPECT_EQ(next.attachments(0).slot(), 0u);
  pool.host("h1").holders.clear();
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
  EXPECT_EQ(pool.attachment(next.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

TEST_F(DetachTest, AHolderThatComesInBetweenIsNamedAtTheDeadline) {
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(id);
  pool.host("h1").holders[1] = "pid 7 (late)";
  pool.settle();
  pool.pass(absl::Minutes(3));
  v1::Operation op = pool.operation(r->operation().id());
  EXPECT_TRUE(op.done());
  EXPECT_EQ(op.error_code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(op.error_message(), HasSubstr("pid 7 (late)"));
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);  // GONE: the box is not held up
  pool.host("h1").holders.clear();
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
}

TEST_F(DetachTest, AHostThatIgnoresAGracefulDetachKeepsItUntilForced) {
  pool.host("h1").deaf = true;
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(id);
  pool.pass(absl::Minutes(3));
  EXPECT_EQ(pool.operation(r->operation().id()).error_code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_QUIESCING);
  EXPECT_TRUE(pool.box("b1").slots[0].intent.serve());
  ASSERT_TRUE(pool.try_detach(id, true).ok());
  pool.settle();
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
  pool.host("h1").deaf = false;
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
}

TEST_F(DetachTest, WithoutTheHostTheBoxRevokesAndScrubs) {
  pool.pass(absl::Seconds(15));  // past the time agents have to come back
  pool.host("h1").disconnect();
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(id);
  ASSERT_TRUE(r.ok()) << r.status();
  pool.settle();
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_TRUE(pool.operation(r->operation().id()).done());
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_UNPLUGGING);
  ASSERT_TRUE(pool.host("h1").connect().ok());
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
}

TEST_F(DetachTest, WhileItIsBeingAttached) {
  pool.host("h1").stop_at = v1::PORT_PHASE_CONNECTING;
  v1::AttachResponse second = pool.attach(1);
  pool.settle();
  absl::StatusOr<v1::DetachResponse> r = pool.try_detach(second.attachments(0).id());
  ASSERT_TRUE(r.ok()) << r.status();
  pool.settle();
  EXPECT_EQ(pool.operation(second.operation().id()).error_code(), static_cast<int>(absl::StatusCode::kCancelled));
  EXPECT_TRUE(pool.operation(second.operation().id()).done());
  EXPECT_EQ(pool.operation(r->operation().id()).error_code(), 0);
  EXPECT_TRUE(pool.operation(r->operation().id()).done());
  EXPECT_EQ(pool.attachment(second.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ENDED);
}

TEST_F(DetachTest, AScrubThatFailsIsSaidAndNotFree) {
  pool.box("b1").scrub_fails = true;
  ASSERT_TRUE(pool.try_detach(id).ok());
  pool.settle();
  v1::Function f = pool.function("b1/0");
  EXPECT_EQ(f.status().lifecycle(), v1::LIFECYCLE_SCRUBBING);
  ASSERT_EQ(f.status().conditions_size(), 1);
  EXPECT_EQ(f.status().conditions(0), v1::CONDITION_UNHEALTHY);
  pool.box("b1").scrub_fails = false;
  pool.settle();
  f = pool.function("b1/0");
  EXPECT_EQ(f.status().lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_EQ(f.status().conditions_size(), 0);
}

}  // namespace
}  // namespace dxpu::poolmgr
