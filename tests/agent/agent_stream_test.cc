#include "proxy/agent/agent_stream.h"

#include <gtest/gtest.h>

#include "proxy/agent/daemon.h"
#include "tests/agent/fake_manager.h"

namespace dxpu::agent {
namespace {

v1::AgentMessage facts(const std::string& detail) {
  v1::AgentMessage m;
  m.mutable_box_facts()->add_slots()->set_detail(detail);
  return m;
}
std::string detail(const v1::AgentMessage& m) {
  return m.box_facts().slots_size() == 0 ? "" : m.box_facts().slots(0).detail();
}

class AgentStreamTest : public ::testing::Test {
 protected:
  void start(const std::string& address) {
    StreamOptions options;
    options.pool_address = address;
    options.longest_retry = absl::Milliseconds(300);
    StreamCallbacks callbacks;
    callbacks.hello = [] {
      v1::AgentMessage m;
      m.mutable_box_hello()->set_box_id("b1");
      return m;
    };
    callbacks.intents = [this](const v1::ManagerMessage& m) {
      absl::MutexLock lock(&mutex_);
      got_.push_back(m);
    };
    stream_ = AgentStream::start(options, callbacks);
  }
  int got() {
    absl::MutexLock lock(&mutex_);
    return static_cast<int>(got_.size());
  }
  static v1::ManagerMessage intents() {
    v1::ManagerMessage m;
    m.mutable_box_intents()->add_slots()->set_slot(0);
    return m;
  }

  absl::Mutex mutex_;
  std::vector<v1::ManagerMessage> got_;
  std::unique_ptr<AgentStream> stream_;
};

TEST_F(AgentStreamTest, HelloThenFactsThenEveryChange) {
  FakeManager manager;
  ASSERT_TRUE(manager.listening());
  start(manager.address());
  stream_->publish(facts("one"));
  ASSERT_TRUE(manager.wait([](const auto& s) { return detail(s.facts) == "one"; }));
  for (int i = 0; i < 5; ++i) stream_->publish(facts(std::to_string(i)));
  ASSERT_TRUE(manager.wait([](const auto& s) { return detail(s.facts) == "4"; }));
  auto seen = manager.seen();
  EXPECT_EQ(seen.hello.sequence(), 1u);
  EXPECT_EQ(seen.hello.box_hello().box_id(), "b1");
  ASSERT_EQ(seen.all_facts.size(), 6u) << "short phases are told too";
  for (size_t i = 0; i < seen.all_facts.size(); ++i) EXPECT_GT(seen.all_facts[i].sequence(), i + 1);
}

TEST_F(AgentStreamTest, IntentsAreAcknowledgedAfterTheyWereTaken) {
  FakeManager manager;
  start(manager.address());
  stream_->publish(facts("one"));
  ASSERT_TRUE(manager.wait([](const auto& s) { return detail(s.facts) == "one"; }));
  EXPECT_EQ(manager.seen().facts.box_facts().intents_applied(), 0u);
  const uint64_t sequence = manager.send(intents());
  ASSERT_NE(sequence, 0u);
  ASSERT_TRUE(manager.wait([&](const auto& s) { return s.facts.box_facts().intents_applied() == sequence; }));
  EXPECT_EQ(got(), 1);
}

TEST_F(AgentStreamTest, ADroppedStreamComesBackWithTheWholeSet) {
  FakeManager manager;
  start(manager.address());
  manager.send(intents());
  stream_->publish(facts("one"));
  ASSERT_TRUE(manager.wait([](const auto& s) { return s.facts.box_facts().intents_applied() != 0; }));
  manager.drop();
  ASSERT_TRUE(manager.wait([](const auto& s) { return s.streams == 2 && detail(s.facts) == "one"; }));
  const absl::Time end = absl::Now() + absl::Seconds(30);
  while (got() < 2 && absl::Now() < end) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(got(), 2);
}

TEST_F(AgentStreamTest, APoolManagerThatComesLateOrAgainIsFoundAndEventsWait) {
  int port = 0;
  {
    FakeManager first;
    port = first.port();
  }
  start("127.0.0.1:" + std::to_string(port));
  stream_->publish(facts("one"));
  stream_->event("worker.died", "b1/0", "signal 9", "a");
  FakeManager second(port);
  if (!second.listening()) GTEST_SKIP() << "the port was taken by somebody else";
  ASSERT_TRUE(second.wait_event("worker.died"));
  EXPECT_EQ(second.seen().events.size(), 1u);
}

TEST_F(AgentStreamTest, HeartbeatsInTheRhythmThatWasAsked) {
  FakeManager manager;
  manager.set_heartbeat(absl::Milliseconds(60));
  start(manager.address());
  stream_->publish(facts("one"));
  EXPECT_TRUE(manager.wait([](const auto& s) { return s.heartbeats >= 5; }));
}

TEST_F(AgentStreamTest, StopSendsWhatIsQueuedAndEnds) {
  FakeManager manager;
  start(manager.address());
  stream_->publish(facts("one"));
  ASSERT_TRUE(manager.wait([](const auto& s) { return detail(s.facts) == "one"; }));
  stream_->event("last", "b1", "words", "");
  stream_->publish(facts("two"));
  stream_->stop(absl::Seconds(5));
  EXPECT_TRUE(manager.wait_event("last"));
  stream_->publish(facts("three"));  // no effect, no crash
  stream_->stop(absl::Seconds(5));
}

TEST_F(AgentStreamTest, StopWithoutAPoolManagerIsQuick) {
  start("127.0.0.1:1");
  stream_->publish(facts("one"));
  const absl::Time begin = absl::Now();
  stream_->stop(absl::Milliseconds(200));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST(Daemon, SizesAndDurationsAndIds) {
  EXPECT_EQ(*parse_size("--memory", "256MiB"), 256u << 20);
  EXPECT_EQ(*parse_size("--memory", "4096"), 4096u);
  for (const char* bad : {"", "MiB", "0", "-1", "1.5GiB", "12MB", "99999999999TiB", "16777216TiB", "1 MiB "}) {
    EXPECT_TRUE(absl::IsInvalidArgument(parse_size("--memory", bad).status())) << bad;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(parse_duration("--lease", "15").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(parse_duration("--lease", "-1s").status()));
  EXPECT_EQ(*parse_duration("--lease", "1m30s"), absl::Seconds(90));
  EXPECT_TRUE(check_id("--id", "b1.rack-2").ok());
  for (const char* bad : {"", "B1", "-b", "b/1", "b 1"}) EXPECT_FALSE(check_id("--id", bad).ok()) << bad;
  EXPECT_FALSE(check_id("--id", std::string(64, 'a')).ok());
}

TEST(Daemon, DeadlinesOutOfOrderAreRefusedByName) {
  DeadlineFlags flags;
  ASSERT_TRUE(flags.parse().ok());
  flags.lease = "1s";
  auto parsed = flags.parse();
  ASSERT_FALSE(parsed.ok());
  EXPECT_NE(std::string(parsed.status().message()).find("lease"), std::string::npos);
  DeadlineFlags round;
  auto back = DeadlineFlags::to_flags(*round.parse());
  EXPECT_EQ(back.size(), 5u);
}

}  // namespace
}  // namespace dxpu::agent
