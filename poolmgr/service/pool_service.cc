#include "poolmgr/service/pool_service.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "poolmgr/service/convert.h"
#include "proto/grpc_status.h"
#include "proxy/base/status.h"

namespace dxpu::poolmgr {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(200);   // how late a WaitOperation may be to its timeout
constexpr absl::Duration kProgress = absl::Seconds(5);      // an idle watcher hears this often how far it is
constexpr absl::Duration kLongestWait = absl::Minutes(10);  // as pool.proto says
constexpr uint32_t kEventsPerMessage = 256;

template <typename Response>
grpc::ServerUnaryReactor* answer(grpc::CallbackServerContext* context, absl::StatusOr<Response> result, Response* out) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (result.ok()) *out = *std::move(result);
  reactor->Finish(to_grpc(result.status()));
  return reactor;
}

class OperationWaiter : public grpc::ServerUnaryReactor, public Waiting {
 public:
  OperationWaiter(PoolServiceImpl& service, const v1::WaitOperationRequest& request, v1::Operation* out)
      : service_(service), id_(request.id()), out_(out) {
    absl::Duration timeout = request.has_timeout() ? get_duration(request.timeout()) : kLongestWait;
    until_ = absl::Now() + std::clamp(timeout, absl::ZeroDuration(), kLongestWait);
    if (!service_.add(this)) end(absl::UnavailableError("the pool manager is stopping"));
    look();
  }

  void look() override {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    absl::StatusOr<v1::Operation> op = service_.operation(id_);
    if (op.ok() && !op->done() && absl::Now() < until_) return;
    finished_ = true;
    if (op.ok()) *out_ = *std::move(op);
    Finish(to_grpc(op.status()));
  }
  void end(absl::Status why) override {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(finished_, true)) return;
    Finish(to_grpc(why));
  }
  void OnCancel() override { end(absl::CancelledError("the caller left")); }
  void OnDone() override {
    service_.remove(this);
    delete this;
  }

 private:
  PoolServiceImpl& service_;
  const std::string id_;
  v1::Operation* const out_;
  absl::Time until_;
  absl::Mutex mutex_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class EventWatcher : public grpc::ServerWriteReactor<v1::WatchResponse>, public Waiting {
 public:
  EventWatcher(PoolServiceImpl& service, const v1::WatchRequest& request)
      : service_(service), attachment_id_(request.attachment_id()), cursor_(request.since_revision()) {
    if (!service_.add(this)) end(absl::UnavailableError("the pool manager is stopping"));
    const int64_t newest = service_.store().revision();
    if (cursor_ > newest || cursor_ < 0) {
      end(absl::FailedPreconditionError(absl::StrCat("compacted: since_revision ", cursor_,
                                                     " is not of this database, which is at ", newest,
                                                     "; list again and watch from the revision of that list")));
    }
    look();
  }

  void look() override {
    absl::MutexLock lock(&mutex_);
    pump();
  }
  void end(absl::Status why) override {
    absl::MutexLock lock(&mutex_);
    finish(why);
  }
  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok && pending_.ok()) pending_ = absl::CancelledError("the watcher left");
    if (!pending_.ok()) {
      finish(pending_);
      return;
    }
    pump();
  }
  void OnCancel() override { end(absl::CancelledError("the watcher left")); }
  void OnDone() override {
    service_.remove(this);
    delete this;
  }

 private:
  void pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    // Read before the events: what is committed in between comes with the next message.
    const int64_t newest = service_.store().revision();
    message_.Clear();
    if (newest > cursor_) {
      absl::StatusOr<std::vector<EventRecord>> events =
          service_.store().events(cursor_, attachment_id_, kEventsPerMessage);
      if (!events.ok()) {
        finish(events.status());
        return;
      }
      for (const EventRecord& e : *events) *message_.add_events() = to_proto(e);
      cursor_ = events->size() == kEventsPerMessage ? events->back().revision
                                                    : std::max(newest, events->empty() ? 0 : events->back().revision);
    }
    if (message_.events_size() == 0 && absl::Now() < progress_) return;
    progress_ = absl::Now() + kProgress;
    message_.set_progress_revision(cursor_);
    writing_ = true;
    StartWrite(&message_);
  }
  void finish(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    if (writing_) {  // one operation at a time: the end of the write ends the call
      pending_ = why;
      return;
    }
    finished_ = true;
    Finish(to_grpc(why));
  }

  PoolServiceImpl& service_;
  const std::string attachment_id_;
  absl::Mutex mutex_;
  int64_t cursor_ ABSL_GUARDED_BY(mutex_);
  absl::Time progress_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status pending_ ABSL_GUARDED_BY(mutex_);
  v1::WatchResponse message_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

PoolServiceImpl::PoolServiceImpl(Reconciler& reconciler, Store& store) : reconciler_(reconciler), store_(store) {
  subscription_ = store_.watch([this](int64_t) {
    absl::MutexLock lock(&wake_mutex_);
    woken_ = true;
  });
  dispatcher_ = std::thread([this] { dispatch(); });
}

PoolServiceImpl::~PoolServiceImpl() { stop(); }

