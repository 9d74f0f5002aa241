// Through gRPC, in this process: what the reconciler's tests can not see.
#include "poolmgr/service/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/grpc_status.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(30);

std::unique_ptr<grpc::ClientContext> patient() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  return context;
}

// An agent that does at once whatever it is told, on a stream of its own.
class Agent {
 public:
  Agent(const std::shared_ptr<grpc::Channel>& channel, bool is_box, std::string id, std::string boot = "boot")
      : stub_(v1::AgentService::NewStub(channel)), context_(patient()), is_box_(is_box) {
    stream_ = stub_->Connect(context_.get());
    v1::AgentMessage hello;
    if (is_box) {
      hello.mutable_box_hello()->set_box_id(id);
      hello.mutable_box_hello()->set_boot_id(boot);
      hello.mutable_box_hello()->add_paths("127.0.0.1:1");
      for (uint32_t i = 0; i < 2; ++i) {
        hello.mutable_box_hello()->add_slots()->set_slot(i);
        hello.mutable_box_hello()->mutable_slots(static_cast<int>(i))->set_model("m");
        facts_.mutable_box_facts()->add_slots()->set_slot(i);
        facts_.mutable_box_facts()->mutable_slots(static_cast<int>(i))->set_phase(v1::SLOT_PHASE_IDLE);
      }
    } else {
      hello.mutable_host_hello()->set_host_id(id);
      hello.mutable_host_hello()->set_boot_id(boot);
      hello.mutable_host_hello()->set_port_count(2);
      for (uint32_t i = 0; i < 2; ++i) {
        facts_.mutable_host_facts()->add_ports()->set_port(i);
        facts_.mutable_host_facts()->mutable_ports(static_cast<int>(i))->set_phase(v1::PORT_PHASE_EMPTY);
      }
    }
    stream_->Write(hello);
    stream_->Write(facts_);
    thread_ = std::thread([this] { run(); });
  }
  ~Agent() {
    context_->TryCancel();
    thread_.join();
  }
  grpc::Status status() {
    absl::MutexLock lock(&mutex_);
    auto over = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return over_; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&over), kPatience));
    return status_;
  }

 private:
  void run() {
    v1::ManagerMessage message;
    while (stream_->Read(&message)) {
      for (const v1::SlotIntent& intent : message.box_intents().slots()) {
        v1::SlotFact& fact = *facts_.mutable_box_facts()->mutable_slots(static_cast<int>(intent.slot()));
        fact.set_phase(intent.serve() ? v1::SLOT_PHASE_SERVING : v1::SLOT_PHASE_IDLE);
        if (!intent.serve()) continue;
        fact.set_attachment_id(intent.ticket().attachment_id());
        fact.set_generation(intent.ticket().generation());
      }
      for (const v1::PortIntent& intent : message.host_intents().ports()) {
        v1::PortFact& fact = *facts_.mutable_host_facts()->mutable_ports(static_cast<int>(intent.port()));
        fact.set_phase(intent.attach() ? v1::PORT_PHASE_ATTACHED : v1::PORT_PHASE_EMPTY);
        if (!intent.attach()) continue;
        fact.set_attachment_id(intent.ticket().attachment_id());
        fact.set_generation(intent.ticket().generation());
        fact.set_bus_address("0001:01:00.0");
      }
      if (!message.has_box_intents() && !message.has_host_intents()) continue;
      if (is_box_) facts_.mutable_box_facts()->set_intents_applied(message.sequence());
      if (!is_box_) facts_.mutable_host_facts()->set_intents_applied(message.sequence());
      if (!stream_->Write(facts_)) break;
    }
    grpc::Status status = stream_->Finish();
    absl::MutexLock lock(&mutex_);
    status_ = status;
    over_ = true;
  }

  std::unique_ptr<v1::AgentService::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
  const bool is_box_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AgentMessage, v1::ManagerMessage>> stream_;
  v1::AgentMessage facts_;
  std::thread thread_;
  absl::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    char pattern[] = "/tmp/dxpu-server-XXXXXX";
    dir_ = ::mkdtemp(pattern);
    start();
  }
  ~ServerTest() override {
    agents_.clear();
    stub_.reset();
    server_.reset();
    std::filesystem::remove_all(dir_);
  }
  void start() {
    ServerConfig config;
    config.listen = "127.0.0.1:0";
    config.database.path = dir_ + "/pool.db";
    absl::StatusOr<std::unique_ptr<PoolServer>> server = PoolServer::start(config);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials());
    stub_ = v1::PoolService::NewStub(channel_);
  }
  void agents() {
    agents_.push_back(std::make_unique<Agent>(channel_, true, "b1"));
    agents_.push_back(std::make_unique<Agent>(channel_, false, "h1"));
    const absl::Time until = absl::Now() + kPatience;
    while (absl::Now() < until) {
      v1::GetPoolResponse pool;
      ASSERT_TRUE(stub_->GetPool(patient().get(), {}, &pool).ok());
      v1::ListHostsResponse hosts;
      ASSERT_TRUE(stub_->ListHosts(patient().get(), {}, &hosts).ok());
      const bool host =
          hosts.hosts_size() == 1 && hosts.hosts(0).ports_size() == 2 && hosts.hosts(0).ports(0).phase() == "empty";
      if (host && pool.functions_by_lifecycle().count("FREE") != 0 && pool.functions_by_lifecycle().at("FREE") == 2)
        return;
      absl::SleepFor(absl::Milliseconds(5));
    }
    FAIL() << "the agents did not register";
  }
  grpc::Status attach(v1::AttachResponse* out, uint32_t count = 1) {
    v1::AttachRequest request;
    request.set_host_id("h1");
    request.set_count(count);
    return stub_->Attach(patient().get(), request, out);
  }
  v1::Operation wait(const std::string& id) {
    v1::WaitOperationRequest request;
    request.set_id(id);
    request.mutable_timeout()->set_seconds(20);
    v1::Operation op;
    grpc::Status status = stub_->WaitOperation(patient().get(), request, &op);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return op;
  }

  std::string dir_;
  std::unique_ptr<PoolServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::PoolService::Stub> stub_;
  std::vector<std::unique_ptr<Agent>> agents_;
};

