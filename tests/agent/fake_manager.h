// A pool manager that decides nothing: keeps what agents say, sends what the test says. One agent at a time.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dxpu/v1/agent.grpc.pb.h"

namespace dxpu::agent {

class FakeManager : public v1::AgentService::Service {
 public:
  // Port 0: any. The same port again later: a restarted pool manager.
  explicit FakeManager(int port = 0) {
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port), grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeManager() override {
    {
      absl::MutexLock lock(&mutex_);
      closing_ = true;
      if (context_ != nullptr) context_->TryCancel();
    }
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  }
  bool listening() const { return server_ != nullptr && port_ != 0; }
  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // The last message of each kind and all events, over all streams.
  struct Seen {
    int streams = 0;
    v1::AgentMessage hello;
    v1::AgentMessage facts;
    std::vector<v1::AgentMessage> all_facts;
    std::vector<v1::AgentEvent> events;
    int heartbeats = 0;
  };
  Seen seen() const {
    absl::MutexLock lock(&mutex_);
    return seen_;
  }
  // False when it did not come true within the deadline.
  bool wait(const std::function<bool(const Seen&)>& good, absl::Duration deadline = absl::Seconds(30)) const {
    absl::MutexLock lock(&mutex_);
    auto condition = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return good(seen_); };
    return mutex_.AwaitWithTimeout(absl::Condition(&condition), deadline);
  }
  bool wait_event(const std::string& type) const {
    return wait([&](const Seen& s) {
      for (const auto& e : s.events) {
        if (e.type() == type) return true;
      }
      return false;
    });
  }
  // Kept and sent on every new stream, after the facts, as a real one does. Returns the sequence on the present stream,
  // 0 when none.
  uint64_t send(v1::ManagerMessage intents) {
    absl::MutexLock lock(&mutex_);
    intents_ = std::move(intents);
    have_intents_ = true;
    return stream_ != nullptr && have_facts_ ? send_intents() : 0;
  }
  void drop() {
    absl::MutexLock lock(&mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }
  void set_heartbeat(absl::Duration d) {
    absl::MutexLock lock(&mutex_);
    heartbeat_ = d;
  }

 private:
  using Stream = grpc::ServerReaderWriter<v1::ManagerMessage, v1::AgentMessage>;

  uint64_t send_intents() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::ManagerMessage m = intents_;
    m.set_sequence(++sequence_);
    stream_->Write(m);
    return sequence_;
  }

  grpc::Status Connect(grpc::ServerContext* context, Stream* stream) override {
    {
      absl::MutexLock lock(&mutex_);
      if (closing_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "closing");
      context_ = context;
      stream_ = stream;
      have_facts_ = false;
      sequence_ = 1;
      ++seen_.streams;
      v1::ManagerMessage welcome;
      welcome.set_sequence(1);
      welcome.mutable_welcome()->set_software_version("fake");
      welcome.mutable_welcome()->mutable_heartbeat_interval()->set_nanos(
          static_cast<int32_t>(absl::ToInt64Nanoseconds(heartbeat_)));
      stream->Write(welcome);
    }
    v1::AgentMessage m;
    while (stream->Read(&m)) {
      absl::MutexLock lock(&mutex_);
      for (const auto& e : m.events()) seen_.events.push_back(e);
      if (m.has_box_hello() || m.has_host_hello()) seen_.hello = m;
      if (m.has_heartbeat()) ++seen_.heartbeats;
      if (m.has_box_facts() || m.has_host_facts()) {
        seen_.facts = m;
        seen_.all_facts.push_back(m);
        if (!std::exchange(have_facts_, true) && have_intents_) send_intents();
      }
    }
    absl::MutexLock lock(&mutex_);
    if (context_ == context) {
      context_ = nullptr;
      stream_ = nullptr;
    }
    return grpc::Status::OK;
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  mutable absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  Seen seen_ ABSL_GUARDED_BY(mutex_);
  v1::ManagerMessage intents_ ABSL_GUARDED_BY(mutex_);
  bool have_intents_ ABSL_GUARDED_BY(mutex_) = false;
  bool have_facts_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration heartbeat_ ABSL_GUARDED_BY(mutex_) = absl::Milliseconds(200);
  grpc::ServerContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Stream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace dxpu::agent
