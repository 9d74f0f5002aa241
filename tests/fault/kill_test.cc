// kill -9 of each daemon and the worker at each step of attach and detach. Whatever the step: the pool converges, and
// nothing is left in boxes, hosts or the database.
//
// The steps are base::sync_point names; the victim kills itself there, so no timing is hoped for. A step that was not
// reached fails its test.
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/integration/cluster.h"

namespace dxpu::test {
namespace {

enum class Phase { kAttach, kDetach };

struct Step {
  const char* program;  // which process gets the variable: "box1", "host", "pool"
  const char* name;
  Phase phase;
};

std::ostream& operator<<(std::ostream& out, const Step& s) { return out << s.program << " " << s.name; }

constexpr Step kSteps[] = {
    // box daemon
    {"box1", "box.intent_serve", Phase::kAttach},
    {"box1", "box.starting", Phase::kAttach},
    {"box1", "box.worker_started", Phase::kAttach},
    {"box1", "box.serving", Phase::kAttach},
    {"box1", "box.ticket_used", Phase::kAttach},
    {"box1", "box.intent_nothing", Phase::kDetach},
    {"box1", "box.stopping", Phase::kDetach},
    {"box1", "box.scrubbing", Phase::kDetach},
    {"box1", "box.validating", Phase::kDetach},
    // worker (a child of the box daemon, which hands the variable on)
    {"box1", "worker.started", Phase::kAttach},
    {"box1", "worker.session", Phase::kAttach},
    {"box1", "worker.serving", Phase::kAttach},
    {"box1", "worker.scrub", Phase::kDetach},
    {"box1", "worker.validate", Phase::kDetach},
    // host daemon
    {"host", "host.connecting", Phase::kAttach},
    {"host", "host.connected", Phase::kAttach},
    {"host", "host.plugged", Phase::kAttach},
    {"host", "host.attached", Phase::kAttach},
    {"host", "host.unplugged", Phase::kDetach},
    {"host", "host.gone", Phase::kDetach},
    {"host", "host.empty", Phase::kDetach},
    // pool manager: right after each commit
    {"pool", "poolmgr.attachment.PLACED", Phase::kAttach},
    {"pool", "poolmgr.function.ATTACHING", Phase::kAttach},
    {"pool", "poolmgr.attachment.LINKING", Phase::kAttach},
    {"pool", "poolmgr.attachment.PLUGGING", Phase::kAttach},
    {"pool", "poolmgr.attachment.ATTACHED", Phase::kAttach},
    {"pool", "poolmgr.attachment.QUIESCING", Phase::kDetach},
    {"pool", "poolmgr.attachment.UNPLUGGING", Phase::kDetach},
    {"pool", "poolmgr.attachment.UNLINKING", Phase::kDetach},
    {"pool", "poolmgr.function.SCRUBBING", Phase::kDetach},
    {"pool", "poolmgr.function.VALIDATING", Phase::kDetach},
    {"pool", "poolmgr.function.FREE", Phase::kDetach},
    {"pool", "poolmgr.attachment.ENDED", Phase::kDetach},
};

class KillTest : public ::testing::TestWithParam<Step> {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new Cluster({.boxes = 2, .slots = 1, .ports = 2});
    cluster_->start_all();
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  static Cluster* cluster_;
};
Cluster* KillTest::cluster_ = nullptr;

TEST_P(KillTest, Converges) {
  const Step step = GetParam();
  SyncPoint point(step.name, cluster_->dir() + "/marker");
  cluster_->process(step.program).kill_and_wait();
  cluster_->start(step.program, {point.environment()});
  ASSERT_TRUE(cluster_->wait_ready());

  // A daemon that died comes back at once, as it does under a service manager.
  auto revive = [&] {
    if (!cluster_->process(step.program).running()) cluster_->start(step.program);
  };
  // The first call is made while the victim may die under it; a second thread would only blur that.
  if (step.phase == Phase::kAttach) point.arm();
  std::string attachment;
  {
    // PLACED is committed inside the call: the pool manager has to be brought back for it to be repeated.
    auto op = cluster_->attach("box1/0", absl::Seconds(2));
    revive();
    if (!op.ok()) op = cluster_->attach_again();
    ASSERT_TRUE(op.ok()) << op.status() << cluster_->logs();
    auto done = cluster_->wait(*op, revive);
    ASSERT_TRUE(done.ok()) << done.status() << cluster_->logs();
    if (step.phase == Phase::kDetach) {
      ASSERT_EQ(done->error_code(), 0) << done->error_message();
    }
    if (done->attachment_ids_size() > 0) attachment = done->attachment_ids(0);
  }
  if (step.phase == Phase::kDetach) point.arm();
  auto held = cluster_->attachment(attachment);
  if (held.ok()) {
    auto op = cluster_->detach(attachment, false, absl::Seconds(2));
    revive();
    if (absl::IsUnavailable(op.status()) || absl::IsDeadlineExceeded(op.status()))
      op = cluster_->detach(attachment, false);
    // It may have ended on its own account meanwhile.
    if (op.ok()) {
      auto done = cluster_->wait(*op, revive);
      ASSERT_TRUE(done.ok()) << done.status() << cluster_->logs();
    }
  }
  EXPECT_TRUE(cluster_->eventually(
      [&] {
        revive();
        return point.reached();
      },
      absl::Seconds(20)))
      << "the step was never reached" << cluster_->logs();
  EXPECT_TRUE(cluster_->eventually(
      [&] {
        revive();
        return static_cast<bool>(cluster_->wait_clean(absl::ZeroDuration()));
      },
      absl::Seconds(60)))
      << cluster_->wait_clean(absl::ZeroDuration()).message();
}

INSTANTIATE_TEST_SUITE_P(Steps, KillTest, ::testing::ValuesIn(kSteps), [](const ::testing::TestParamInfo<Step>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (!isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
});

}  // namespace
}  // namespace dxpu::test
