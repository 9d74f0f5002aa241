// The worker in this process, with a function that needs no GPU and a real session over loopback.
#include "proxy/box/worker.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "absl/time/clock.h"
#include "proxy/function/memory_function.h"

namespace dxpu::box {
namespace {

using function::MemoryFunction;

class WorkerTest : public ::testing::Test {
 protected:
  WorkerTest() {
    path_ = std::filesystem::path(::testing::TempDir()) / ("dxpu-worker-" + std::to_string(::getpid()) + ".sock");
    options_.box_id = "b1";
    options_.slot = 1;
    options_.attachment_id = "a";
    options_.generation = 1;
    // A loaded machine must not look like a dead host.
    options_.session.deadlines.read = absl::Seconds(2);
    options_.session.deadlines.fast_io_fail = absl::Seconds(3);
    options_.session.deadlines.ctrl_loss = absl::Seconds(4);
    options_.session.deadlines.lease = absl::Seconds(30);
    options_.session.deadlines.keep_alive = absl::Milliseconds(100);
    stop_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    function_ = *MemoryFunction::create({});
  }
  ~WorkerTest() override {
    if (thread_.joinable()) {
      stop();
      thread_.join();
    }
    ::unlink(path_.c_str());
  }
  void stop() {
    uint64_t one = 1;
    ASSERT_EQ(::write(stop_.get(), &one, sizeof(one)), 8);
  }
  void start() {
    auto listener = control_listen(path_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    thread_ = std::thread([this, l = std::make_shared<base::UniqueFd>(*std::move(listener))] {
      end_ = run_worker(options_, *function_, std::move(*l), stop_.get());
    });
  }
  base::UniqueFd connect() {
    auto c = control_connect(path_);
    EXPECT_TRUE(c.ok()) << c.status();
    return *std::move(c);
  }
  // Next message, within a deadline.
  absl::StatusOr<ControlMessage> next(int socket) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (absl::Now() < end) {
      pollfd p{socket, POLLIN, 0};
      ::poll(&p, 1, 100);
      base::UniqueFd passed;
      auto m = control_receive(socket, &passed);
      if (!m.ok()) return m.status();
      if (m->has_value()) return **m;
    }
    return absl::DeadlineExceededError("no message");
  }
  WorkerStatus status_until(int socket, std::function<bool(const WorkerStatus&)> good) {
    for (;;) {
      auto m = next(socket);
      EXPECT_TRUE(m.ok()) << m.status();
      if (!m.ok()) return {};
      if (auto* s = std::get_if<StatusMessage>(&*m); s != nullptr && good(s->status)) return s->status;
    }
  }
  // What boxd does: reads the hello and passes the socket.
  std::unique_ptr<fabric::RemoteFunction> attach(int control, uint64_t epoch, uint64_t generation) {
    auto listener = fabric::TcpListener::listen("127.0.0.1:0");
    EXPECT_TRUE(listener.ok()) << listener.status();
    std::thread box([&] {
      auto transport = (*listener)->accept(absl::Seconds(10));
      ASSERT_TRUE(transport.ok() && *transport != nullptr);
      auto hello = fabric::read_hello(**transport, absl::Seconds(5));
      ASSERT_TRUE(hello.ok()) << hello.status();
      base::UniqueFd socket((*transport)->release_fd());
      ASSERT_TRUE(control_send(control, SessionMessage{epoch, fabric::serialize(*hello)}, socket.get()).ok());
    });
    fabric::Ticket ticket;
    ticket.host_id = "h1";
    ticket.box_id = "b1";
    ticket.slot = 1;
    ticket.attachment_id = "a";
    ticket.generation = generation;
    auto transport = fabric::tcp_connect((*listener)->endpoint(), absl::Seconds(5));
    EXPECT_TRUE(transport.ok()) << transport.status();
    auto remote = fabric::RemoteFunction::connect(*std::move(transport), ticket, options_.session, absl::Seconds(10),
                                                  [](absl::Status) {});
    box.join();
    EXPECT_TRUE(remote.ok()) << remote.status();
    return remote.ok() ? *std::move(remote) : nullptr;
  }
  uint32_t read32(fabric::RemoteFunction& remote, unsigned bar, uint64_t offset) {
    uint32_t value = 0;
    EXPECT_EQ(remote.bar_read_wait(bar, offset, std::as_writable_bytes(std::span(&value, 1))),
              function::Outcome::kSuccess);
    return value;
  }
  void write32(fabric::RemoteFunction& remote, unsigned bar, uint64_t offset, uint32_t value) {
    remote.bar_write(bar, offset, std::as_bytes(std::span(&value, 1)));
  }