TEST_F(ServerTest, AttachWaitDetachWait) {
  agents();
  v1::AttachResponse attached;
  ASSERT_TRUE(attach(&attached, 2).ok());
  v1::Operation op = wait(attached.operation().id());
  EXPECT_TRUE(op.done());
  EXPECT_EQ(op.error_code(), 0) << op.error_message();
  v1::DetachRequest request;
  request.set_attachment_id(attached.attachments(1).id());
  v1::DetachResponse detached;
  ASSERT_TRUE(stub_->Detach(patient().get(), request, &detached).ok());
  op = wait(detached.operation().id());
  EXPECT_TRUE(op.done());
  EXPECT_EQ(op.error_code(), 0) << op.error_message();
}

TEST_F(ServerTest, WaitReturnsWhatIsThereAtItsTimeout) {
  agents();
  agents_.erase(agents_.begin() + 1);  // the host goes: no attach can end
  v1::AttachResponse attached;
  const absl::Time until = absl::Now() + kPatience;
  grpc::Status status;
  // Until the pool manager has seen it go, an attach is accepted; it must not hang either.
  while (absl::Now() < until && (status = attach(&attached)).ok()) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  v1::WaitOperationRequest request;
  request.set_id("op-none");
  v1::Operation op;
  EXPECT_EQ(stub_->WaitOperation(patient().get(), request, &op).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, RefusalsCarryTheirCounts) {
  agents();
  v1::AttachResponse none;
  absl::Status status = to_absl(attach(&none, 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  v1::RefusalDetails details;
  ASSERT_TRUE(status.GetPayload(kRefusalUrl).has_value());
  ASSERT_TRUE(details.ParseFromString(std::string(*status.GetPayload(kRefusalUrl))));
  EXPECT_EQ(details.counts(0).reason(), "too-few-in-the-pool");
}

TEST_F(ServerTest, WatchSeesEveryEventOnceInOrder) {
  v1::WatchRequest request;
  auto context = patient();
  auto watch = stub_->Watch(context.get(), request);
  agents();
  v1::AttachResponse attached;
  ASSERT_TRUE(attach(&attached).ok());
  wait(attached.operation().id());
  std::vector<int64_t> seen;
  bool attached_seen = false;
  v1::WatchResponse response;
  while (!attached_seen && watch->Read(&response)) {
    for (const v1::Event& e : response.events()) {
      if (!seen.empty()) {
        EXPECT_GT(e.revision(), seen.back());
      }
      seen.push_back(e.revision());
      attached_seen = attached_seen || absl::StrContains(e.message(), "PLUGGING → ATTACHED");
    }
    if (!seen.empty()) {
      EXPECT_GE(response.progress_revision(), seen.back());
    }
  }
  EXPECT_TRUE(attached_seen);
  context->TryCancel();
  // The log has the same, in pages.
  std::vector<int64_t> listed;
  v1::ListEventsRequest list;
  list.set_page_size(2);
  do {
    v1::ListEventsResponse page;
    ASSERT_TRUE(stub_->ListEvents(patient().get(), list, &page).ok());
    for (const v1::Event& e : page.events()) listed.push_back(e.revision());
    list.set_page_token(page.next_page_token());
  } while (!list.page_token().empty());
  ASSERT_GE(listed.size(), seen.size());
  listed.resize(seen.size());
  EXPECT_EQ(listed, seen);
}

TEST_F(ServerTest, WatchFromARevisionThisDatabaseNeverHad) {
  v1::WatchRequest request;
  request.set_since_revision(1'000'000);
  auto context = patient();
  auto watch = stub_->Watch(context.get(), request);
  v1::WatchResponse response;
  EXPECT_FALSE(watch->Read(&response));
  grpc::Status status = watch->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("compacted"));
}

TEST_F(ServerTest, ASecondAgentWithTheSameIdIsToldWhy) {
  agents();
  Agent twin(channel_, false, "h1", "another-boot");
  grpc::Status status = twin.status();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(status.error_message(), HasSubstr("two agents must not have one id"));
}

TEST_F(ServerTest, StoppingEndsWaitersWatchersAndAgentsAndANewOneGoesOn) {
  agents();
  v1::WatchRequest request;
  auto context = patient();
  auto watch = stub_->Watch(context.get(), request);
  v1::WatchResponse response;
  ASSERT_TRUE(watch->Read(&response));
  v1::AttachResponse attached;
  ASSERT_TRUE(attach(&attached).ok());
  wait(attached.operation().id());
  server_->stop();
  while (watch->Read(&response)) {
  }
  EXPECT_FALSE(watch->Finish().ok());
  EXPECT_FALSE(agents_[0]->status().ok());
  agents_.clear();
  start();
  v1::ListAttachmentsResponse list;
  ASSERT_TRUE(stub_->ListAttachments(patient().get(), {}, &list).ok());
  ASSERT_EQ(list.attachments_size(), 1);
  EXPECT_EQ(list.attachments(0).state(), v1::ATTACHMENT_STATE_ATTACHED);
}

TEST_F(ServerTest, ATakenPortIsRefused) {
  ServerConfig config;
  config.listen = absl::StrCat("127.0.0.1:", server_->port());
  config.database.path = dir_ + "/other.db";
  absl::StatusOr<std::unique_ptr<PoolServer>> second = PoolServer::start(config);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("can not listen on"));
}

TEST_F(ServerTest, ManyClientsAtOnceNeverShareAFunction) {
  agents();
  std::vector<std::thread> clients;
  absl::Mutex mutex;
  std::vector<std::string> got;
  int refused = 0;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&] {
      v1::AttachResponse r;
      grpc::Status status = attach(&r);
      absl::MutexLock lock(&mutex);
      if (status.ok())
        got.push_back(
            absl::StrCat(r.attachments(0).box_id(), "/", r.attachments(0).slot(), "@", r.attachments(0).port()));
      if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) ++refused;
    });
  }
  for (std::thread& t : clients) t.join();
  EXPECT_EQ(got.size(), 2u);
  EXPECT_EQ(refused, 6);
  EXPECT_EQ(std::set<std::string>(got.begin(), got.end()).size(), got.size());
}

}  // namespace
}  // namespace dxpu::poolmgr
