#include "poolmgr/service/agent_service.h"

#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/grpc_status.h"

namespace dxpu::poolmgr {
namespace {

using Bidi = grpc::ServerBidiReactor<v1::AgentMessage, v1::ManagerMessage>;

// Outlives the stream as long as the reconciler holds it; after the stream's end it swallows what it is given.
class StreamLink : public AgentLink {
 public:
  StreamLink(Bidi* stream, grpc::CallbackServerContext* context)
      : peer_(context->peer()), stream_(stream), context_(context) {}

  uint64_t send(v1::ManagerMessage message) override {
    absl::MutexLock lock(&mutex_);
    const uint64_t sequence = ++sequence_;
    message.set_sequence(sequence);
    // The first one may be on its way already.
    for (size_t i = writing_ ? 1 : 0; i < queue_.size(); ++i) {
      if (queue_[i].body_case() != message.body_case()) continue;
      queue_.erase(queue_.begin() + static_cast<ptrdiff_t>(i));
      break;
    }
    queue_.push_back(std::move(message));
    write_next();
    return sequence;
  }

  void close(absl::Status why) override {
    absl::MutexLock lock(&mutex_);
    if (stream_ == nullptr || finished_ || !pending_.ok()) return;
    if (!writing_) {
      finish(why);
      return;
    }
    // The write may wait for a peer that never reads: cancelling ends it.
    pending_ = why;
    context_->TryCancel();
  }
  std::string peer() const override { return peer_; }

  // ---- from the stream ----
  void written(bool ok) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    queue_.pop_front();
    if (!pending_.ok()) {
      finish(pending_);
    } else if (ok) {
      write_next();
    }
  }
  void end(const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    if (writing_) {
      if (pending_.ok()) pending_ = why.ok() ? absl::CancelledError("the agent ended its stream") : why;
      return;
    }
    finish(why);
  }
  void done() {
    absl::MutexLock lock(&mutex_);
    stream_ = nullptr;
  }

 private:
  void write_next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || queue_.empty() || finished_ || stream_ == nullptr) return;
    writing_ = true;
    stream_->StartWrite(&queue_.front());
  }
  void finish(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(finished_, true) || stream_ == nullptr) return;
    stream_->Finish(to_grpc(why));
  }

  const std::string peer_;
  absl::Mutex mutex_;
  Bidi* stream_ ABSL_GUARDED_BY(mutex_);
  grpc::CallbackServerContext* const context_;  // lives as long as stream_
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<v1::ManagerMessage> queue_ ABSL_GUARDED_BY(mutex_);  // the front stays until it is written
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status pending_ ABSL_GUARDED_BY(mutex_);
};

class AgentStream : public Bidi {
 public:
  AgentStream(Reconciler& reconciler, grpc::CallbackServerContext* context)
      : reconciler_(reconciler), link_(std::make_shared<StreamLink>(this, context)) {
    StartRead(&message_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) {
      reconciler_.disconnected(link_.get());
      link_->end(absl::OkStatus());
      return;
    }
    if (absl::Status status = reconciler_.message(link_, message_); !status.ok()) {
      link_->end(status);
      return;
    }
    StartRead(&message_);
  }
  void OnWriteDone(bool ok) override { link_->written(ok); }
  void OnCancel() override {
    reconciler_.disconnected(link_.get());
    link_->end(absl::CancelledError("the agent's stream broke"));
  }
  void OnDone() override {
    reconciler_.disconnected(link_.get());
    link_->done();
    delete this;
  }

 private:
  Reconciler& reconciler_;
  const std::shared_ptr<StreamLink> link_;
  v1::AgentMessage message_;
};

}  // namespace

grpc::ServerBidiReactor<v1::AgentMessage, v1::ManagerMessage>* AgentServiceImpl::Connect(
    grpc::CallbackServerContext* context) {
  return new AgentStream(reconciler_, context);
}

}  // namespace dxpu::poolmgr
