#include "poolmgr/store/sqlite_store.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "poolmgr/store/schema.h"
#include "poolmgr/store/sqlite.h"
#include "poolmgr/store/sqlite_rows.h"
#include "proxy/base/status.h"
#include "proxy/base/unique_fd.h"

namespace dxpu::poolmgr {
namespace {

using sqlite::Connection;
using sqlite::Run;

// Who wants to know about commits. Shared with the subscriptions, which may outlive the store.
class Watchers {
 public:
  uint64_t add(std::function<void(int64_t)> wake) {
    absl::MutexLock lock(&mutex_);
    const uint64_t id = next_++;
    wakes_.emplace(id, std::make_shared<Watcher>(std::move(wake)));
    return id;
  }
  void remove(uint64_t id) {
    std::shared_ptr<Watcher> watcher;
    {
      absl::MutexLock lock(&mutex_);
      auto it = wakes_.find(id);
      if (it == wakes_.end()) return;
      watcher = it->second;
      wakes_.erase(it);
    }
    absl::MutexLock lock(&watcher->running);
    watcher->wake = nullptr;
  }
  void tell(int64_t revision) {
    std::vector<std::shared_ptr<Watcher>> all;
    {
      absl::MutexLock lock(&mutex_);
      all.reserve(wakes_.size());
      for (auto& [id, watcher] : wakes_) all.push_back(watcher);
    }
    for (auto& watcher : all) {
      absl::MutexLock lock(&watcher->running);
      if (watcher->wake) watcher->wake(revision);
    }
  }

 private:
  struct Watcher {
    explicit Watcher(std::function<void(int64_t)> w) : wake(std::move(w)) {}
    absl::Mutex running;
    std::function<void(int64_t)> wake;
  };
  absl::Mutex mutex_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::shared_ptr<Watcher>> wakes_ ABSL_GUARDED_BY(mutex_);
};

class WatcherSubscription : public Subscription {
 public:
  WatcherSubscription(std::shared_ptr<Watchers> watchers, uint64_t id) : watchers_(std::move(watchers)), id_(id) {}
  ~WatcherSubscription() override { watchers_->remove(id_); }

 private:
  std::shared_ptr<Watchers> watchers_;
  uint64_t id_;
};

class SqliteTransaction : public Transaction {
 public:
  SqliteTransaction(Connection& connection, int64_t base) : connection_(connection), base_(base) {}
  int64_t revision() const override { return base_ + 1; }
  int64_t reached() const { return base_ + std::max<int64_t>(1, events_); }

  absl::Status put(const BoxRecord& r) override { return note(sqlite::write(connection_, r, revision())); }
  absl::Status put(const HostRecord& r) override { return note(sqlite::write(connection_, r, revision())); }
  absl::Status put(const FunctionRecord& r) override { return note(sqlite::write(connection_, r, revision())); }
  absl::Status put(const AttachmentRecord& r) override { return note(sqlite::write(connection_, r, revision())); }
  absl::Status put(const OperationRecord& r) override { return note(sqlite::write(connection_, r, revision())); }
  absl::Status remember(const RequestRecord& r) override { return note(sqlite::write(connection_, r)); }
  absl::Status erase_function(absl::string_view id) override { return erase("DELETE FROM functions WHERE id = ?", id); }
  absl::Status erase_box(absl::string_view id) override { return erase("DELETE FROM boxes WHERE id = ?", id); }
  absl::Status erase_host(absl::string_view id) override { return erase("DELETE FROM hosts WHERE id = ?", id); }
  absl::Status append(const EventRecord& event) override {
    EventRecord numbered = event;
    numbered.revision = base_ + ++events_;
    return note(sqlite::write(connection_, numbered));
  }
  // The first error of any call: a change that overlooks one is not committed either.
  const absl::Status& status() const { return status_; }

 private:
  absl::Status note(absl::Status status) {
    if (status_.ok()) status_ = status;
    return status;
  }
  absl::Status erase(const char* sql, absl::string_view id) {
    absl::StatusOr<Run> run = connection_.prepare(sql);
    if (!run.ok()) return note(run.status());
    return note(run->bind(id).finish());
  }

  Connection& connection_;
  const int64_t base_;
  int64_t events_ = 0;
  absl::Status status_;
};

class SqliteStore : public Store {
 public:
  SqliteStore(std::string path, base::UniqueFd lock, std::unique_ptr<Connection> writer,
              std::unique_ptr<Connection> reader, int64_t revision)
      : path_(std::move(path)),
        lock_(std::move(lock)),
        writer_(std::move(writer)),
        reader_(std::move(reader)),
        revision_(revision) {}

