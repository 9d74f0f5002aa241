// Agents that come, go, lie, or are there twice.
#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "fake_pool.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::HasSubstr;

class AgentsTest : public PoolTest {
 protected:
  AgentsTest() {
    pool.add_boxes(1, 2);
    pool.add_host("h1", 2);
    pool.settle();
  }
  absl::Status say(const v1::AgentMessage& message) {
    return pool.reconciler->message(std::make_shared<FakeLink>(), message);
  }
};

TEST_F(AgentsTest, TheFirstWordIsAHello) {
  v1::AgentMessage message;
  message.mutable_heartbeat();
  EXPECT_EQ(say(message).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AgentsTest, HellosAreChecked) {
  auto box = [] {
    v1::AgentMessage message;
    message.mutable_box_hello()->set_box_id("b9");
    message.mutable_box_hello()->set_boot_id("x");
    message.mutable_box_hello()->add_paths("p");
    return message;
  };
  auto add_slot = [](v1::AgentMessage& m, uint32_t slot, const std::string& model) {
    m.mutable_box_hello()->add_slots()->set_slot(slot);
    m.mutable_box_hello()->mutable_slots()->rbegin()->set_model(model);
  };
  std::vector<std::pair<v1::AgentMessage, std::string>> bad;
  bad.emplace_back(box(), "must match");
  bad.back().first.mutable_box_hello()->set_box_id("B 9");
  bad.emplace_back(box(), "boot_id");
  bad.back().first.mutable_box_hello()->clear_boot_id();
  bad.emplace_back(box(), "no path");
  bad.back().first.mutable_box_hello()->clear_paths();
  bad.emplace_back(box(), "described twice");
  add_slot(bad.back().first, 1, "m");
  add_slot(bad.back().first, 1, "m");
  bad.emplace_back(box(), "needs a model");
  add_slot(bad.back().first, 1, "");
  bad.emplace_back(box(), "is not below");
  add_slot(bad.back().first, 1u << 30, "m");
  bad.emplace_back(box(), "slots; a box may");
  for (uint32_t i = 0; i < 300; ++i) add_slot(bad.back().first, i, "m");
  bad.emplace_back(v1::AgentMessage(), "ports");
  bad.back().first.mutable_host_hello()->set_host_id("h9");
  bad.back().first.mutable_host_hello()->set_boot_id("x");
  bad.back().first.mutable_host_hello()->set_port_count(100000);
  for (const auto& [message, why] : bad) {
    absl::Status status = say(message);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
  EXPECT_EQ(pool.functions().size(), 2u);
}

TEST_F(AgentsTest, FactsAboutWhatWasNotDescribedEndTheStream) {
  v1::AgentMessage message;
  message.mutable_box_facts()->add_slots()->set_slot(7);
  EXPECT_EQ(pool.reconciler->message(pool.box("b1").link, message).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(pool.reconciler->boxes({})->boxes(0).agent().connected());
  pool.box("b1").link = nullptr;
  ASSERT_TRUE(pool.box("b1").connect().ok());
  message.Clear();
  message.mutable_host_facts();
  EXPECT_FALSE(pool.reconciler->message(pool.box("b1").link, message).ok());
  pool.box("b1").link = nullptr;
}

TEST_F(AgentsTest, TwoAgentsWithOneIdTheNewerWaitsForTheOldersSilence) {
  auto old = pool.host("h1").link;
  pool.host("h1").boot = "boot-2";
  absl::Status status = pool.host("h1").connect();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("boot-1"));
  EXPECT_TRUE(old->closed.ok());
  // Silent for long enough: it may.
  pool.clock.advance(pool.options.silence);
  ASSERT_TRUE(pool.host("h1").connect().ok());
  EXPECT_FALSE(old->closed.ok());
  EXPECT_EQ(pool.reconciler->hosts({})->hosts(0).agent().boot_id(), "boot-2");
  // What the old stream still says is not heard; its end ends nothing.
  pool.reconciler->disconnected(old.get());
  EXPECT_TRUE(pool.reconciler->hosts({})->hosts(0).agent().connected());
}

TEST_F(AgentsTest, TheSameBootMayReplaceItsOwnStreamAtOnce) {
  auto old = pool.host("h1").link;
  ASSERT_TRUE(pool.host("h1").connect().ok());
  EXPECT_FALSE(old->closed.ok());
}

TEST_F(AgentsTest, SilentAgentsAreClosedAndHeartbeatsKeepThem) {
  auto box = pool.box("b1").link;
  auto host = pool.host("h1").link;
  v1::AgentMessage beat;
  beat.mutable_heartbeat();
  for (int i = 0; i < 12; ++i) {
    pool.clock.advance(absl::Seconds(1));
    ASSERT_TRUE(pool.reconciler->message(box, beat).ok());
    pool.reconciler->tick();
  }
  EXPECT_TRUE(box->closed.ok());
  EXPECT_EQ(host->closed.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(pool.reconciler->hosts({})->hosts(0).agent().connected());
  int beats = 0;
  for (const v1::ManagerMessage& m : box->sent) beats += m.has_heartbeat();
  EXPECT_GE(beats, 5);
  pool.host("h1").link = nullptr;
}

TEST_F(AgentsTest, TheirEventsAreInTheLog) {
  v1::AgentMessage message;
  message.mutable_heartbeat();
  v1::AgentEvent& event = *message.add_events();
  event.set_type("worker.died");
  event.set_subject("b1/0");
  event.set_message(std::string(5000, 'm'));
  event.set_attachment_id("att-1");
  ASSERT_TRUE(pool.reconciler->message(pool.box("b1").link, message).ok());
  absl::StatusOr<std::vector<EventRecord>> events = pool.store->events(0, "att-1", 10);
  ASSERT_EQ(events->size(), 1u);
  EXPECT_EQ(events->front().type, "worker.died");
  EXPECT_EQ(events->front().message.size(), kMaxText);
}

TEST_F(AgentsTest, ASlotThatIsNoLongerDescribedIsMissing) {
  pool.box("b1").disconnect();
  FakeBox::Slot slot = pool.box("b1").slots[1];
  pool.box("b1").slots.erase(1);
  ASSERT_TRUE(pool.box("b1").connect().ok());
  pool.settle();
  EXPECT_EQ(pool.function("b1/1").status().conditions_size(), 1);
  v1::AttachRequest request;
  request.set_host_id("h1");
  request.set_count(2);
  EXPECT_THAT(std::string(pool.try_attach(request).status().message()), HasSubstr("1 missing"));
  pool.box("b1").disconnect();
  pool.box("b1").slots[1] = slot;
  ASSERT_TRUE(pool.box("b1").connect().ok());
  pool.settle();
  EXPECT_EQ(pool.function("b1/1").status().conditions_size(), 0);
}

TEST_F(AgentsTest, ABoxThatScrubsOnItsOwnIsFollowed) {
  pool.box("b1").scrubs = false;
  pool.box("b1").die(0, "");
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_SCRUBBING);
  pool.box("b1").scrubs = true;
  pool.settle();
  EXPECT_EQ(pool.function("b1/0").status().lifecycle(), v1::LIFECYCLE_FREE);
}

TEST(OptionsRules, DeadlinesThatDoNotGoTogetherAreNamed) {
  Options options;
  EXPECT_TRUE(options.check().ok());
  options.heartbeat = absl::Seconds(6);
  EXPECT_THAT(std::string(options.check().message()), HasSubstr("--agent-silence"));
  options = {};
  options.plug = absl::Minutes(4);
  EXPECT_THAT(std::string(options.check().message()), HasSubstr("--plug-timeout"));
  options = {};
  options.link = absl::Minutes(2);
  EXPECT_THAT(std::string(options.check().message()), HasSubstr("--ticket-life"));
  options = {};
  options.unplug = absl::ZeroDuration();
  EXPECT_EQ(options.check().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dxpu::poolmgr
