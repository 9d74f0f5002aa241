// The pool manager is destroyed and made again on the same database after every single step; and the disk is full.
#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "fake_pool.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::HasSubstr;

class RestartTest : public PoolTest {
 protected:
  RestartTest() {
    pool.add_boxes(2, 2);
    pool.add_host("h1", 3);
    pool.settle();
  }
};

TEST_F(RestartTest, AfterEachStepOfAttachAndDetach) {
  for (int after = 0; after < 12; ++after) {
    SCOPED_TRACE(absl::StrCat("attach, restarted after ", after, " steps"));
    v1::AttachResponse r = pool.attach(2);
    ASSERT_EQ(r.attachments_size(), 2);
    for (int i = 0; i < after; ++i) pool.step();
    pool.restart();
    pool.settle();
    for (const v1::Attachment& a : r.attachments()) {
      ASSERT_EQ(pool.attachment(a.id()).state(), v1::ATTACHMENT_STATE_ATTACHED) << pool.attachment(a.id()).reason();
      ASSERT_EQ(pool.attachment(a.id()).generation(), a.generation());  // no ticket was lost on the way
    }
    EXPECT_TRUE(pool.operation(r.operation().id()).done());

    SCOPED_TRACE(absl::StrCat("detach, restarted after ", after, " steps"));
    pool.clock.advance(pool.options.silence * 2);
    std::vector<std::string> operations;
    for (const v1::Attachment& a : r.attachments()) {
      absl::StatusOr<v1::DetachResponse> d = pool.try_detach(a.id(), after % 2 == 1);
      ASSERT_TRUE(d.ok()) << d.status();
      operations.push_back(d->operation().id());
    }
    for (int i = 0; i < after; ++i) pool.step();
    pool.restart();
    pool.settle();
    for (const v1::Attachment& a : r.attachments())
      ASSERT_EQ(pool.attachment(a.id()).state(), v1::ATTACHMENT_STATE_ENDED);
    for (const std::string& op : operations) {
      EXPECT_TRUE(pool.operation(op).done());
      EXPECT_EQ(pool.operation(op).error_code(), 0);
    }
    for (const v1::Function& f : pool.functions()) ASSERT_EQ(f.status().lifecycle(), v1::LIFECYCLE_FREE);
  }
  EXPECT_TRUE(pool.store->load()->attachments.empty());
  EXPECT_TRUE(pool.store->load()->operations.empty());
}

TEST_F(RestartTest, AfterEachStepOfALoss) {
  for (int after = 0; after < 8; ++after) {
    SCOPED_TRACE(after);
    v1::AttachResponse r = pool.attach(1);
    pool.settle();
    pool.box(r.attachments(0).box_id()).die(r.attachments(0).slot(), "signal 9");
    for (int i = 0; i < after; ++i) pool.step();
    pool.restart();
    pool.settle();
    EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_FAILED);
    for (const v1::Function& f : pool.functions()) ASSERT_EQ(f.status().lifecycle(), v1::LIFECYCLE_FREE);
  }
}

TEST_F(RestartTest, AfterEachStepOfANewTicket) {
  for (int after = 0; after < 5; ++after) {
    SCOPED_TRACE(after);
    v1::AttachResponse r = pool.attach(1);
    pool.settle();
    v1::PortFact& fact = pool.host("h1").ports[1].fact;
    fact.set_wants_ticket(true);
    fact.set_phase(v1::PORT_PHASE_GONE);
    pool.host("h1").publish();
    for (int i = 0; i < after; ++i) pool.step();
    pool.restart();
    pool.pass(absl::Seconds(3));
    EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
    EXPECT_EQ(fact.phase(), v1::PORT_PHASE_ATTACHED);
    pool.clock.advance(pool.options.silence * 2);
    ASSERT_TRUE(pool.try_detach(r.attachments(0).id(), true).ok());
    pool.settle();
  }
}

TEST_F(RestartTest, DeadForALongTimeItDetachesNothing) {
  v1::AttachResponse attached = pool.attach(1);
  pool.settle();
  v1::AttachResponse half = pool.attach(1);
  pool.step();
  pool.reconciler.reset();
  pool.store.reset();
  pool.clock.advance(absl::Hours(10));
  pool.start();
  pool.reconciler->tick();  // before any agent is back: no deadline may fire
  EXPECT_EQ(pool.attachment(attached.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
  EXPECT_FALSE(pool.operation(half.operation().id()).done());
  for (auto& [id, b] : pool.boxes) ASSERT_TRUE(b->connect().ok());
  for (auto& [id, h] : pool.hosts) ASSERT_TRUE(h->connect().ok());
  pool.settle();
  EXPECT_EQ(pool.attachment(attached.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
  EXPECT_EQ(pool.attachment(half.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

TEST_F(RestartTest, UsersThatCanNotBeAskedYetAreNotPassedOver) {
  v1::AttachResponse r = pool.attach(1);
  pool.settle();
  pool.reconciler.reset();
  pool.store.reset();
  pool.start();
  absl::StatusOr<v1::DetachResponse> refused = pool.try_detach(r.attachments(0).id());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("not come back"));
}

TEST_F(RestartTest, AFullDiskIsAnErrorAndPasses) {
  const std::string long_owner(120, 'o');
  pool.reconciler.reset();
  pool.store.reset();
  pool.max_pages = 45;
  pool.start();
  for (auto& [id, b] : pool.boxes) {
    b->link = nullptr;
    ASSERT_TRUE(b->connect().ok());
  }
  pool.host("h1").link = nullptr;
  ASSERT_TRUE(pool.host("h1").connect().ok());
  pool.settle();
  absl::Status status;
  std::string last;
  for (int i = 0; i < 500 && status.ok(); ++i) {
    v1::AttachRequest request;
    request.set_host_id("h1");
    request.set_count(1);
    request.set_owner(long_owner);
    absl::StatusOr<v1::AttachResponse> r = pool.try_attach(request);
    status = r.status();
    if (!r.ok()) break;
    pool.settle();
    last = r->attachments(0).id();
    absl::StatusOr<v1::DetachResponse> d = pool.try_detach(last, true);
    status = d.status();
    pool.settle();
  }
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("disk is full"));
  // It lives, answers, and everything is legal; with room again it goes on by itself.
  EXPECT_TRUE(pool.reconciler->pool().ok());
  pool.check_legal();
  pool.max_pages = 0;
  pool.restart();
  pool.pass(absl::Seconds(15));
  v1::AttachResponse r = pool.attach(1);
  pool.settle();
  EXPECT_EQ(pool.attachment(r.attachments(0).id()).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

}  // namespace
}  // namespace dxpu::poolmgr