  absl::StatusOr<int64_t> transact(absl::FunctionRef<absl::Status(Transaction&)> change) override {
    int64_t reached;
    {
      absl::MutexLock lock(&write_mutex_);
      DXPU_ASSIGN_OR_RETURN(reached, locked_transact(change));
    }
    watchers_->tell(reached);
    return reached;
  }

  int64_t revision() const override { return revision_.load(std::memory_order_acquire); }

  absl::StatusOr<Snapshot> load() override {
    absl::MutexLock lock(&write_mutex_);
    Snapshot out;
    out.revision = revision();
    DXPU_ASSIGN_OR_RETURN(out.boxes, sqlite::read_boxes(*writer_));
    DXPU_ASSIGN_OR_RETURN(out.hosts, sqlite::read_hosts(*writer_));
    DXPU_ASSIGN_OR_RETURN(out.functions, sqlite::read_functions(*writer_));
    AttachmentFilter every;
    every.limit = UINT32_MAX;
    DXPU_ASSIGN_OR_RETURN(out.attachments, sqlite::read_attachments(*writer_, every));
    DXPU_ASSIGN_OR_RETURN(out.operations, sqlite::read_running_operations(*writer_));
    return out;
  }

  absl::StatusOr<std::optional<RequestRecord>> request(absl::string_view request_id) override {
    absl::MutexLock lock(&read_mutex_);
    return sqlite::read_request(*reader_, request_id);
  }
  absl::StatusOr<std::optional<OperationRecord>> operation(absl::string_view id) override {
    absl::MutexLock lock(&read_mutex_);
    return sqlite::read_operation(*reader_, id);
  }
  absl::StatusOr<std::vector<AttachmentRecord>> attachments(const AttachmentFilter& filter) override {
    absl::MutexLock lock(&read_mutex_);
    return sqlite::read_attachments(*reader_, filter);
  }
  absl::StatusOr<std::vector<EventRecord>> events(int64_t since, absl::string_view attachment_id,
                                                  uint32_t limit) override {
    absl::MutexLock lock(&read_mutex_);
    DXPU_ASSIGN_OR_RETURN(Run run, reader_->prepare("SELECT value FROM meta WHERE key = 'compacted'"));
    DXPU_ASSIGN_OR_RETURN(bool row, run.step());
    const int64_t compacted = row ? run.integer(0) : 0;
    if (since < compacted) {
      return absl::FailedPreconditionError(absl::StrCat("compacted: events up to revision ", compacted,
                                                        " are no longer kept, asked for those after ", since,
                                                        "; list again and watch from the revision of that list"));
    }
    return sqlite::read_events(*reader_, since, attachment_id, limit);
  }

  std::unique_ptr<Subscription> watch(std::function<void(int64_t)> wake) override {
    return std::make_unique<WatcherSubscription>(watchers_, watchers_->add(std::move(wake)));
  }

  absl::Status prune(const Retention& retention, absl::Time now) override {
    absl::MutexLock lock(&write_mutex_);
    DXPU_RETURN_IF_ERROR(writer_->execute("BEGIN IMMEDIATE"));
    absl::Status status = locked_prune(retention, now);
    if (status.ok()) status = writer_->execute("COMMIT");
    if (!status.ok()) roll_back();
    return status;
  }

  std::string location() const override { return path_; }

 private:
  absl::StatusOr<int64_t> locked_transact(absl::FunctionRef<absl::Status(Transaction&)> change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_) {
    DXPU_RETURN_IF_ERROR(writer_->execute("BEGIN IMMEDIATE"));
    SqliteTransaction transaction(*writer_, revision());
    absl::Status status = change(transaction);
    if (status.ok()) status = transaction.status();
    if (status.ok()) status = set_meta("revision", transaction.reached());
    if (status.ok()) status = writer_->execute("COMMIT");
    if (!status.ok()) {
      roll_back();
      return status;
    }
    revision_.store(transaction.reached(), std::memory_order_release);
    return transaction.reached();
  }

  absl::Status set_meta(absl::string_view key, int64_t value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_) {
    DXPU_ASSIGN_OR_RETURN(Run run, writer_->prepare("UPDATE meta SET value = ? WHERE key = ?"));
    return run.bind(value).bind(key).finish();
  }

  // SQLite ends the transaction by itself after some errors (a full disk is one).
  void roll_back() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_) {
    if (writer_->in_transaction()) writer_->execute("ROLLBACK").IgnoreError();
  }

