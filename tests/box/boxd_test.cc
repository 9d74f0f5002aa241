// dxpu-boxd and dxpu-worker as processes, with a pool manager that decides nothing.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proxy/box/control.h"
#include "proxy/fabric/session.h"
#include "proxy/gpu/command_set.h"
#include "tests/agent/fake_manager.h"

namespace dxpu::box {
namespace {

using agent::FakeManager;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class BoxdTest : public ::testing::Test {
 protected:
  BoxdTest() {
    std::string name = fs::temp_directory_path() / "dxpu-boxd-XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    dir_ = name;
    auto listener = fabric::TcpListener::listen("127.0.0.1:0");
    fabric_ = (*listener)->endpoint();
    manager_ = std::make_unique<FakeManager>();
  }
  ~BoxdTest() override {
    if (HasFailure()) std::cerr << log();
    kill_boxd();
    // Workers outlive their daemon by design; this test must not.
    for (uint32_t slot = 0; slot < 2; ++slot) {
      if (auto c = control_connect(absl::StrCat(dir_, "/rt/slot-", slot, ".sock")); c.ok()) {
        control_send(c->get(), StopMessage{}).IgnoreError();
        const absl::Time end = absl::Now() + absl::Seconds(10);
        base::UniqueFd passed;
        while (absl::Now() < end && !absl::IsUnavailable(control_receive(c->get(), &passed).status())) {
          absl::SleepFor(absl::Milliseconds(10));
        }
      }
    }
    fs::remove_all(dir_);
  }

  std::vector<std::string> command() {
    return {std::string(DXPU_BIN_DIR) + "/dxpu-boxd",
            "--id=b1",
            "--pool=" + pool_,
            "--listen=" + fabric_,
            "--slots=2",
            "--memory=1MiB",
            "--runtime-dir=" + dir_ + "/rt",
            "--read-deadline=1s",
            "--fast-io-fail=2s",
            "--ctrl-loss=3s",
            "--lease=20s",
            "--keep-alive=200ms"};
  }
  pid_t spawn(const std::vector<std::string>& arguments) {
    std::vector<char*> argv;
    for (const auto& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, (dir_ + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_addclosefrom_np(&actions, 3);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    return pid;
  }
  void start() {
    pool_ = manager_ == nullptr ? "127.0.0.1:1" : manager_->address();
    boxd_ = spawn(command());
  }
  void kill_boxd() {
    if (boxd_ == 0) return;
    ::kill(boxd_, SIGKILL);
    ::waitpid(boxd_, nullptr, 0);
    boxd_ = 0;
  }
  // Runs until it ends by itself.
  int run(const std::vector<std::string>& arguments) {
    pid_t pid = spawn(arguments);
    const absl::Time end = absl::Now() + absl::Seconds(30);
    int status = 0;
    while (::waitpid(pid, &status, WNOHANG) == 0) {
      if (absl::Now() >= end) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
        ADD_FAILURE() << "still runs";
        return -1;
      }
      absl::SleepFor(absl::Milliseconds(10));
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string log() {
    std::ifstream file(dir_ + "/log");
    std::stringstream out;
    out << file.rdbuf();
    return out.str();
  }

  static bool slot_is(const FakeManager::Seen& seen, uint32_t slot, v1::SlotPhase phase) {
    for (const auto& f : seen.facts.box_facts().slots()) {
      if (f.slot() == slot) return f.phase() == phase;
    }
    return false;
  }
  v1::SlotFact fact(uint32_t slot) { return manager_->seen().facts.box_facts().slots(static_cast<int>(slot)); }
  bool wait_phase(v1::SlotPhase phase) {
    return manager_->wait([&](const auto& s) { return slot_is(s, 0, phase); });
  }

  fabric::Ticket ticket(uint64_t generation) {
    fabric::Ticket t;
    t.host_id = "h1";
    t.box_id = "b1";
    t.slot = 0;
    t.attachment_id = "a";
    t.generation = generation;
    t.token.fill(std::byte{static_cast<unsigned char>(generation)});
    return t;
  }
  void want(const fabric::Ticket& t) {
    v1::ManagerMessage m;
    auto* first = m.mutable_box_intents()->add_slots();
    first->set_serve(true);
    auto* out = first->mutable_ticket();
    out->set_host_id(t.host_id);
    out->set_box_id(t.box_id);
    out->set_slot(t.slot);
    out->set_attachment_id(t.attachment_id);
    out->set_generation(t.generation);
    out->set_token(t.token.data(), t.token.size());
    m.mutable_box_intents()->add_slots()->set_slot(1);
    manager_->send(m);
  }
  void want_nothing() {
    v1::ManagerMessage m;
    for (uint32_t slot = 0; slot < 2; ++slot) m.mutable_box_intents()->add_slots()->set_slot(slot);
    manager_->send(m);
  }
  absl::StatusOr<std::unique_ptr<fabric::RemoteFunction>> connect(const fabric::Ticket& t) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    for (;;) {
      auto transport = fabric::tcp_connect(fabric_, absl::Seconds(5));
      if (!transport.ok() && absl::Now() < end) {  // boxd is starting
        absl::SleepFor(absl::Milliseconds(20));
        continue;
      }
      if (!transport.ok()) return transport.status();
      fabric::SessionOptions options;
      options.deadlines.read = absl::Seconds(1);
      options.deadlines.keep_alive = absl::Milliseconds(200);
      return fabric::RemoteFunction::connect(*std::move(transport), t, options, absl::Seconds(10), [](absl::Status) {});
    }
  }
  static uint32_t read32(fabric::RemoteFunction& f, unsigned bar, uint64_t at) {
    uint32_t value = 0;
    EXPECT_EQ(f.bar_read_wait(bar, at, std::as_writable_bytes(std::span(&value, 1))), function::Outcome::kSuccess);
    return value;
  }

  std::string dir_, fabric_, pool_ = "127.0.0.1:1";
  std::unique_ptr<FakeManager> manager_;
  pid_t boxd_ = 0;
};

TEST_F(BoxdTest, TellsItsSlotsAndScrubsBeforeItLends) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  auto seen = manager_->seen();
  const auto& hello = seen.hello.box_hello();
  EXPECT_EQ(hello.box_id(), "b1");
  ASSERT_EQ(hello.paths_size(), 1);
  EXPECT_EQ(hello.paths(0), fabric_);
  ASSERT_EQ(hello.slots_size(), 2);
  EXPECT_EQ(hello.slots(0).memory_bytes(), 1u << 20);
  EXPECT_NE(hello.slots(0).serial(), hello.slots(1).serial());
}

TEST_F(BoxdTest, UsedTicketStaysUsedAndTheWorkerServesOnAcrossKill9WithoutAnyPoolManager) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  want(ticket(1));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_SERVING));
  auto remote = connect(ticket(1));
  ASSERT_TRUE(remote.ok()) << remote.status();
  EXPECT_EQ(read32(**remote, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), DXGPU_MAGIC);
  ASSERT_TRUE(manager_->wait([](const auto& s) { return s.facts.box_facts().slots(0).session_up(); }));
  EXPECT_NE(fact(0).worker_pid(), 0u);
  EXPECT_EQ(fact(0).epoch(), 1u);
  EXPECT_TRUE(manager_->wait([](const auto& s) { return s.facts.box_facts().slots(0).has_lease_renewed(); }));

