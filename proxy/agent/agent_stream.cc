#include "proxy/agent/agent_stream.h"

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "dxpu/v1/agent.grpc.pb.h"

namespace dxpu::agent {
namespace {

// Unsent facts beyond this are dropped, oldest first: the newest says it all.
constexpr size_t kMaxQueuedFacts = 64;
constexpr size_t kMaxQueuedEvents = 1000;
// Silence of a pool manager that has sent heartbeats on this stream, in heartbeats, after which the stream is given up.
constexpr int kSilentHeartbeats = 5;
// For one attempt to connect. Short, so that stop() never waits long and a fresh listener is found soon.
constexpr absl::Duration kConnectPatience = absl::Seconds(1);
// A pool manager names its own rhythm; within reason.
constexpr absl::Duration kShortestHeartbeat = absl::Milliseconds(50);
constexpr absl::Duration kLongestHeartbeat = absl::Minutes(1);

class Stream : public AgentStream {
 public:
  Stream(StreamOptions options, StreamCallbacks callbacks)
      : options_(std::move(options)), callbacks_(std::move(callbacks)), heartbeat_(options_.heartbeat) {
    thread_ = std::thread([this] { run(); });
  }
  ~Stream() override { stop(absl::ZeroDuration()); }

  void publish(v1::AgentMessage facts) override {
    absl::MutexLock lock(&mutex_);
    latest_ = std::move(facts);
    have_facts_ = true;
    if (open_) queue_latest();
  }

  void event(const std::string& type, const std::string& subject, const std::string& message,
             const std::string& attachment_id) override {
    v1::AgentEvent event;
    stamp(event.mutable_time(), absl::Now());
    event.set_type(type);
    event.set_subject(subject);
    event.set_message(message);
    event.set_attachment_id(attachment_id);
    absl::MutexLock lock(&mutex_);
    if (events_.size() >= kMaxQueuedEvents) events_.pop_front();
    events_.push_back(std::move(event));
  }

  bool connected() const override {
    absl::MutexLock lock(&mutex_);
    return open_;
  }

  void stop(absl::Duration grace) override {
    {
      absl::MutexLock lock(&mutex_);
      auto drained = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return !open_ || (events_.empty() && queue_.empty() && !writing_);
      };
      if (!stopping_) mutex_.AwaitWithTimeout(absl::Condition(&drained), grace);
      stopping_ = true;
      if (context_ != nullptr) context_->TryCancel();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  using Rpc = grpc::ClientReaderWriter<v1::AgentMessage, v1::ManagerMessage>;

  void queue_latest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::AgentMessage facts = latest_;
    if (facts.has_box_facts()) facts.mutable_box_facts()->set_intents_applied(intents_applied_);
    if (facts.has_host_facts()) facts.mutable_host_facts()->set_intents_applied(intents_applied_);
    if (queue_.size() >= kMaxQueuedFacts) queue_.pop_front();
    queue_.push_back(std::move(facts));
  }

  void run();
  std::string run_once();
  void write_loop(Rpc& rpc, grpc::ClientContext& context);
  void take(const v1::ManagerMessage& message);

  const StreamOptions options_;
  const StreamCallbacks callbacks_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;    // hello is on its way; publish() queues
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // this stream is over; the writer leaves
  bool welcomed_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool have_facts_ ABSL_GUARDED_BY(mutex_) = false;
  v1::AgentMessage latest_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::AgentMessage> queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::AgentEvent> events_ ABSL_GUARDED_BY(mutex_);
  uint64_t intents_applied_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration heartbeat_ ABSL_GUARDED_BY(mutex_);
  bool manager_beats_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time heard_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;
};

void Stream::run() {
  absl::BitGen random;
  absl::Duration retry = options_.first_retry;
  for (uint64_t attempt = 1;; ++attempt) {
    {
      absl::MutexLock lock(&mutex_);
      auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return have_facts_ || stopping_; };
      mutex_.Await(absl::Condition(&ready));
      if (stopping_) return;
    }
    std::string reason = run_once();
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    if (std::exchange(welcomed_, false)) {
      attempt = 1;
      retry = options_.first_retry;
    }
    // Full jitter between half and all of the step: agents of one pool must not come back in the same instant.
    absl::Duration pause = retry * absl::Uniform(random, 0.5, 1.0);
    if (attempt == 1 || attempt % 20 == 0) {
      spdlog::warn("pool={} stream=down attempt={} next_ms={} reason=\"{}\" (what is held stays held)",
                   options_.pool_address, attempt, absl::ToInt64Milliseconds(pause), reason);
    }
    auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
    if (mutex_.AwaitWithTimeout(absl::Condition(&stopping), pause)) return;
    retry = std::min(retry * 2, options_.longest_retry);
  }
}

std::string Stream::run_once() {
  // A new channel each time: the retry rhythm is ours alone, and what a channel remembers of earlier failures (its own
  // back-off, a half-done handshake with a server that died) has been seen to add many seconds to a short outage.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  auto channel = grpc::CreateCustomChannel(options_.pool_address, grpc::InsecureChannelCredentials(), arguments);
  const std::chrono::milliseconds patience(absl::ToInt64Milliseconds(kConnectPatience));
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + patience)) return "nobody answers there";
  auto stub = v1::AgentService::NewStub(channel);
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return "stopping";
    context_ = &context;
    broken_ = welcomed_ = manager_beats_ = false;
    intents_applied_ = 0;
    heard_ = absl::Now();
    queue_.clear();
    queue_latest();
    open_ = true;
  }
  auto rpc = stub->Connect(&context);
  std::thread writer([&] { write_loop(*rpc, context); });
  v1::ManagerMessage message;
  while (rpc->Read(&message)) take(message);
  {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
  }
  context.TryCancel();  // a writer blocked on flow control returns
  writer.join();
  grpc::Status status = rpc->Finish();
  absl::MutexLock lock(&mutex_);
  open_ = false;
  context_ = nullptr;
  return absl::StrFormat("code %d: %s", static_cast<int>(status.error_code()),
                         status.ok() ? "the pool manager ended the stream" : status.error_message());
}

