// Attach, use, lose and detach a GPU function through real daemons. The host end runs in this process, so that the test
// can open the device as a user would.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "proxy/attach/direct/direct_attach.h"
#include "proxy/base/unique_fd.h"
#include "proxy/gpu/command_set.h"
#include "proxy/host/host_agent.h"
#include "tests/integration/cluster.h"

namespace dxpu::test {
namespace {

using ::testing::HasSubstr;

class AttachTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new Cluster({.boxes = 2, .slots = 2, .ports = 2, .host_process = false});
    points_ = new std::vector<std::unique_ptr<attach::DirectAttach>>;
    for (int i = 0; i < 2; ++i) {
      attach::DirectOptions options;
      options.read_deadline = absl::Seconds(1);
      points_->push_back(std::make_unique<attach::DirectAttach>(options));
    }
    cluster_->start_all();
    start_host();
  }
  static void TearDownTestSuite() {
    host_.reset();
    delete cluster_;
    delete points_;
  }
  static void start_host() {
    host::HostOptions options;
    options.id = "h1";
    options.pool_address = cluster_->pool_address();
    options.attach_point = "direct";
    auto& d = options.session.deadlines;
    d.read = absl::Seconds(1);
    d.fast_io_fail = absl::Milliseconds(1500);
    d.ctrl_loss = absl::Seconds(2);
    d.lease = absl::Seconds(5);
    d.keep_alive = absl::Milliseconds(200);
    host_ = host::HostAgent::start(options, {(*points_)[0].get(), (*points_)[1].get()});
  }
  void SetUp() override { ASSERT_TRUE(cluster_->wait_ready()); }
  void TearDown() override {
    if (HasFailure()) std::cerr << cluster_->logs();
  }

  // Attaches, and says where.
  void attach(const std::string& function = "box1/0") {
    auto op = cluster_->attach(function);
    ASSERT_TRUE(op.ok()) << op.status();
    auto done = cluster_->wait(*op);
    ASSERT_TRUE(done.ok()) << done.status();
    ASSERT_EQ(done->error_code(), 0) << done->error_message();
    id_ = done->attachment_ids(0);
    auto a = cluster_->attachment(id_);
    ASSERT_TRUE(a.ok()) << a.status();
    ASSERT_EQ(a->state(), v1::ATTACHMENT_STATE_ATTACHED);
    port_ = a->port();
    generation_ = a->generation();
  }
  std::unique_ptr<attach::DirectDevice> open() {
    auto device = (*points_)[port_]->open();
    EXPECT_TRUE(device.ok()) << device.status();
    return device.ok() ? *std::move(device) : nullptr;
  }
  void detach(bool force = false) {
    // The pool manager refuses while somebody has it open: it must have heard of the close.
    ASSERT_TRUE(force || cluster_->eventually([&] { return cluster_->holder(port_).empty(); }));
    auto op = cluster_->detach(id_, force);
    ASSERT_TRUE(op.ok()) << op.status();
    auto done = cluster_->wait(*op);
    ASSERT_TRUE(done.ok()) << done.status();
    ASSERT_EQ(done->error_code(), 0) << done->error_message();
  }
  static uint32_t read32(function::LocalDevice& device, unsigned bar, uint64_t offset) {
    uint32_t value = 0;
    EXPECT_TRUE(device.bar_read(bar, offset, std::as_writable_bytes(std::span(&value, 1))).ok());
    return value;
  }
  static void write32(function::LocalDevice& device, unsigned bar, uint64_t offset, uint32_t value) {
    EXPECT_TRUE(device.bar_write(bar, offset, std::as_bytes(std::span(&value, 1))).ok());
  }
  std::set<std::string> event_types() {
    std::set<std::string> out;
    for (const auto& e : cluster_->events()) {
      if (e.attachment_id() == id_) out.insert(e.type());
    }
    return out;
  }
  bool state_is(v1::AttachmentState state) {
    return cluster_->eventually([&] {
      auto a = cluster_->attachment(id_);
      return a.ok() && a->state() == state;
    });
  }

  static Cluster* cluster_;
  static std::vector<std::unique_ptr<attach::DirectAttach>>* points_;
  static std::unique_ptr<host::HostAgent> host_;
  std::string id_;
  uint32_t port_ = 0;
  uint64_t generation_ = 0;
};
Cluster* AttachTest::cluster_ = nullptr;
std::vector<std::unique_ptr<attach::DirectAttach>>* AttachTest::points_ = nullptr;
std::unique_ptr<host::HostAgent> AttachTest::host_;

