// One side stops holding an attachment, or stops speaking.
#include <gmock/gmock.h>

#include "fake_pool.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

class LossTest : public PoolTest {
 protected:
  LossTest() {
    pool.add_boxes(1, 2);
    pool.add_host("h1", 2);
    pool.settle();
    id = pool.attach(1).attachments(0).id();
    pool.settle();
  }
  void expect_taken_apart(const std::string& why) {
    EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_FAILED);
    EXPECT_THAT(pool.attachment(id).reason(), HasSubstr(why));
    EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
    EXPECT_EQ(pool.host("h1").ports[1].fact.phase(), v1::PORT_PHASE_EMPTY);
    EXPECT_THAT(pool.history(id), IsSupersetOf({"ATTACHED → LOST", "LOST → FAILED"}));
    EXPECT_THAT(pool.history("b1/0"),
                IsSupersetOf({"ATTACHED → DETACHING", "DETACHING → SCRUBBING", "SCRUBBING → VALIDATING"}));
  }
  std::string id;
};

TEST_F(LossTest, TheWorkerDies) {
  pool.box("b1").die(0, "worker died: signal 9");
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_LOST);
  pool.host("h1").act();
  EXPECT_FALSE(pool.host("h1").ports[1].intent.attach());
  EXPECT_TRUE(pool.host("h1").ports[1].intent.force());
  pool.settle();
  expect_taken_apart("signal 9");
}

TEST_F(LossTest, TheWorkerDiesUnderAHolder) {
  pool.host("h1").holders[1] = "pid 5 (vfio)";
  pool.box("b1").die(0, "signal 9");
  pool.settle();
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_LOST);
  pool.host("h1").holders.clear();
  pool.settle();
  expect_taken_apart("signal 9");
}

TEST_F(LossTest, TheLeaseRunsOut) {
  pool.box("b1").slots[0].fact.set_lease_expired(true);
  pool.box("b1").die(0, "");
  pool.settle();
  expect_taken_apart("lease of host h1");
}

TEST_F(LossTest, TheHostLosesIt) {
  for (v1::PortPhase phase : {v1::PORT_PHASE_GONE, v1::PORT_PHASE_FAILED, v1::PORT_PHASE_EMPTY}) {
    SCOPED_TRACE(phase);
    pool.host("h1").ports[1].fact.set_phase(phase);
    pool.host("h1").ports[1].fact.set_detail("link lost");
    pool.host("h1").publish();
    EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_LOST);
    pool.settle();
    pool.host("h1").ports[1].fact.set_phase(v1::PORT_PHASE_EMPTY);
    pool.host("h1").publish();
    pool.settle();
    expect_taken_apart("link lost");
    pool.host("h1").ports[1].fact.clear_detail();
    id = pool.attach(1).attachments(0).id();
    pool.settle();
    ASSERT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
  }
}

TEST_F(LossTest, AHostThatForgotItHasTheTimeToTakeItUpAgain) {
  pool.host("h1").deaf = true;
  pool.host("h1").ports[1].intent.Clear();
  pool.host("h1").ports[1].fact.Clear();
  pool.host("h1").ports[1].fact.set_port(1);
  pool.host("h1").ports[1].fact.set_phase(v1::PORT_PHASE_EMPTY);
  pool.pass(absl::Seconds(20));
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
  pool.pass(absl::Seconds(20));
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_LOST);
  pool.host("h1").deaf = false;
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_FAILED);
}

TEST_F(LossTest, SilenceDetachesNothingAndPlacesNothing) {
  pool.box("b1").disconnect();
  pool.host("h1").disconnect();
  pool.pass(absl::Hours(2));
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
  v1::Function f = pool.function("b1/1");
  ASSERT_EQ(f.status().conditions_size(), 1);
  EXPECT_EQ(f.status().conditions(0), v1::CONDITION_MISSING);
  ASSERT_TRUE(pool.host("h1").connect().ok());
  v1::AttachRequest request;
  request.set_host_id("h1");
  request.set_count(1);
  absl::StatusOr<v1::AttachResponse> refused = pool.try_attach(request);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("2 box-not-connected"));
  ASSERT_TRUE(pool.box("b1").connect().ok());
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ATTACHED);
  EXPECT_EQ(pool.box("b1").slots[0].fact.phase(), v1::SLOT_PHASE_SERVING);
}