void PoolServiceImpl::stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (Waiting* w : waiting_)
      w->end(absl::UnavailableError("the pool manager is stopping; ask again when it is back"));
  }
  {
    absl::MutexLock lock(&wake_mutex_);
    over_ = true;
  }
  if (dispatcher_.joinable()) dispatcher_.join();
  subscription_ = nullptr;
}

void PoolServiceImpl::dispatch() {
  while (true) {
    {
      absl::MutexLock lock(&wake_mutex_);
      auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(wake_mutex_) { return woken_ || over_; };
      wake_mutex_.AwaitWithTimeout(absl::Condition(&due), kLook);
      if (over_) return;
      woken_ = false;
    }
    absl::MutexLock lock(&mutex_);
    for (Waiting* w : waiting_) w->look();
  }
}

bool PoolServiceImpl::add(Waiting* waiting) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return false;
  waiting_.insert(waiting);
  return true;
}

void PoolServiceImpl::remove(Waiting* waiting) {
  absl::MutexLock lock(&mutex_);
  waiting_.erase(waiting);
}

absl::StatusOr<v1::Operation> PoolServiceImpl::operation(const std::string& id) {
  DXPU_ASSIGN_OR_RETURN(std::optional<OperationRecord> op, store_.operation(id));
  if (!op) return absl::NotFoundError(absl::StrCat("there is no operation \"", id.substr(0, 80), "\""));
  return to_proto(*op);
}

grpc::ServerUnaryReactor* PoolServiceImpl::GetPool(Context* context, const v1::GetPoolRequest*,
                                                   v1::GetPoolResponse* out) {
  return answer(context, reconciler_.pool(), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::ListFunctions(Context* context, const v1::ListFunctionsRequest* request,
                                                         v1::ListFunctionsResponse* out) {
  return answer(context, reconciler_.functions(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::ListBoxes(Context* context, const v1::ListBoxesRequest* request,
                                                     v1::ListBoxesResponse* out) {
  return answer(context, reconciler_.boxes(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::ListHosts(Context* context, const v1::ListHostsRequest* request,
                                                     v1::ListHostsResponse* out) {
  return answer(context, reconciler_.hosts(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::ListAttachments(Context* context, const v1::ListAttachmentsRequest* request,
                                                           v1::ListAttachmentsResponse* out) {
  return answer(context, reconciler_.attachments(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::Attach(Context* context, const v1::AttachRequest* request,
                                                  v1::AttachResponse* out) {
  return answer(context, reconciler_.attach(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::Detach(Context* context, const v1::DetachRequest* request,
                                                  v1::DetachResponse* out) {
  return answer(context, reconciler_.detach(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::GetOperation(Context* context, const v1::GetOperationRequest* request,
                                                        v1::Operation* out) {
  return answer(context, operation(request->id()), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::WaitOperation(Context*, const v1::WaitOperationRequest* request,
                                                         v1::Operation* out) {
  return new OperationWaiter(*this, *request, out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::SetCordon(Context* context, const v1::SetCordonRequest* request,
                                                     v1::SetCordonResponse* out) {
  return answer(context, reconciler_.set_cordon(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::RemoveBox(Context* context, const v1::RemoveBoxRequest* request,
                                                     v1::RemoveBoxResponse* out) {
  return answer(context, reconciler_.remove_box(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::RemoveHost(Context* context, const v1::RemoveHostRequest* request,
                                                      v1::RemoveHostResponse* out) {
  return answer(context, reconciler_.remove_host(*request), out);
}
grpc::ServerUnaryReactor* PoolServiceImpl::GetTables(Context* context, const v1::GetTablesRequest* request,
                                                     v1::GetTablesResponse* out) {
  return answer(context, reconciler_.tables(*request), out);
}

grpc::ServerUnaryReactor* PoolServiceImpl::ListEvents(Context* context, const v1::ListEventsRequest* request,
                                                      v1::ListEventsResponse* out) {
  auto list = [&]() -> absl::StatusOr<v1::ListEventsResponse> {
    int64_t since = request->since_revision();
    if (const std::string& token = request->page_token(); !token.empty()) {
      const char* end = token.data() + token.size();
      if (auto [p, error] = std::from_chars(token.data(), end, since); error != std::errc() || p != end) {
        return absl::InvalidArgumentError(
            absl::StrCat("page_token \"", token.substr(0, 40), "\" is not one this pool manager gave"));
      }
    }
    const uint32_t size = request->page_size() == 0 ? kDefaultPage : std::min(request->page_size(), kMaxPage);
    v1::ListEventsResponse response;
    response.set_revision(store_.revision());
    DXPU_ASSIGN_OR_RETURN(std::vector<EventRecord> events, store_.events(since, request->attachment_id(), size + 1));
    if (events.size() > size) {
      events.resize(size);
      response.set_next_page_token(absl::StrCat(events.back().revision));
    }
    for (const EventRecord& e : events) *response.add_events() = to_proto(e);
    return response;
  };
  return answer(context, list(), out);
}

grpc::ServerWriteReactor<v1::WatchResponse>* PoolServiceImpl::Watch(Context*, const v1::WatchRequest* request) {
  return new EventWatcher(*this, *request);
}

}  // namespace dxpu::poolmgr