TEST_F(AttachTest, UsedDetachedAndNothingSurvives) {
  ASSERT_NO_FATAL_FAILURE(attach());
  {
    auto device = open();
    ASSERT_NE(device, nullptr);
    EXPECT_EQ(read32(*device, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), DXGPU_MAGIC);
    EXPECT_EQ(*device->bar_size(DXGPU_BAR_MEMORY), 1u << 20);
    for (uint64_t at = 0; at < (1u << 20); at += 4096) write32(*device, DXGPU_BAR_MEMORY, at, 0x5ec2e7);
    EXPECT_EQ(read32(*device, DXGPU_BAR_MEMORY, 0xff000), 0x5ec2e7u);
  }
  auto tables = cluster_->tables();
  bool box_row = false, host_row = false;
  for (const auto& row : tables.box_rows()) {
    if (row.attachment_id() != id_) continue;
    box_row = true;
    EXPECT_EQ(row.box_id(), "box1");
    EXPECT_EQ(row.host_id(), "h1");
    EXPECT_NE(row.worker_pid(), 0u);
    EXPECT_NE(row.epoch(), 0u);
  }
  for (const auto& row : tables.host_rows()) {
    if (row.attachment_id() != id_) continue;
    host_row = true;
    EXPECT_EQ(row.box_id(), "box1");
    EXPECT_EQ(row.port(), port_);
  }
  EXPECT_TRUE(box_row && host_row) << tables.ShortDebugString();

  ASSERT_NO_FATAL_FAILURE(detach());
  EXPECT_TRUE(cluster_->wait_clean());
  // FREE again only by way of SCRUBBING and VALIDATING.
  std::string path;
  for (const auto& e : cluster_->events()) {
    if (e.type() == "function.lifecycle" && e.attachment_id() == id_)
      path += e.message().substr(0, e.message().find(':')) + "; ";
  }
  EXPECT_THAT(path, HasSubstr("DETACHING → SCRUBBING; SCRUBBING → VALIDATING; "));

  ASSERT_NO_FATAL_FAILURE(attach());
  {
    auto device = open();
    ASSERT_NE(device, nullptr);
    std::vector<std::byte> page(4096);
    for (uint64_t at = 0; at < (1u << 20); at += 4096) {
      ASSERT_TRUE(device->bar_read(DXGPU_BAR_MEMORY, at, page).ok());
      for (std::byte b : page) ASSERT_EQ(b, std::byte{0}) << "left by the tenant before, page " << at;
    }
  }
  ASSERT_NO_FATAL_FAILURE(detach());
  EXPECT_TRUE(cluster_->wait_clean());
}

TEST_F(AttachTest, WorkerKilledUsersAreToldPortSaysWhoAndItIsRemovedWhenTheyClose) {
  ASSERT_NO_FATAL_FAILURE(attach());
  auto device = open();
  ASSERT_NE(device, nullptr);
  base::UniqueFd told(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  ASSERT_TRUE(device->set_removal_eventfd(told.get()).ok());
  auto workers = cluster_->workers();
  ASSERT_EQ(workers.size(), 1u);
  ::kill(workers.begin()->first, SIGKILL);
  pollfd waiting{told.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&waiting, 1, 20000), 1) << "the user was not told";
  EXPECT_EQ(read32(*device, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), 0xffffffffu);
  EXPECT_TRUE(cluster_->eventually([&] {
    for (const auto& p : host_->ports()) {
      if (p.attachment_id == id_ && p.phase == host::PortPhase::kGone && p.holder.find("pid") != std::string::npos)
        return true;
    }
    return false;
  }));
  // The slot is scrubbed without the host's help while the port waits; the other port works on.
  EXPECT_TRUE(cluster_->eventually([&] {
    for (const auto& f : cluster_->functions()) {
      if (f.id() == "box1/0") return f.status().lifecycle() == v1::LIFECYCLE_FREE;
    }
    return false;
  }));
  const std::string first = id_;
  ASSERT_NO_FATAL_FAILURE(attach("box2/1"));
  ASSERT_NO_FATAL_FAILURE(detach());
  id_ = first;
  device.reset();
  EXPECT_TRUE(state_is(v1::ATTACHMENT_STATE_FAILED));
  EXPECT_TRUE(cluster_->wait_clean());
  auto types = event_types();
  EXPECT_TRUE(types.contains("worker.died")) << "both sides of the story";
  EXPECT_TRUE(types.contains("link.lost"));
}

TEST_F(AttachTest, BoxDaemonKilledReadsGoOnAndItAdoptsTheWorker) {
  ASSERT_NO_FATAL_FAILURE(attach());
  auto device = open();
  ASSERT_NE(device, nullptr);
  write32(*device, DXGPU_BAR_MEMORY, 64, 0xabcd);
  const auto before = cluster_->workers();
  ASSERT_EQ(before.size(), 1u);
  cluster_->process("box1").kill_and_wait();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(read32(*device, DXGPU_BAR_MEMORY, 64), 0xabcdu);
  cluster_->start("box1");
  EXPECT_TRUE(cluster_->eventually([&] { return event_types().contains("worker.adopted"); }));
  EXPECT_EQ(cluster_->workers(), before);
  EXPECT_EQ(read32(*device, DXGPU_BAR_MEMORY, 64), 0xabcdu);
  auto a = cluster_->attachment(id_);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(a->state(), v1::ATTACHMENT_STATE_ATTACHED);
  EXPECT_EQ(a->generation(), generation_);
  device.reset();
  ASSERT_NO_FATAL_FAILURE(detach());
  EXPECT_TRUE(cluster_->wait_clean());
}

