// How sessions end and what they survive: cuts, silence, slow functions, full sockets, many threads.
#include <sys/resource.h>

#include "tests/fabric/raw_peer.h"

namespace dxpu::fabric::testing {
namespace {

using function::MemoryFunction;
using function::Outcome;

SessionOptions quick_options() {
  SessionOptions options;
  options.deadlines.read = absl::Milliseconds(100);
  options.deadlines.fast_io_fail = absl::Milliseconds(400);
  options.deadlines.ctrl_loss = absl::Milliseconds(900);
  options.deadlines.lease = absl::Seconds(2);
  options.deadlines.keep_alive = absl::Milliseconds(100);
  return options;
}

Outcome read_wait(RemoteFunction& remote, uint32_t* value = nullptr) {
  uint32_t local = 0;
  return remote.bar_read_wait(0, MemoryFunction::kMagicOffset,
                              std::as_writable_bytes(std::span(value != nullptr ? value : &local, 1)));
}

struct Requests {
  std::vector<std::unique_ptr<Ended>> ended;
  Ended& add() { return *ended.emplace_back(std::make_unique<Ended>()); }
};

TEST(Cut, EveryRequestEndsExactlyOnceAtBothEnds) {
  for (const bool tcp : {true, false}) {
    SCOPED_TRACE(tcp ? "tcp" : "fake");
    std::shared_ptr<FakeWire> wire;
    int socket_of_host = -1;
    auto transports = tcp ? tcp_pair() : FakeTransport::pair({}, &wire);
    if (tcp) socket_of_host = transports.first->poll_fd();
    Requests all;
    std::vector<std::byte> out(100 * 8192);
    Joined s(std::move(transports), patient_options(), patient_options());
    ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
    s.function.swallow_reads = true;
    s.memory.hold_reads(true);
    for (size_t i = 0; i < 100; ++i) {
      s.remote->bar_read(2, i * 64, 64, all.add().read_done());
      s.upstream().dma_read(HostMemory::kBase + i * 8192, std::span(out).subspan(i * 8192, 8192), all.add().done());
    }
    std::vector<std::thread> waiting;
    std::atomic<int> down{0};
    for (int i = 0; i < 4; ++i) {
      waiting.emplace_back([&] {
        uint32_t value = 0;
        if (read_wait(*s.remote, &value) == Outcome::kLinkDown && value == 0xffffffff) ++down;
      });
    }
    ASSERT_TRUE(eventually([&] { return s.function.swallowed() == 104 && s.memory.held() == 200; }));
    if (tcp) {
      ::shutdown(socket_of_host, SHUT_RDWR);
    } else {
      wire->cut();
    }
    for (auto& e : all.ended) EXPECT_EQ(e->wait(), Outcome::kLinkDown);
    for (std::thread& t : waiting) t.join();
    EXPECT_EQ(down, 4);
    ASSERT_TRUE(eventually([&] { return s.losses == 1 && s.box_ended == 1; }));
    EXPECT_EQ(s.loss().code(), absl::StatusCode::kUnavailable) << s.loss();
    // What the function and the host's memory still owed comes too late and hurts nobody.
    s.function.answer_swallowed();
    s.memory.release_reads();
    for (auto& e : all.ended) EXPECT_EQ(e->times(), 1);
    EXPECT_EQ(s.losses, 1);
    EXPECT_EQ(s.box_ended, 1);
    EXPECT_FALSE(s.remote->alive());
    EXPECT_FALSE(s.server->alive());
  }
}

TEST(Cut, AnswersAfterTheEndsAreGone) {
  TestFunction* function = nullptr;
  HostMemory* memory = nullptr;
  Ended read;
  auto s = std::make_unique<Joined>();
  ASSERT_TRUE(s->up());
  function = &s->function;
  memory = &s->memory;
  function->swallow_reads = true;
  memory->hold_reads(true);
  std::vector<std::byte> out(64);
  Ended dma;
  s->upstream().dma_read(HostMemory::kBase, out, dma.done());
  s->remote->bar_read(2, 0, 64, read.read_done());
  ASSERT_TRUE(eventually([&] { return function->swallowed() == 1 && memory->held() == 1; }));
  s->remote.reset();
  s->server.reset();
  EXPECT_EQ(read.wait(), Outcome::kLinkDown);
  EXPECT_EQ(dma.wait(), Outcome::kLinkDown);
  function->answer_swallowed();
  memory->release_reads();
}

TEST(Cut, InTheMiddleOfBulkWrites) {
  for (int round = 0; round < 5; ++round) {
    std::shared_ptr<FakeWire> wire;
    FakeOptions narrow;
    narrow.capacity = 10000;
    auto transports = FakeTransport::pair(narrow, &wire);
    Joined s(std::move(transports), patient_options(), patient_options());
    ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
    function::Upstream& upstream = s.upstream();
    std::atomic<int> started{0};
    std::vector<std::thread> writers;
    for (int t = 0; t < 3; ++t) {
      writers.emplace_back([&] {
        // The data is gone as soon as dma_write returns: nobody may look at it afterwards (ASan would tell).
        while (s.server->alive()) {
          std::vector<std::byte> data(500000, std::byte{1});
          ++started;
          upstream.dma_write(HostMemory::kBase, data);
        }
      });
    }
    ASSERT_TRUE(eventually([&] { return started >= 5; }));
    wire->cut();
    for (std::thread& t : writers) t.join();
    ASSERT_TRUE(eventually([&] { return s.losses == 1 && s.box_ended == 1; }));
  }
}

TEST(Cut, OnLossMayDestroyTheFunction) {
  auto [host, box] = tcp_pair();
  RawPeer raw(std::move(box));
  TestFunction function;
  std::thread script([&] {
    raw.answer_hello_with(function.config(), patient_options());
    raw.serve_programming();
  });
  std::unique_ptr<RemoteFunction> remote;
  std::mutex mutex;
  std::atomic<bool> destroyed{false};
  auto connected = RemoteFunction::connect(std::move(host), ticket(), patient_options(), kPatience, [&](absl::Status) {
    {
      std::lock_guard lock(mutex);
      remote.reset();
    }
    destroyed = true;
  });
  script.join();
  ASSERT_TRUE(connected.ok()) << connected.status();
  {
    std::lock_guard lock(mutex);
    remote = *std::move(connected);
  }
  raw.transport().shutdown();
  EXPECT_TRUE(eventually([&] { return destroyed.load(); }));
}

TEST(Silence, KeepAliveLossEndsBothSides) {
  std::shared_ptr<FakeWire> wire;
  auto transports = FakeTransport::pair({}, &wire);
  Joined s(std::move(transports), quick_options(), quick_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  ASSERT_TRUE(
      eventually([&] { return s.remote->stats().pongs_received >= 2 && s.server->stats().pongs_received >= 2; }));
  EXPECT_GT(s.remote->stats().last_round_trip, absl::ZeroDuration());
  const absl::Time start = absl::Now();
  wire->set_deaf(true);
  ASSERT_TRUE(eventually([&] { return s.losses == 1 && s.box_ended == 1; }));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_EQ(s.loss().code(), absl::StatusCode::kDeadlineExceeded) << s.loss();
  EXPECT_EQ(s.end().code(), absl::StatusCode::kDeadlineExceeded) << s.end();
}

TEST(Silence, AStoppedPeerOverTcp) {
  HostUnderTest host(quick_options());  // the peer never says a word again
  EXPECT_EQ(host.wait_loss().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(Silence, ThreeTimeoutsInARowAreEnough) {
  SessionOptions options = quick_options();
  options.deadlines.ctrl_loss = absl::Seconds(60);
  options.deadlines.keep_alive = absl::Seconds(30);
  options.deadlines.lease = absl::Seconds(90);
  std::shared_ptr<FakeWire> wire;
  auto transports = FakeTransport::pair({}, &wire);
  Joined s(std::move(transports), options, options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  wire->set_deaf(true);
  const absl::Time start = absl::Now();
  for (int i = 0; i < 3; ++i) {
    const Outcome outcome = read_wait(*s.remote);
    EXPECT_TRUE(outcome == Outcome::kTimeout || outcome == Outcome::kLinkDown);
  }
  ASSERT_TRUE(eventually([&] { return s.losses == 1; }));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10)) << "ctrl_loss is not what ended it";
  EXPECT_EQ(read_wait(*s.remote), Outcome::kLinkDown) << "fails fast";
}

TEST(Silence, ManyAtOnceCountOnce) {
  SessionOptions options = quick_options();
  options.deadlines.ctrl_loss = absl::Seconds(60);
  options.deadlines.keep_alive = absl::Seconds(30);
  options.deadlines.lease = absl::Seconds(90);
  std::shared_ptr<FakeWire> wire;
  auto transports = FakeTransport::pair({}, &wire);
  Joined s(std::move(transports), options, options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  wire->set_deaf(true);
  Requests all;
  for (int i = 0; i < 50; ++i) s.remote->bar_read(2, 0, 4, all.add().read_done());
  for (auto& e : all.ended) EXPECT_EQ(e->wait(), Outcome::kTimeout);
  EXPECT_TRUE(s.remote->alive()) << "one burst is one timeout";
  EXPECT_EQ(s.remote->stats().completed_cto, 50u);
}

TEST(Silence, ASlowFunctionIsNotADeadPeer) {
  SessionOptions options = quick_options();
  options.deadlines.ctrl_loss = absl::Seconds(60);
  options.deadlines.keep_alive = absl::Seconds(30);
  options.deadlines.lease = absl::Seconds(90);
  Joined s(options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  s.function.swallow_reads = true;
  for (int i = 0; i < 6; ++i) {
    uint32_t value = 0;
    EXPECT_EQ(read_wait(*s.remote, &value), Outcome::kTimeout);
    EXPECT_EQ(value, 0xffffffffu);
  }
  EXPECT_TRUE(s.remote->alive());
  s.function.swallow_reads = false;
  s.function.answer_swallowed();
  EXPECT_TRUE(eventually([&] { return s.remote->stats().late_completions == 6; }));
  uint32_t value = 0;
  EXPECT_EQ(read_wait(*s.remote, &value), Outcome::kSuccess);
  EXPECT_EQ(value, MemoryFunction::kMagic);
}

TEST(Room, NoneForAPostedWriteEndsTheEpochInTime) {
  std::shared_ptr<FakeWire> wire;
  FakeOptions narrow;
  narrow.capacity = 64 * 1024;
  SessionOptions options = quick_options();
  options.deadlines.ctrl_loss = absl::Seconds(60);
  options.deadlines.lease = absl::Seconds(90);
  auto transports = FakeTransport::pair(narrow, &wire);
  Joined s(std::move(transports), options, options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  wire->set_deaf(true);
  const std::vector<std::byte> data(1 << 20);
  const absl::Time start = absl::Now();
  s.upstream().dma_write(HostMemory::kBase, data);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  ASSERT_TRUE(eventually([&] { return s.box_ended == 1; }));
  EXPECT_EQ(s.end().code(), absl::StatusCode::kUnavailable) << s.end();
}

TEST(Room, SmallWritesThatFindNoneEndTheEpochToo) {
  std::shared_ptr<FakeWire> wire;
  FakeOptions narrow;
  narrow.capacity = 4096;
  SessionOptions options = quick_options();
  options.deadlines.ctrl_loss = absl::Seconds(60);
  options.deadlines.lease = absl::Seconds(90);
  auto transports = FakeTransport::pair(narrow, &wire);
  Joined s(std::move(transports), options, options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  wire->set_deaf(true);
  const uint32_t value = 1;
  for (int i = 0; i < 200; ++i) s.remote->bar_write(2, 0, std::as_bytes(std::span(&value, 1)));
  ASSERT_TRUE(eventually([&] { return s.losses == 1; }));
  EXPECT_EQ(s.loss().code(), absl::StatusCode::kUnavailable) << s.loss();
}

// Both ends ask for as much as they may, through a wire that holds a fraction of one answer, while posted data flows
// both ways.
TEST(Duplex, CrossingRequestsAtFullDepthNeverDeadlock) {
  FakeOptions narrow;
  narrow.capacity = 3000;
  FakeOptions slow;
  slow.delay = absl::Microseconds(200);
  for (int kind = 0; kind < 3; ++kind) {
    SCOPED_TRACE(kind);
    Joined s(kind == 0   ? tcp_pair()
             : kind == 1 ? FakeTransport::pair(narrow)
                         : FakeTransport::pair(slow),
             patient_options(), patient_options());
    ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
    s.memory.fill(9);
    const std::vector<std::byte> source = s.memory.copy();
    Requests all;
    std::vector<std::byte> out(400 * 4096);
    std::thread box([&] {
      const std::vector<std::byte> data(300000, std::byte{7});
      for (size_t i = 0; i < 400; ++i) {
        Ended* e = nullptr;
        {
          static std::mutex adding;
          std::lock_guard lock(adding);
          e = &all.add();
        }
        s.upstream().dma_read(HostMemory::kBase + i * 4096, std::span(out).subspan(i * 4096, 4096), e->done());
        if (i % 100 == 50) s.upstream().dma_write(HostMemory::kBase + 400 * 4096, data);
      }
    });
    Requests reads;
    const std::vector<std::byte> data(200000, std::byte{3});
    for (size_t i = 0; i < 400; ++i) {
      s.remote->bar_read(2, i % 200 * 4096, 4096, reads.add().read_done());
      if (i % 100 == 50) s.remote->bar_write(2, 0, data);
    }
    box.join();
    for (auto& e : all.ended) ASSERT_EQ(e->wait(), Outcome::kSuccess);
    for (auto& e : reads.ended) ASSERT_EQ(e->wait(), Outcome::kSuccess);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), source.begin()));
    EXPECT_EQ(s.remote->stats().late_completions + s.server->stats().late_completions, 0u);
  }
}

TEST(Duplex, ContinuationsMayAskForMoreAndNeverWait) {
  FakeOptions narrow;
  narrow.capacity = 2000;
  Joined s(FakeTransport::pair(narrow), patient_options(), patient_options());
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  // A chain of reads, each started by the end of the one before, each with a write much larger than the wire.
  std::vector<std::byte> in(4096), big(100000, std::byte{0x11});
  std::atomic<int> left{30};
  Ended over;
  std::function<void(Outcome)> next = [&](Outcome outcome) {
    EXPECT_EQ(outcome, Outcome::kSuccess);
    s.upstream().dma_write(HostMemory::kBase + (1 << 20), big);
    if (--left == 0) {
      s.upstream().raise_msix(1);
      over.done()(Outcome::kSuccess);
    } else {
      s.upstream().dma_read(HostMemory::kBase, in, [&](Outcome o) { next(o); });
    }
  };
  s.upstream().dma_read(HostMemory::kBase, in, [&](Outcome o) { next(o); });
  EXPECT_EQ(over.wait(), Outcome::kSuccess);
  EXPECT_TRUE(eventually([&] { return s.memory.interrupts().size() == 1; }));
  // A wait inside a continuation can not be served: it is refused, not hung.
  Ended inside, outer;
  s.remote->bar_read(0, 0, 4, [&](Outcome, std::span<const std::byte>) { inside.done()(read_wait(*s.remote)); });
  EXPECT_EQ(inside.wait(), Outcome::kCompleterAbort);
}

TEST(Threads, EightAtOnceBothWays) {
  for (const bool tcp : {true, false}) {
    Joined s(tcp ? tcp_pair() : FakeTransport::pair({}), patient_options(), patient_options());
    ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        for (uint32_t i = 0; i < 150; ++i) {
          const uint64_t at = static_cast<uint64_t>(t) * 8192;
          const uint32_t value = static_cast<uint32_t>(t) << 16 | i;
          if (t < 4) {  // host threads: write, read back, each way of reading
            s.remote->bar_write(2, at, std::as_bytes(std::span(&value, 1)));
            uint32_t got = 0;
            if (i % 2 == 0) {
              ASSERT_EQ(s.remote->bar_read_wait(2, at, std::as_writable_bytes(std::span(&got, 1))), Outcome::kSuccess);
            } else {
              Ended read;
              s.remote->bar_read(2, at, 4, read.read_done());
              ASSERT_EQ(read.wait(), Outcome::kSuccess);
              got = read.u32();
            }
            ASSERT_EQ(got, value);
          } else {  // function threads: the same with host memory
            std::vector<std::byte> page(5000, static_cast<std::byte>(value)), back(5000);
            s.upstream().dma_write(HostMemory::kBase + at, page);
            Ended read;
            s.upstream().dma_read(HostMemory::kBase + at, back, read.done());
            ASSERT_EQ(read.wait(), Outcome::kSuccess);
            ASSERT_EQ(back, page);
            s.upstream().raise_msix(static_cast<unsigned>(t));
          }
          if (i % 50 == 0) {
            s.remote->stats();
            s.server->stats();
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_TRUE(eventually([&] { return s.memory.interrupts().size() == 4 * 150; }));
    const SessionStats h = s.remote->stats();
    EXPECT_EQ(h.non_posted_issued, h.completed_success);
    EXPECT_EQ(h.unexpected_completions + h.late_completions + h.malformed, 0u);
  }
}

TEST(Threads, ClosedWhileEverybodyIsBusy) {
  for (int round = 0; round < 10; ++round) {
    Joined s;
    ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        while (!stop && read_wait(*s.remote) != Outcome::kLinkDown) {
        }
      });
      threads.emplace_back([&] {
        while (!stop) {
          Ended read;
          s.remote->bar_read(2, 0, 128, read.read_done());
          if (read.wait() == Outcome::kLinkDown) return;
        }
      });
    }
    ASSERT_TRUE(eventually([&] { return s.remote->stats().completed_success > 50; }));
    if (round % 2 == 0) {
      s.remote->close();
    } else {
      s.server->close(TerminateReason::kShutdown);
    }
    ASSERT_TRUE(eventually([&] { return !s.remote->alive() && s.box_ended == 1; }));
    stop = true;
    for (std::thread& t : threads) t.join();
  }
}

TEST(Idle, CostsNoCpu) {
  SessionOptions options = patient_options();
  Joined s(options);
  ASSERT_TRUE(s.up()) << s.host_status << s.box_status;
  EXPECT_EQ(read_wait(*s.remote), Outcome::kSuccess);
  Ended read;
  s.remote->bar_read(0, 0, 4, read.read_done());
  read.wait();
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  absl::SleepFor(absl::Seconds(2));  // what is measured, not what is waited for
  getrusage(RUSAGE_SELF, &after);
  const auto micros = [](const rusage& r) {
    return (r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1000000L + r.ru_utime.tv_usec + r.ru_stime.tv_usec;
  };
  EXPECT_LT(micros(after) - micros(before), 40000) << "two idle ends used more than 1 % of a core each";
  EXPECT_LT(after.ru_nvcsw - before.ru_nvcsw, 60) << "something polls";
}

}  // namespace
}  // namespace dxpu::fabric::testing
