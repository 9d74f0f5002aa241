// Exit codes: one for each status that can come over the wire, and for what is wrong before anything is sent.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <nlohmann/json.hpp>

#include "proxy/base/unique_fd.h"
#include "tests/cli/run_dxpu.h"
#include "tests/cli/sample_pool.h"

namespace dxpu::cli {
namespace {

using testing::HasSubstr;

struct StatusCase {
  absl::StatusCode code;
  int exit;
};

class ExitCode : public testing::TestWithParam<StatusCase> {};

TEST_P(ExitCode, OfAStatusFromThePoolManager) {
  FakePool fake;
  fake.fail_with = absl::Status(GetParam().code, "it says why");
  const Ran text = run_dxpu({"gpu", "list"}, fake.address());
  EXPECT_EQ(text.exit, GetParam().exit);
  EXPECT_EQ(text.out, "");
  EXPECT_THAT(text.err, HasSubstr("it says why"));
  EXPECT_THAT(text.err, HasSubstr(absl::StatusCodeToString(GetParam().code)));
  EXPECT_EQ(std::count(text.err.begin(), text.err.end(), '\n'), 1) << "one line: " << text.err;

  const Ran json = run_dxpu({"gpu", "list", "-o", "json"}, fake.address());
  EXPECT_EQ(json.exit, GetParam().exit);
  EXPECT_EQ(json.out, "");
  const nlohmann::json document = nlohmann::json::parse(json.err);
  EXPECT_EQ(document["error"]["code"], absl::StatusCodeToString(GetParam().code));
  EXPECT_EQ(document["error"]["exit_code"], GetParam().exit);
}

INSTANTIATE_TEST_SUITE_P(
    Codes, ExitCode,
    testing::Values(StatusCase{absl::StatusCode::kInternal, 1}, StatusCase{absl::StatusCode::kUnimplemented, 1},
                    StatusCase{absl::StatusCode::kDataLoss, 1}, StatusCase{absl::StatusCode::kUnknown, 1},
                    StatusCase{absl::StatusCode::kInvalidArgument, 2}, StatusCase{absl::StatusCode::kOutOfRange, 2},
                    StatusCase{absl::StatusCode::kNotFound, 3}, StatusCase{absl::StatusCode::kResourceExhausted, 4},
                    StatusCase{absl::StatusCode::kFailedPrecondition, 4},
                    StatusCase{absl::StatusCode::kAlreadyExists, 5}, StatusCase{absl::StatusCode::kAborted, 5},
                    StatusCase{absl::StatusCode::kDeadlineExceeded, 6}, StatusCase{absl::StatusCode::kUnavailable, 7},
                    StatusCase{absl::StatusCode::kPermissionDenied, 8},
                    StatusCase{absl::StatusCode::kUnauthenticated, 8}),
    [](const testing::TestParamInfo<StatusCase>& info) { return absl::StatusCodeToString(info.param.code); });

TEST(ExitCodeTest, NothingListensThere) {
  FakePool fake;
  const std::string address = fake.address();
  fake.stop();
  const absl::Time start = absl::Now();
  const Ran ran = run_dxpu({"gpu", "list"}, address);
  EXPECT_EQ(ran.exit, 7);
  EXPECT_LT(absl::Now() - start, absl::Seconds(6));
  EXPECT_THAT(ran.err, HasSubstr("UNAVAILABLE"));
  EXPECT_THAT(ran.err, HasSubstr(address));
  EXPECT_THAT(ran.err, HasSubstr("dxpu-poolmgr"));
  EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
}

TEST(ExitCodeTest, SomethingListensThereButNeverAnswers) {
  base::UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  socklen_t length = sizeof address;
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  PoolClient client("127.0.0.1:" + std::to_string(ntohs(address.sin_port)), absl::Milliseconds(400));
  const absl::Time start = absl::Now();
  EXPECT_EQ(client.get_pool({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
}

TEST(ExitCodeTest, APoolManagerThatHangsIsADeadline) {
  FakePool fake;
  fake.hang = true;
  PoolClient client(fake.address(), absl::Milliseconds(400));
  const absl::Status status = client.get_pool({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(fake.address()));
}

// ---- not found, by the CLI's own look
// -----------------------------------------------------------------------------------

TEST(ExitCodeTest, AnEmptyAnswerToShowIsNotFound) {
  FakePool fake;
  fill_sample(fake);
  const std::vector<std::vector<std::string>> commands = {{"box", "show", "b9"},
                                                          {"host", "show", "h9"},
                                                          {"attachment", "show", "a-9"},
                                                          {"gpu", "show", "b1/9"},
                                                          {"operation", "show", "op-9"}};
  for (const auto& arguments : commands) {
    const Ran ran = run_dxpu(arguments, fake.address());
    EXPECT_EQ(ran.exit, 3) << arguments[0];
    EXPECT_EQ(ran.out, "");
    EXPECT_THAT(ran.err, HasSubstr("NOT_FOUND"));
  }
}

// ---- usage
// ------------------------------------------------------------------------------------------------------------

class BadUsage : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(BadUsage, IsExitTwoInOneLineWithAHintAndSendsNothing) {
  FakePool fake;
  fill_sample(fake);
  const Ran ran = run_dxpu(GetParam(), fake.address());
  EXPECT_EQ(ran.exit, 2) << ran.err;
  EXPECT_EQ(ran.out, "");
  EXPECT_THAT(ran.err, HasSubstr("INVALID_ARGUMENT"));
  EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
  EXPECT_EQ(fake.attach_request.request_id(), "");
  EXPECT_EQ(fake.detach_request.request_id(), "");

  std::vector<std::string> as_json = GetParam();
  as_json.insert(as_json.end(), {"-o", "json"});
  const Ran json = run_dxpu(as_json, fake.address());
  EXPECT_EQ(json.exit, 2);
  EXPECT_TRUE(nlohmann::json::accept(json.err)) << json.err;
}

INSTANTIATE_TEST_SUITE_P(
    Lines, BadUsage,
    testing::Values(std::vector<std::string>{}, std::vector<std::string>{"fly"}, std::vector<std::string>{"box"},
                    std::vector<std::string>{"box", "paint"}, std::vector<std::string>{"box", "show"},
                    std::vector<std::string>{"gpu", "list", "extra"}, std::vector<std::string>{"gpu", "list", "--sort"},
                    std::vector<std::string>{"gpu", "list", "--state", "happy"},
                    std::vector<std::string>{"gpu", "show", "b1"}, std::vector<std::string>{"gpu", "show", "b1/x"},
                    std::vector<std::string>{"box", "cordon", "/1"}, std::vector<std::string>{"attach"},
                    std::vector<std::string>{"attach", "--host"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--count", "0"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--count", "-1"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--count", "many"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--memory", "lots"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--memory", "99999999999TiB"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--timeout", "-5s"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--timeout", "soon"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--gpu", "b1"},
                    std::vector<std::string>{"attach", "--host", "vm1", "--gpu", "b1/0", "--count", "2"},
                    std::vector<std::string>{"detach"}, std::vector<std::string>{"events", "--since", "-1"},
                    std::vector<std::string>{"events", "--since", "x"},
                    std::vector<std::string>{"completion", "fish"}));

TEST(ExitCodeTest, AnUnknownFormatIsUsage) {
  const Ran ran = run_dxpu({"gpu", "list", "-o", "xml"}, "");
  EXPECT_EQ(ran.exit, 2);
  EXPECT_THAT(ran.err, HasSubstr("xml"));
}

TEST(ExitCodeTest, HelpAndVersionAreFine) {
  EXPECT_EQ(run_dxpu({"--help"}, "").exit, 0);
  EXPECT_THAT(run_dxpu({"attach", "--help"}, "").out, HasSubstr("--same-box"));
  EXPECT_THAT(run_dxpu({"--version"}, "").out, HasSubstr("dxpu 0."));
}

TEST(ExitCodeTest, TheEnvironmentNamesThePool) {
  FakePool fake;
  fill_sample(fake);
  ASSERT_EQ(setenv("DXPU_POOL", fake.address().c_str(), 1), 0);
  const Ran ran = run_dxpu({"gpu", "list"}, "");
  unsetenv("DXPU_POOL");
  EXPECT_EQ(ran.exit, 0) << ran.err;
}

}  // namespace
}  // namespace dxpu::cli