TEST_F(AttachTest, ADeadPoolManagerDetachesNothing) {
  ASSERT_NO_FATAL_FAILURE(attach());
  auto device = open();
  ASSERT_NE(device, nullptr);
  write32(*device, DXGPU_BAR_MEMORY, 64, 0xabcd);
  cluster_->process("pool").kill_and_wait();
  // Past the lease: it is renewed between box and host.
  const absl::Time end = absl::Now() + absl::Seconds(7);
  while (absl::Now() < end) {
    ASSERT_EQ(read32(*device, DXGPU_BAR_MEMORY, 64), 0xabcdu);
    absl::SleepFor(absl::Milliseconds(50));
  }
  // And neither does a box daemon that starts without one.
  cluster_->process("box1").kill_and_wait();
  cluster_->start("box1");
  cluster_->start("pool");
  EXPECT_TRUE(cluster_->eventually([&] { return event_types().contains("worker.adopted"); }));
  ASSERT_TRUE(state_is(v1::ATTACHMENT_STATE_ATTACHED));
  EXPECT_EQ(read32(*device, DXGPU_BAR_MEMORY, 64), 0xabcdu);
  EXPECT_EQ(cluster_->attachment(id_)->generation(), generation_);
  device.reset();
  ASSERT_NO_FATAL_FAILURE(detach());
  EXPECT_TRUE(cluster_->wait_clean());
}

TEST_F(AttachTest, ARestartedHostKeepsItsAttachmentInANewEpoch) {
  ASSERT_NO_FATAL_FAILURE(attach());
  {
    auto device = open();
    ASSERT_NE(device, nullptr);
    write32(*device, DXGPU_BAR_MEMORY, 64, 0xabcd);
    EXPECT_EQ(read32(*device, DXGPU_BAR_MEMORY, 64), 0xabcdu);
  }
  const auto worker = cluster_->workers();
  host_.reset();
  start_host();
  ASSERT_TRUE(cluster_->eventually([&] {
    auto a = cluster_->attachment(id_);
    const auto port = host_->ports()[port_];
    return a.ok() && a->generation() > generation_ && port.phase == host::PortPhase::kAttached &&
           port.attachment_id == id_;
  })) << cluster_->attachment(id_)->ShortDebugString();
  EXPECT_EQ(cluster_->workers(), worker) << "the same worker";
  {
    auto device = open();
    ASSERT_NE(device, nullptr);
    EXPECT_EQ(read32(*device, DXGPU_BAR_MEMORY, 64), 0xabcdu) << "the same tenant's memory";
  }
  ASSERT_NO_FATAL_FAILURE(detach());
  EXPECT_TRUE(cluster_->wait_clean());
}

TEST_F(AttachTest, AHostThatIsGoneLosesTheLease) {
  ASSERT_NO_FATAL_FAILURE(attach());
  host_.reset();
  EXPECT_TRUE(cluster_->eventually([&] { return event_types().contains("lease.expired"); }));
  EXPECT_TRUE(cluster_->eventually([&] { return cluster_->workers().empty(); }));
  start_host();
  EXPECT_TRUE(cluster_->wait_clean());
}

TEST_F(AttachTest, InUseIsRefusedByNameAndForceTellsTheUser) {
  ASSERT_NO_FATAL_FAILURE(attach());
  auto device = open();
  ASSERT_NE(device, nullptr);
  base::UniqueFd told(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  ASSERT_TRUE(device->set_removal_eventfd(told.get()).ok());
  ASSERT_TRUE(cluster_->eventually([&] { return !cluster_->holder(port_).empty(); }));
  auto refused = cluster_->detach(id_, false);
  ASSERT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(absl::StrCat("pid ", ::getpid())));
  EXPECT_EQ(read32(*device, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), DXGPU_MAGIC) << "a refusal changes nothing";
  auto op = cluster_->detach(id_, true);
  ASSERT_TRUE(op.ok()) << op.status();
  pollfd waiting{told.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&waiting, 1, 20000), 1);
  ASSERT_TRUE(
      cluster_->eventually([&] { return read32(*device, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC) == 0xffffffffu; }));
  device.reset();
  auto done = cluster_->wait(*op);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_TRUE(cluster_->wait_clean());
}

}  // namespace
}  // namespace dxpu::test
