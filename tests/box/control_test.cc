#include "proxy/box/control.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

namespace dxpu::box {
namespace {

struct Pair {
  base::UniqueFd a, b;
  Pair() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    a.reset(fds[0]);
    b.reset(fds[1]);
  }
};

TEST(Control, MessagesSurvive) {
  WorkerStatus s;
  s.box_id = "b1";
  s.slot = 3;
  s.attachment_id = "att";
  s.generation = 1ull << 60;
  s.pid = 77;
  s.epoch = 12;
  s.session_up = true;
  s.heard_ago = absl::Milliseconds(1500);
  auto status = decode(encode(StatusMessage{s}));
  ASSERT_TRUE(status.ok()) << status.status();
  const WorkerStatus& back = std::get<StatusMessage>(*status).status;
  EXPECT_EQ(back.generation, 1ull << 60);
  EXPECT_EQ(back.heard_ago, absl::Milliseconds(1500));
  EXPECT_TRUE(back.session_up);
  EXPECT_EQ(back.attachment_id, "att");

  const std::string hello("\x00\x01\xff binary", 10);
  auto session = decode(encode(SessionMessage{9, hello}));
  ASSERT_TRUE(session.ok());
  EXPECT_EQ(std::get<SessionMessage>(*session).hello, hello);
  auto ended = decode(encode(EndedMessage{WorkerEnd::kLeaseExpired, "x"}));
  ASSERT_TRUE(ended.ok());
  EXPECT_EQ(std::get<EndedMessage>(*ended).end, WorkerEnd::kLeaseExpired);
  EXPECT_TRUE(std::holds_alternative<StopMessage>(*decode(encode(StopMessage{}))));
}

TEST(Control, HostileMessagesAreErrors) {
  for (const char* text :
       {"", "{", "[]", "7", "{}", R"({"kind":7})", R"({"kind":"session","epoch":-1,"hello":"zz"})",
        R"({"kind":"session","epoch":1})", R"({"kind":"status","box":"b"})", R"({"kind":"ended"})"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(decode(text).status())) << text;
  }
  EXPECT_TRUE(absl::IsUnimplemented(decode(R"({"kind":"dance"})").status()));
}

TEST(Control, ADescriptorTravelsAndIsTheSameFile) {
  Pair pair;
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  base::UniqueFd read_end(pipe[0]), write_end(pipe[1]);
  ASSERT_TRUE(control_send(pair.a.get(), SessionMessage{1, "h"}, write_end.get()).ok());
  base::UniqueFd got;
  auto message = control_receive(pair.b.get(), &got);
  ASSERT_TRUE(message.ok() && message->has_value());
  ASSERT_TRUE(got.valid());
  ASSERT_EQ(::write(got.get(), "x", 1), 1);
  char c = 0;
  ASSERT_EQ(::read(read_end.get(), &c, 1), 1);
  EXPECT_EQ(c, 'x');
}

TEST(Control, NothingThereAndEndOfStreamDiffer) {
  Pair pair;
  base::UniqueFd got;
  auto nothing = control_receive(pair.b.get(), &got);
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing->has_value());
  pair.a.reset();
  EXPECT_TRUE(absl::IsUnavailable(control_receive(pair.b.get(), &got).status()));
}

TEST(Control, APeerThatDoesNotReadIsNotWaitedFor) {
  Pair pair;
  absl::Status last;
  for (int i = 0; i < 10000 && last.ok(); ++i)
    last = control_send(pair.a.get(), EndedMessage{WorkerEnd::kDied, std::string(4000, 'x')});
  EXPECT_TRUE(absl::IsResourceExhausted(last)) << last;
}

TEST(Control, AListenerIsFoundAndItsEndIsSeen) {
  const std::string path =
      std::filesystem::path(::testing::TempDir()) / ("dxpu-control-" + std::to_string(::getpid()) + ".sock");
  EXPECT_TRUE(absl::IsNotFound(control_connect(path).status()));
  {
    auto listener = control_listen(path);
    ASSERT_TRUE(listener.ok()) << listener.status();
    auto connection = control_connect(path);
    ASSERT_TRUE(connection.ok()) << connection.status();
    auto accepted = control_accept(listener->get());
    ASSERT_TRUE(accepted.ok() && accepted->has_value());
    auto none = control_accept(listener->get());
    ASSERT_TRUE(none.ok());
    EXPECT_FALSE(none->has_value());
  }
  EXPECT_TRUE(absl::IsUnavailable(control_connect(path).status())) << "the file is there, nobody listens";
  EXPECT_TRUE(control_listen(path).ok()) << "a left-over socket file is no obstacle";
  ::unlink(path.c_str());
  EXPECT_TRUE(absl::IsInvalidArgument(control_listen("/tmp/" + std::string(200, 'x')).status()));
}

}  // namespace
}  // namespace dxpu::box