void Stream::take(const v1::ManagerMessage& message) {
  {
    absl::MutexLock lock(&mutex_);
    heard_ = absl::Now();
    if (message.has_heartbeat()) manager_beats_ = true;
    if (message.has_welcome()) {
      welcomed_ = true;
      const auto& interval = message.welcome().heartbeat_interval();
      absl::Duration asked = absl::Seconds(interval.seconds()) + absl::Nanoseconds(interval.nanos());
      if (asked > absl::ZeroDuration()) heartbeat_ = std::clamp(asked, kShortestHeartbeat, kLongestHeartbeat);
      spdlog::info("pool={} stream=up version={}", options_.pool_address, message.welcome().software_version());
    }
  }
  if (!message.has_box_intents() && !message.has_host_intents()) return;
  callbacks_.intents(message);
  absl::MutexLock lock(&mutex_);
  intents_applied_ = message.sequence();
  if (open_) queue_latest();
}

void Stream::write_loop(Rpc& rpc, grpc::ClientContext& context) {
  uint64_t sequence = 0;
  v1::AgentMessage hello = callbacks_.hello();
  hello.set_sequence(++sequence);
  bool alive = rpc.Write(hello);
  while (alive) {
    v1::AgentMessage next;
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      auto work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || broken_ || !queue_.empty() || !events_.empty();
      };
      mutex_.AwaitWithTimeout(absl::Condition(&work), heartbeat_);
      if (stopping_ || broken_) break;
      if (manager_beats_ && absl::Now() - heard_ > kSilentHeartbeats * heartbeat_) {
        spdlog::warn("pool={} stream=silent for_ms={}", options_.pool_address,
                     absl::ToInt64Milliseconds(absl::Now() - heard_));
        break;
      }
      if (!queue_.empty()) {
        next = std::move(queue_.front());
        queue_.pop_front();
      } else {
        next.mutable_heartbeat();
      }
      for (auto& event : events_) *next.add_events() = std::move(event);
      events_.clear();
      writing_ = true;
    }
    next.set_sequence(++sequence);
    alive = rpc.Write(next);
    if (alive) continue;
    // Not sent: the events go first in line for the next stream.
    absl::MutexLock lock(&mutex_);
    for (int i = next.events_size() - 1; i >= 0; --i) events_.push_front(next.events(i));
    while (events_.size() > kMaxQueuedEvents) events_.pop_front();
  }
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  open_ = false;
  context.TryCancel();  // ends the reader
}

}  // namespace

std::unique_ptr<AgentStream> AgentStream::start(StreamOptions options, StreamCallbacks callbacks) {
  return std::make_unique<Stream>(std::move(options), std::move(callbacks));
}

void stamp(google::protobuf::Timestamp* out, absl::Time time) {
  const int64_t seconds = absl::ToUnixSeconds(time);
  out->set_seconds(seconds);
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
}

absl::Time to_time(const google::protobuf::Timestamp& stamp) {
  return absl::FromUnixSeconds(stamp.seconds()) + absl::Nanoseconds(stamp.nanos());
}

std::string make_boot_id() {
  absl::BitGen random;
  return absl::StrFormat("%016x%016x", absl::Uniform<uint64_t>(random), absl::Uniform<uint64_t>(random));
}

}  // namespace dxpu::agent