  absl::Status locked_prune(const Retention& retention, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_) {
    int64_t cut = 0;
    {
      DXPU_ASSIGN_OR_RETURN(Run run,
                            writer_->prepare("SELECT revision FROM events ORDER BY revision DESC LIMIT 1 OFFSET ?"));
      DXPU_ASSIGN_OR_RETURN(bool row, run.bind(retention.events).step());
      if (row) cut = run.integer(0);
    }
    if (cut > 0) {
      DXPU_ASSIGN_OR_RETURN(Run run, writer_->prepare("DELETE FROM events WHERE revision <= ?"));
      DXPU_RETURN_IF_ERROR(run.bind(cut).finish());
      DXPU_RETURN_IF_ERROR(set_meta("compacted", cut));
    }
    for (const char* sql : {"DELETE FROM attachments WHERE state IN (9, 10) AND version <= (SELECT version FROM "
                            "attachments WHERE state IN "
                            "(9, 10) ORDER BY version DESC LIMIT 1 OFFSET ?)",
                            "DELETE FROM operations WHERE done = 1 AND version <= (SELECT version FROM operations "
                            "WHERE done = 1 ORDER BY "
                            "version DESC LIMIT 1 OFFSET ?)"}) {
      DXPU_ASSIGN_OR_RETURN(Run run, writer_->prepare(sql));
      DXPU_RETURN_IF_ERROR(run.bind(retention.ended).finish());
    }
    DXPU_ASSIGN_OR_RETURN(Run run, writer_->prepare("DELETE FROM requests WHERE time < ?"));
    return run.bind(now - retention.requests).finish();
  }

  const std::string path_;
  const base::UniqueFd lock_;
  absl::Mutex write_mutex_;
  std::unique_ptr<Connection> writer_ ABSL_PT_GUARDED_BY(write_mutex_);
  absl::Mutex read_mutex_;
  std::unique_ptr<Connection> reader_ ABSL_PT_GUARDED_BY(read_mutex_);
  std::atomic<int64_t> revision_;
  const std::shared_ptr<Watchers> watchers_ = std::make_shared<Watchers>();
};

absl::StatusOr<base::UniqueFd> lock_file(const std::string& database) {
  const std::string path = database + ".lock";
  base::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.valid()) {
    const int error = errno;
    return absl::FailedPreconditionError(absl::StrCat("database ", database, ": can not create ", path, ": ",
                                                      std::strerror(error),
                                                      "; its directory must exist and be writable"));
  }
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("database ", database, " is in use by another dxpu-poolmgr (",
                                                      path, " is locked); stop that one or name another file"));
  }
  return fd;
}

absl::Status check_whole(Connection& connection, const std::string& path) {
  DXPU_ASSIGN_OR_RETURN(Run run, connection.prepare("PRAGMA quick_check(1)"));
  DXPU_ASSIGN_OR_RETURN(bool row, run.step());
  const std::string verdict = row ? run.text(0) : "no answer";
  if (verdict == "ok") return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("database ", path, " is damaged: ", verdict,
                                          ". Restore it from a backup, or move it away to start with an empty pool"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> open_sqlite_store(const SqliteOptions& options) {
  if (options.path.empty()) return absl::InvalidArgumentError("the database needs a file name");
  DXPU_ASSIGN_OR_RETURN(base::UniqueFd lock, lock_file(options.path));
  DXPU_ASSIGN_OR_RETURN(auto writer, Connection::open(options.path, Connection::Mode::kReadWrite));
  // Looked at before anything is written: a file that is not ours stays as it is.
  DXPU_RETURN_IF_ERROR(check_whole(*writer, options.path));
  DXPU_RETURN_IF_ERROR(sqlite::check_ours(*writer, options.path));
  DXPU_RETURN_IF_ERROR(
      writer->execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;"));
  if (options.max_pages > 0) {
    DXPU_RETURN_IF_ERROR(writer->pragma(absl::StrCat("PRAGMA max_page_count = ", options.max_pages).c_str()).status());
  }
  DXPU_RETURN_IF_ERROR(sqlite::migrate(*writer));
  DXPU_ASSIGN_OR_RETURN(auto reader, Connection::open(options.path, Connection::Mode::kRead));
  DXPU_ASSIGN_OR_RETURN(int64_t revision, writer->pragma("SELECT value FROM meta WHERE key = 'revision'"));
  return std::make_unique<SqliteStore>(options.path, std::move(lock), std::move(writer), std::move(reader), revision);
}

}  // namespace dxpu::poolmgr