  WorkerOptions options_;
  std::string path_;
  base::UniqueFd stop_;
  std::unique_ptr<MemoryFunction> function_;
  std::thread thread_;
  WorkerEnd end_ = WorkerEnd::kDied;
};

TEST_F(WorkerTest, SaysWhoItIsServesAndStops) {
  start();
  base::UniqueFd control = connect();
  WorkerStatus s = status_until(control.get(), [](const WorkerStatus&) { return true; });
  EXPECT_EQ(s.attachment_id, "a");
  EXPECT_EQ(s.pid, ::getpid());
  EXPECT_FALSE(s.session_up);
  auto remote = attach(control.get(), 7, 1);
  ASSERT_NE(remote, nullptr);
  EXPECT_EQ(remote->epoch(), 7u);
  EXPECT_EQ(read32(*remote, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  s = status_until(control.get(), [](const WorkerStatus& s) { return s.session_up; });
  EXPECT_EQ(s.epoch, 7u);
  ASSERT_TRUE(control_send(control.get(), StopMessage{}).ok());
  for (;;) {
    auto m = next(control.get());
    ASSERT_TRUE(m.ok()) << m.status();
    if (std::holds_alternative<EndedMessage>(*m)) break;
  }
  thread_.join();
  EXPECT_EQ(end_, WorkerEnd::kStopped);
}

TEST_F(WorkerTest, ANewEpochResetsRegistersKeepsMemoryAndEndsTheOldSession) {
  start();
  base::UniqueFd control = connect();
  auto first = attach(control.get(), 1, 1);
  ASSERT_NE(first, nullptr);
  write32(*first, 0, MemoryFunction::kScratch, 0x1234);
  write32(*first, MemoryFunction::kRamBar, 64, 0x5678);
  EXPECT_EQ(read32(*first, 0, MemoryFunction::kScratch), 0x1234u);
  auto second = attach(control.get(), 2, 2);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(read32(*second, 0, MemoryFunction::kScratch), 0u);
  EXPECT_EQ(read32(*second, MemoryFunction::kRamBar, 64), 0x5678u) << "the same tenant's memory";
  const absl::Time end = absl::Now() + absl::Seconds(10);
  while (first->alive() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(first->alive());
  EXPECT_EQ(status_until(control.get(), [](const WorkerStatus& s) { return s.epoch == 2 && s.session_up; }).generation,
            2u);
}

TEST_F(WorkerTest, GoesOnWithoutBoxdAndIsFoundAgain) {
  start();
  base::UniqueFd control = connect();
  auto remote = attach(control.get(), 3, 1);
  ASSERT_NE(remote, nullptr);
  control.reset();  // boxd is gone
  EXPECT_EQ(read32(*remote, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  base::UniqueFd again = connect();
  WorkerStatus s = status_until(again.get(), [](const WorkerStatus&) { return true; });
  EXPECT_TRUE(s.session_up);
  EXPECT_EQ(s.epoch, 3u);
  EXPECT_LT(s.heard_ago, absl::Seconds(30));
}

TEST_F(WorkerTest, ALiveHostKeepsTheLeaseAndASilentOneLosesIt) {
  options_.session.deadlines.read = absl::Milliseconds(300);
  options_.session.deadlines.fast_io_fail = absl::Milliseconds(400);
  options_.session.deadlines.ctrl_loss = absl::Milliseconds(1000);
  options_.session.deadlines.lease = absl::Milliseconds(1500);
  options_.session.deadlines.keep_alive = absl::Milliseconds(50);
  start();
  base::UniqueFd control = connect();
  auto remote = attach(control.get(), 1, 1);
  ASSERT_NE(remote, nullptr);
  // Longer than the lease: the keep-alive alone renews it.
  absl::SleepFor(absl::Seconds(2));
  ASSERT_EQ(read32(*remote, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
  remote->close();
  for (;;) {
    auto m = next(control.get());
    ASSERT_TRUE(m.ok()) << m.status();
    if (auto* ended = std::get_if<EndedMessage>(&*m)) {
      EXPECT_EQ(ended->end, WorkerEnd::kLeaseExpired);
      break;
    }
  }
  thread_.join();
  EXPECT_EQ(end_, WorkerEnd::kLeaseExpired);
}

TEST_F(WorkerTest, AHostThatNeverComesLosesTheLeaseToo) {
  options_.session.deadlines.read = absl::Milliseconds(10);
  options_.session.deadlines.fast_io_fail = absl::Milliseconds(20);
  options_.session.deadlines.ctrl_loss = absl::Milliseconds(30);
  options_.session.deadlines.lease = absl::Milliseconds(200);
  start();
  thread_.join();
  EXPECT_EQ(end_, WorkerEnd::kLeaseExpired);
}

TEST_F(WorkerTest, NonsenseOnTheControlSocketIsIgnored) {
  start();
  base::UniqueFd control = connect();
  ASSERT_GT(::write(control.get(), "not json", 8), 0);
  ASSERT_TRUE(control_send(control.get(), SessionMessage{1, "no hello"}).ok());
  auto remote = attach(control.get(), 1, 1);
  ASSERT_NE(remote, nullptr);
  EXPECT_EQ(read32(*remote, 0, MemoryFunction::kMagicOffset), MemoryFunction::kMagic);
}

}  // namespace
}  // namespace dxpu::box