  kill_boxd();
  manager_.reset();
  EXPECT_EQ(read32(**remote, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), DXGPU_MAGIC);
  start();
  auto again = connect(ticket(1));
  EXPECT_EQ(fabric::reason_of(again.status()), fabric::TerminateReason::kTicketStale) << again.status();
  EXPECT_EQ(read32(**remote, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), DXGPU_MAGIC);
  (*remote)->close();
}

TEST_F(BoxdTest, AnUnusedTicketIsGoodAfterKill9) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  want(ticket(1));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_SERVING));
  kill_boxd();
  manager_.reset();
  start();
  auto remote = connect(ticket(1));
  ASSERT_TRUE(remote.ok()) << remote.status();
  EXPECT_EQ(read32(**remote, DXGPU_BAR_REGISTERS, DXGPU_REG_MAGIC), DXGPU_MAGIC);
  (*remote)->close();
}

TEST_F(BoxdTest, StrangersAreRefusedEachWithItsReason) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  auto early = connect(ticket(1));
  EXPECT_EQ(fabric::reason_of(early.status()), fabric::TerminateReason::kTicketUnknown) << early.status();
  want(ticket(2));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_SERVING));
  EXPECT_EQ(fabric::reason_of(connect(ticket(1)).status()), fabric::TerminateReason::kTicketStale);
  fabric::Ticket wrong = ticket(2);
  wrong.token[0] ^= std::byte{1};
  EXPECT_EQ(fabric::reason_of(connect(wrong).status()), fabric::TerminateReason::kTicketUnknown);
  wrong = ticket(2);
  wrong.slot = 99;
  EXPECT_EQ(fabric::reason_of(connect(wrong).status()), fabric::TerminateReason::kTicketUnknown);
  EXPECT_TRUE(manager_->wait_event("ticket.refused"));
  auto remote = connect(ticket(2));
  EXPECT_TRUE(remote.ok()) << remote.status();
}