TEST_F(LossTest, ABoxThatWasRebootedIsNotAskedToServeTheOldBindingAnew) {
  pool.box("b1").disconnect();
  pool.box("b1").boot = "boot-2";
  pool.box("b1").slots[0].fact.Clear();
  pool.box("b1").slots[0].fact.set_phase(v1::SLOT_PHASE_IDLE);
  pool.box("b1").slots[0].intent.Clear();
  ASSERT_TRUE(pool.box("b1").connect().ok());
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_LOST);
  pool.settle();
  EXPECT_NE(pool.box("b1").slots[0].fact.phase(), v1::SLOT_PHASE_SERVING);
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_FAILED);
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
}

// The pool manager has lost its memory: what agents hold is taken apart, but only after a grace.
TEST_F(LossTest, UnknownAttachmentsAreTakenApartAfterTheGrace) {
  pool.reconciler.reset();
  pool.store.reset();
  for (const char* suffix : {"", "-wal", "-shm"}) std::remove((pool.dir + "/pool.db" + suffix).c_str());
  pool.start();
  pool.box("b1").link = nullptr;
  pool.host("h1").link = nullptr;
  ASSERT_TRUE(pool.box("b1").connect().ok());
  ASSERT_TRUE(pool.host("h1").connect().ok());
  pool.settle();
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_DETACHING);
  EXPECT_EQ(pool.function("b1/1").status().lifecycle(), v1::LIFECYCLE_FREE);
  pool.pass(absl::Minutes(9));
  EXPECT_EQ(pool.box("b1").slots[0].fact.phase(), v1::SLOT_PHASE_SERVING);
  EXPECT_EQ(pool.host("h1").ports[1].fact.phase(), v1::PORT_PHASE_ATTACHED);
  // Nothing new lands there meanwhile.
  v1::AttachResponse other = pool.attach(1);
  EXPECT_EQ(other.attachments(0).slot(), 1u);
  EXPECT_EQ(other.attachments(0).port(), 2u);
  pool.pass(absl::Minutes(2));
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
  EXPECT_EQ(pool.host("h1").ports[1].fact.phase(), v1::PORT_PHASE_EMPTY);
  EXPECT_THAT(pool.history("b1/0"), ElementsAre("DISCOVERED → DETACHING", "DETACHING → SCRUBBING",
                                                "SCRUBBING → VALIDATING", "VALIDATING → FREE"));
  // Generations go on from where the box had them.
  EXPECT_GE(pool.function("b1/0").status().generation(), 1u);
}

TEST_F(LossTest, ABoxThatNeverComesBackIsRemovedByAnOperator) {
  pool.box("b1").disconnect();
  v1::RemoveBoxRequest request;
  request.set_id("b1");
  EXPECT_EQ(pool.reconciler->remove_box(request).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(pool.try_detach(id, true).ok());
  pool.settle();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_UNLINKING);
  absl::StatusOr<v1::RemoveBoxResponse> removed = pool.reconciler->remove_box(request);
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
  EXPECT_TRUE(pool.functions().empty());
}

TEST_F(LossTest, AHostThatNeverComesBackIsRemovedByAnOperator) {
  v1::RemoveHostRequest request;
  request.set_id("h1");
  EXPECT_EQ(pool.reconciler->remove_host(request).status().code(), absl::StatusCode::kFailedPrecondition);
  pool.host("h1").disconnect();
  EXPECT_EQ(pool.reconciler->remove_host(request).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(pool.try_detach(id, true).ok());
  pool.settle();
  ASSERT_TRUE(pool.reconciler->remove_host(request).ok());
  EXPECT_EQ(pool.attachment(id).state(), v1::ATTACHMENT_STATE_ENDED);
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
}

}  // namespace
}  // namespace dxpu::poolmgr
