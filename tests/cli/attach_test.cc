// attach, detach and events --follow: what they ask for, how they wait, what they say when it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/golden.h"
#include "tests/cli/run_dxpu.h"
#include "tests/cli/sample_pool.h"

namespace dxpu::cli {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class Attach : public testing::Test {
 protected:
  Attach() { fill_sample(fake_); }
  Ran dxpu(std::vector<std::string> arguments, RunOptions options = {}) {
    return run_dxpu(std::move(arguments), fake_.address(), options);
  }
  FakePool fake_;
};

TEST_F(Attach, EveryOptionReachesThePoolManager) {
  ASSERT_EQ(dxpu({"attach", "--host", "vm1", "--count", "2", "--model", "dxpu-soft", "--memory", "200MiB", "--same-box",
                  "--owner", "alice", "--timeout", "1m30s", "--request-id", "r-1"})
                .exit,
            0);
  const v1::AttachRequest& request = fake_.attach_request;
  EXPECT_EQ(request.host_id(), "vm1");
  EXPECT_EQ(request.count(), 2u);
  EXPECT_EQ(request.model(), "dxpu-soft");
  EXPECT_EQ(request.min_memory_bytes(), 200ull << 20);
  EXPECT_TRUE(request.same_box());
  EXPECT_EQ(request.owner(), "alice");
  EXPECT_EQ(request.timeout().seconds(), 90);
  EXPECT_EQ(request.request_id(), "r-1");
  EXPECT_EQ(request.function_id(), "");
}

TEST_F(Attach, OneFunctionByName) {
  ASSERT_EQ(dxpu({"attach", "--host", "vm1", "--gpu", "b1/0"}).exit, 0);
  EXPECT_EQ(fake_.attach_request.function_id(), "b1/0");
  EXPECT_EQ(fake_.attach_request.count(), 1u);
}

TEST_F(Attach, ARequestWithoutANameGetsAFreshOne) {
  ASSERT_EQ(dxpu({"attach", "--host", "vm1"}).exit, 0);
  const std::string first = fake_.attach_request.request_id();
  ASSERT_EQ(dxpu({"attach", "--host", "vm1"}).exit, 0);
  EXPECT_THAT(first, StartsWith("cli-"));
  EXPECT_NE(first, fake_.attach_request.request_id());
}

TEST_F(Attach, WaitPrintsWhereItIsAndHowLongItTook) {
  fake_.waits = {attach_operation(1), attach_operation(2), attach_operation(4)};
  const Ran ran = dxpu({"attach", "--host", "vm1", "--wait"});
  EXPECT_EQ(ran.exit, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  expect_golden("attach_wait.txt", ran.out);
}

TEST_F(Attach, WaitAsJsonIsOneDocumentWithTheAttachmentAsItIsAtTheEnd) {
  fake_.waits = {attach_operation(4)};
  const Ran ran = dxpu({"attach", "--host", "vm1", "--wait", "-o", "json"});
  EXPECT_EQ(ran.exit, 0) << ran.err;
  const nlohmann::json document = nlohmann::json::parse(ran.out);
  EXPECT_EQ(document["attachments"][0]["bus_address"], "0001:01:00.0");
  EXPECT_EQ(document["operation"]["done"], true);
}

TEST_F(Attach, ATerminalSeesEachStepOnce) {
  fake_.waits = {attach_operation(1), attach_operation(1), attach_operation(4)};
  const Ran ran = dxpu({"attach", "--host", "vm1", "--wait"}, {.terminal = true});
  EXPECT_EQ(ran.exit, 0) << ran.err;
  expect_golden("attach_progress.txt", ran.err);
}

TEST_F(Attach, AFailedStepIsNamedAndGivesItsCode) {
  v1::Operation failed = attach_operation(2);
  *failed.mutable_steps(2) = step("link", v1::STEP_STATE_FAILED);
  failed.set_done(true);
  failed.set_error_code(static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  failed.set_error_message("host vm1 did not connect within 60 s: see dxpu-hostd's log there");
  fake_.waits = {failed};
  const Ran ran = dxpu({"attach", "--host", "vm1", "--wait"});
  EXPECT_EQ(ran.exit, 6);
  EXPECT_EQ(ran.out, "");
  EXPECT_THAT(ran.err, HasSubstr("DEADLINE_EXCEEDED: attach failed at step link: host vm1 did not connect"));
  EXPECT_THAT(ran.err, HasSubstr("op-1"));
}

TEST_F(Attach, APoolManagerThatRestartsMeanwhileIsWaitedFor) {
  fake_.wait_errors = {absl::UnavailableError("going down"), absl::UnavailableError("starting")};
  fake_.waits = {attach_operation(4)};
  const Ran ran = dxpu({"attach", "--host", "vm1", "--wait"}, {.terminal = true});
  EXPECT_EQ(ran.exit, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("still waiting"));
}

TEST_F(Attach, ARefusalCountsItsReasonsForPrograms) {
  v1::RefusalDetails details;
  details.add_counts()->set_reason("not-free");
  details.mutable_counts(0)->set_count(3);
  details.add_counts()->set_reason("wrong-model");
  details.mutable_counts(1)->set_count(1);
  fake_.fail_with = absl::ResourceExhaustedError("no 2 free functions for host vm1");
  fake_.fail_with.SetPayload("type.dxpu/dxpu.v1.RefusalDetails", absl::Cord(details.SerializeAsString()));
  const Ran text = dxpu({"attach", "--host", "vm1", "--count", "2"});
  EXPECT_EQ(text.exit, 4);
  EXPECT_EQ(text.err, "dxpu: RESOURCE_EXHAUSTED: no 2 free functions for host vm1\n");
  const Ran json = dxpu({"attach", "--host", "vm1", "--count", "2", "-o", "json"});
  const nlohmann::json document = nlohmann::json::parse(json.err);
  EXPECT_EQ(document["error"]["exit_code"], 4);
  EXPECT_EQ(document["error"]["refusals"][1]["reason"], "wrong-model");
  EXPECT_EQ(document["error"]["refusals"][0]["count"], 3);
}

TEST_F(Attach, AnAnswerThatWasLostCanBeAskedForAgain) {
  fake_.fail_with = absl::UnavailableError("gone");
  const Ran ran = dxpu({"attach", "--host", "vm1", "--request-id", "r-9"});
  EXPECT_EQ(ran.exit, 7);
  EXPECT_THAT(ran.err, HasSubstr("--request-id r-9"));
}

TEST_F(Attach, DetachWithWait) {
  v1::Operation done = fake_.detach.operation();
  for (v1::Step& each : *done.mutable_steps()) each = step(each.name(), v1::STEP_STATE_DONE);
  done.set_done(true);
  set_time(done.mutable_finished(), 3);
  fake_.waits = {done};
  const Ran ran = dxpu({"detach", "a-1", "--force", "--wait", "--timeout", "30s"});
  EXPECT_EQ(ran.exit, 0) << ran.err;
  EXPECT_EQ(fake_.detach_request.attachment_id(), "a-1");
  EXPECT_TRUE(fake_.detach_request.force());
  EXPECT_EQ(fake_.detach_request.timeout().seconds(), 30);
  EXPECT_THAT(ran.out, HasSubstr("2.00 s"));
}

TEST_F(Attach, OperationWaitEndsAtItsDeadlineAndSaysHowToGoOn) {
  const Ran ran = dxpu({"operation", "wait", "op-1", "--timeout", "300ms"}, {.clock = &base::Clock::real()});
  EXPECT_EQ(ran.exit, 6);
  EXPECT_THAT(ran.err, HasSubstr("dxpu operation wait op-1"));
}

TEST_F(Attach, OperationWaitShowsAFailureAndFailsAsItFailed) {
  fake_.operation.set_done(true);
  fake_.operation.set_error_code(static_cast<int>(absl::StatusCode::kFailedPrecondition));
  fake_.operation.set_error_message("port 0 is not empty");
  const Ran ran = dxpu({"operation", "wait", "op-1"});
  EXPECT_EQ(ran.exit, 4);
  EXPECT_THAT(ran.out, HasSubstr("failed"));
  EXPECT_THAT(ran.err, HasSubstr("port 0 is not empty"));
}

// ---- events --follow
// -------------------------------------------------------------------------------------------------

v1::WatchResponse watch_response(int64_t revision, const std::string& message) {
  v1::WatchResponse response;
  v1::Event* event = response.add_events();
  event->set_revision(revision);
  event->set_type("attachment.state");
  event->set_subject("a-1");
  event->set_message(message);
  set_time(event->mutable_time(), 1);
  response.set_progress_revision(revision);
  return response;
}

TEST_F(Attach, FollowGoesOnWhereTheListEndedAndSurvivesARestart) {
  v1::WatchResponse idle;
  idle.set_progress_revision(50);
  fake_.streams.push_back({{watch_response(43, "to LINKING"), idle}, absl::UnavailableError("restart")});
  fake_.streams.push_back({{watch_response(51, "to ATTACHED")}, absl::FailedPreconditionError("compacted")});
  const Ran ran = dxpu({"events", "--follow"});
  EXPECT_EQ(ran.exit, 4);
  EXPECT_THAT(ran.out, HasSubstr("box b1 connected"));
  EXPECT_THAT(ran.out, HasSubstr("to LINKING"));
  EXPECT_THAT(ran.out, HasSubstr("to ATTACHED"));
  EXPECT_THAT(ran.err, HasSubstr("trying again"));
  ASSERT_EQ(fake_.watch_requests.size(), 2u);
  EXPECT_EQ(fake_.watch_requests[0].since_revision(), 42);
  EXPECT_EQ(fake_.watch_requests[1].since_revision(), 50) << "a progress mark counts, too";
}

TEST_F(Attach, FollowAsJsonIsOneDocumentALine) {
  fake_.streams.push_back({{watch_response(43, "x")}, absl::FailedPreconditionError("compacted")});
  const Ran ran = dxpu({"events", "--follow", "-o", "json"});
  std::istringstream lines(ran.out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  EXPECT_EQ(count, 4);
}

}  // namespace
}  // namespace dxpu::cli