TEST_F(BoxdTest, ASilentStrangerDelaysNobody) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  want(ticket(1));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_SERVING));
  std::vector<std::unique_ptr<fabric::Transport>> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(*fabric::tcp_connect(fabric_, absl::Seconds(5)));
  const absl::Time begin = absl::Now();
  auto remote = connect(ticket(1));
  ASSERT_TRUE(remote.ok()) << remote.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(4)) << "a silent hello has 5 s";
}

TEST_F(BoxdTest, AKilledWorkersSlotIsWipedAndNotServedAgain) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  want(ticket(1));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_SERVING));
  auto remote = connect(ticket(1));
  ASSERT_TRUE(remote.ok()) << remote.status();
  std::vector<std::byte> secret(4096, std::byte{0x5e});
  (*remote)->bar_write(DXGPU_BAR_MEMORY, 8192, secret);
  read32(**remote, DXGPU_BAR_MEMORY, 8192);
  ASSERT_TRUE(manager_->wait([](const auto& s) { return s.facts.box_facts().slots(0).session_up(); }));
  ::kill(static_cast<pid_t>(fact(0).worker_pid()), SIGKILL);
  EXPECT_TRUE(manager_->wait_event("worker.died"));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  EXPECT_EQ(fact(0).attachment_id(), "a");
  bool scrubbing = false, validating = false;
  for (const auto& m : manager_->seen().all_facts) {
    for (const auto& f : m.box_facts().slots()) {
      if (f.slot() != 0 || f.attachment_id() != "a") continue;
      scrubbing |= f.phase() == v1::SLOT_PHASE_SCRUBBING;
      validating |= f.phase() == v1::SLOT_PHASE_VALIDATING;
    }
  }
  EXPECT_TRUE(scrubbing && validating);
  std::ifstream file(dir_ + "/rt/slot-0.vram", std::ios::binary);
  std::stringstream memory;
  memory << file.rdbuf();
  EXPECT_EQ(memory.str().find_first_not_of('\0'), std::string::npos);
  want(ticket(2));
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(fact(0).phase(), v1::SLOT_PHASE_IDLE);
}

TEST_F(BoxdTest, DetachStopsTheWorkerAndTellsTheHost) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  want(ticket(1));
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_SERVING));
  auto remote = connect(ticket(1));
  ASSERT_TRUE(remote.ok()) << remote.status();
  want_nothing();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  const absl::Time end = absl::Now() + absl::Seconds(10);
  while ((*remote)->alive() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE((*remote)->alive());
}

TEST_F(BoxdTest, TwoOnOneDirectoryAndImpossibleSettingsAreRefusedWithAClearError) {
  start();
  ASSERT_TRUE(wait_phase(v1::SLOT_PHASE_IDLE));
  EXPECT_EQ(run(command()), 1);
  EXPECT_THAT(log(), HasSubstr("in use by another dxpu-boxd"));
  EXPECT_THAT(log(), HasSubstr(absl::StrCat("pid ", boxd_)));
  kill_boxd();
  auto changed = [&](const std::string& from, const std::string& to) {
    auto c = command();
    for (auto& a : c) {
      if (a.starts_with(from)) a = to;
    }
    return c;
  };
  EXPECT_EQ(run(changed("--runtime-dir", "--runtime-dir=/proc/dxpu-box")), 1);
  EXPECT_THAT(log(), HasSubstr("/proc/dxpu-box"));
  EXPECT_EQ(run(changed("--memory", "--memory=4096TiB")), 1);
  EXPECT_EQ(run(changed("--lease", "--lease=1s")), 1);
  EXPECT_THAT(log(), HasSubstr("lease"));
  EXPECT_EQ(run(changed("--slots", "--slots=0")), 1);
  EXPECT_EQ(run(changed("--id", "--id=Not An Id")), 1);
  EXPECT_THAT(log(), HasSubstr("--id=Not An Id"));
}

TEST_F(BoxdTest, ADamagedRecordIsNamedNotGuessed) {
  fs::create_directories(dir_ + "/rt");
  std::ofstream(dir_ + "/rt/slot-1.json") << "{ torn";
  EXPECT_EQ(run(command()), 1);
  EXPECT_THAT(log(), HasSubstr("slot-1.json"));
}

}  // namespace
}  // namespace dxpu::box
