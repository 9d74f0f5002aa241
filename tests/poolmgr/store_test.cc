#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>

#include "absl/strings/str_cat.h"
#include "poolmgr/store/sqlite_store.h"

namespace dxpu::poolmgr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() {
    char pattern[] = "/tmp/dxpu-store-XXXXXX";
    dir_ = ::mkdtemp(pattern);
    path_ = dir_ + "/pool.db";
  }
  ~StoreTest() override { std::filesystem::remove_all(dir_); }

  std::unique_ptr<Store> open(int64_t max_pages = 0) {
    absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({path_, max_pages});
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  // Runs SQL on the file behind the store's back.
  void raw(const std::string& sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK) << sqlite3_errmsg(db);
    sqlite3_close(db);
  }

  std::string dir_, path_;
};

absl::Time at(int64_t seconds) { return absl::FromUnixSeconds(seconds); }

BoxRecord a_box() {
  BoxRecord r;
  r.id = "b1";
  r.owner = "ops";
  r.paths = {"10.0.0.1:7000", "10.1.0.1:7000"};
  r.slot_count = 4;
  r.physical_gpus = {{"0000:01:00.0", 0x10de, 0x2330, "H100"}};
  r.cordoned = true;
  r.software_version = "1";
  r.boot_id = "boot";
  r.last_seen = at(5);
  return r;
}

FunctionRecord a_function(uint32_t slot = 3) {
  FunctionRecord r;
  r.id = function_id("b1", slot);
  r.box_id = "b1";
  r.slot = slot;
  r.owner = "o";
  r.model = "dxpu-soft";
  r.memory_bytes = std::numeric_limits<uint64_t>::max();
  r.engine = "copy";
  r.vendor_id = 0x1d00;
  r.device_id = 1;
  r.serial = "00ff";
  r.lifecycle = Lifecycle::kAttached;
  r.conditions.set(Condition::kUnhealthy, true);
  r.reason = "because ' it \"is";
  r.since = at(7);
  r.attachment_id = "att-1";
  r.generation = 9;
  return r;
}

AttachmentRecord an_attachment(const std::string& id = "att-1", uint32_t port = 2, uint32_t slot = 3) {
  AttachmentRecord r;
  r.id = id;
  r.owner = "o";
  r.host_id = "h1";
  r.port = port;
  r.box_id = "b1";
  r.slot = slot;
  r.paths = {"10.0.0.1:7000"};
  r.state = AttachmentState::kAttached;
  r.reason = "shown";
  r.since = at(8);
  r.created = at(6);
  r.bus_address = "0001:01:00.0";
  r.operation_id = "op-1";
  r.generation = 9;
  r.token = std::string("\0\1\2", 3);
  r.ticket_expires = at(100);
  r.host_generation = 8;
  r.host_token = std::string(32, '\xff');
  r.host_ticket_expires = at(90);
  r.box_served = true;
  return r;
}

OperationRecord an_operation() {
  OperationRecord r;
  r.id = "op-1";
  r.kind = "attach";
  r.attachment_ids = {"att-1", "att-2"};
  r.steps = {{"place", StepState::kDone, "b1/3", at(1), at(2)},
             {"serve", StepState::kRunning, "", at(2), absl::InfinitePast()}};
  r.created = at(1);
  r.deadline = at(60);
  return r;
}

EventRecord an_event(const std::string& message, const std::string& attachment = "") {
  EventRecord e;
  e.time = at(1);
  e.type = "t";
  e.subject = "s";
  e.message = message;
  e.attachment_id = attachment;
  return e;
}

std::vector<std::string> messages(const std::vector<EventRecord>& events) {
  std::vector<std::string> out;
  for (const EventRecord& e : events) out.push_back(e.message);
  return out;
}

TEST_F(StoreTest, EverythingReadsBackAsItWasWritten) {
  HostRecord host;
  host.id = "h1";
  host.port_count = 4;
  host.attach_point = "kernel";
  {
    std::unique_ptr<Store> store = open();
    ASSERT_TRUE(store
                    ->transact([&](Transaction& t) {
                      EXPECT_TRUE(t.put(a_box()).ok());
                      EXPECT_TRUE(t.put(host).ok());
                      EXPECT_TRUE(t.put(a_function()).ok());
                      EXPECT_TRUE(t.put(an_attachment()).ok());
                      return t.put(an_operation());
                    })
                    .ok());
  }
  std::unique_ptr<Store> store = open();
  absl::StatusOr<Snapshot> snapshot = store->load();
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  auto versioned = [](auto record) {
    record.version = 1;
    return record;
  };
  EXPECT_EQ(snapshot->revision, 1);
  EXPECT_THAT(snapshot->boxes, ElementsAre(versioned(a_box())));
  EXPECT_THAT(snapshot->hosts, ElementsAre(versioned(host)));
  EXPECT_THAT(snapshot->functions, ElementsAre(versioned(a_function())));
  EXPECT_THAT(snapshot->attachments, ElementsAre(versioned(an_attachment())));
  EXPECT_THAT(snapshot->operations, ElementsAre(versioned(an_operation())));
}

TEST_F(StoreTest, RevisionsAndEventsHaveNoGapsAReaderCouldFallInto) {
  std::unique_ptr<Store> store = open();
  EXPECT_EQ(store->revision(), 0);
  EXPECT_EQ(*store->transact([](Transaction& t) {
    EXPECT_EQ(t.revision(), 1);
    (void)t.append(an_event("a"));
    (void)t.append(an_event("b", "att-1"));
    return t.append(an_event("c"));
  }),
            3);
  EXPECT_EQ(*store->transact([](Transaction& t) { return t.put(a_box()); }), 4);
  EXPECT_EQ(*store->transact([](Transaction& t) { return t.append(an_event("d", "att-1")); }), 5);
  EXPECT_THAT(messages(*store->events(0, "", 100)), ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(messages(*store->events(0, "", 2)), ElementsAre("a", "b"));
  EXPECT_THAT(messages(*store->events(2, "", 100)), ElementsAre("c", "d"));
  EXPECT_THAT(messages(*store->events(0, "att-1", 100)), ElementsAre("b", "d"));
  EXPECT_EQ(store->events(3, "", 1)->front().revision, 5);
}

TEST_F(StoreTest, AFailedTransactionLeavesNothing) {
  std::unique_ptr<Store> store = open();
  absl::StatusOr<int64_t> result = store->transact([](Transaction& t) {
    (void)t.append(an_event("never"));
    (void)t.put(a_box());
    return absl::AbortedError("changed my mind");
  });
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
  // An error that the change overlooks counts too: this function's box does not exist.
  EXPECT_FALSE(store
                   ->transact([](Transaction& t) {
                     (void)t.put(a_function());
                     return t.append(an_event("neither"));
                   })
                   .ok());
  EXPECT_EQ(store->revision(), 0);
  EXPECT_TRUE(store->events(0, "", 10)->empty());
  EXPECT_TRUE(store->load()->boxes.empty());
  EXPECT_TRUE(store->transact([](Transaction& t) { return t.append(an_event("yes")); }).ok());
}

TEST_F(StoreTest, NoTwoHoldersOfOneFunctionOrPort) {
  std::unique_ptr<Store> store = open();
  ASSERT_TRUE(store->transact([](Transaction& t) { return t.put(an_attachment("att-1", 2, 3)); }).ok());
  EXPECT_FALSE(store->transact([](Transaction& t) { return t.put(an_attachment("att-2", 4, 3)); }).ok());
  EXPECT_FALSE(store->transact([](Transaction& t) { return t.put(an_attachment("att-3", 2, 1)); }).ok());
  EXPECT_TRUE(store->transact([](Transaction& t) { return t.put(an_attachment("att-4", 4, 1)); }).ok());
  // Over while it holds something: refused.
  AttachmentRecord over = an_attachment();
  over.state = AttachmentState::kEnded;
  over.box_released = true;
  EXPECT_FALSE(store->transact([&](Transaction& t) { return t.put(over); }).ok());
  over.host_released = true;
  EXPECT_TRUE(store->transact([&](Transaction& t) { return t.put(over); }).ok());
  EXPECT_TRUE(store->transact([](Transaction& t) { return t.put(an_attachment("att-3", 2, 3)); }).ok());
}

TEST_F(StoreTest, RequestsAreRememberedOnce) {
  std::unique_ptr<Store> store = open();
  const RequestRecord request{"r1", "Attach", std::string("\0x", 2), "op-1", at(1)};
  ASSERT_TRUE(store->transact([&](Transaction& t) { return t.remember(request); }).ok());
  EXPECT_FALSE(store->transact([&](Transaction& t) { return t.remember(request); }).ok());
  absl::StatusOr<std::optional<RequestRecord>> found = store->request("r1");
  ASSERT_TRUE(found.ok() && found->has_value());
  EXPECT_EQ((*found)->operation_id, "op-1");
  EXPECT_EQ((*found)->fingerprint, request.fingerprint);
  EXPECT_FALSE(store->request("r2")->has_value());
}

TEST_F(StoreTest, WatchersAreToldAfterTheCommitUntilTheyLeave) {
  std::unique_ptr<Store> store = open();
  std::vector<int64_t> told;
  size_t seen = 0;
  std::unique_ptr<Subscription> watch = store->watch([&](int64_t revision) {
    told.push_back(revision);
    seen = store->events(0, "", 100)->size();  // it may read
  });
  ASSERT_TRUE(store->transact([](Transaction& t) { return t.append(an_event("a")); }).ok());
  EXPECT_THAT(told, ElementsAre(1));
  EXPECT_EQ(seen, 1u);
  EXPECT_FALSE(store->transact([](Transaction&) { return absl::AbortedError("no"); }).ok());
  EXPECT_THAT(told, ElementsAre(1));
  watch = nullptr;
  ASSERT_TRUE(store->transact([](Transaction& t) { return t.append(an_event("b")); }).ok());
  EXPECT_THAT(told, ElementsAre(1));
}

TEST_F(StoreTest, PruneForgetsTheOldestAndSaysCompacted) {
  std::unique_ptr<Store> store = open();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(store
                    ->transact([&](Transaction& t) {
                      AttachmentRecord a = an_attachment(absl::StrCat("att-", 100 + i));
                      a.state = AttachmentState::kEnded;
                      a.box_released = a.host_released = true;
                      (void)t.put(a);
                      return t.append(an_event(absl::StrCat(i)));
                    })
                    .ok());
  }
  Retention retention;
  retention.events = 5;
  retention.ended = 3;
  ASSERT_TRUE(store->prune(retention, at(10)).ok());
  absl::StatusOr<std::vector<EventRecord>> old = store->events(0, "", 100);
  EXPECT_EQ(old.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(old.status().message()), HasSubstr("compacted"));
  EXPECT_THAT(messages(*store->events(15, "", 100)), ElementsAre("15", "16", "17", "18", "19"));
  AttachmentFilter filter;
  filter.include_ended = true;
  EXPECT_EQ(store->attachments(filter)->size(), 3u);
}

TEST_F(StoreTest, AttachmentsAreListedInPages) {
  std::unique_ptr<Store> store = open();
  for (uint32_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(
        store->transact([&](Transaction& t) { return t.put(an_attachment(absl::StrCat("att-", i), i, i)); }).ok());
  }
  AttachmentFilter filter;
  filter.limit = 2;
  filter.after_id = "att-1";
  absl::StatusOr<std::vector<AttachmentRecord>> page = store->attachments(filter);
  ASSERT_TRUE(page.ok());
  ASSERT_EQ(page->size(), 2u);
  EXPECT_EQ(page->front().id, "att-2");
  filter = {};
  filter.host_id = "nobody";
  EXPECT_TRUE(store->attachments(filter)->empty());
}

// ---- what goes wrong ----

TEST_F(StoreTest, AFullDiskIsOneClearErrorAndPasses) {
  std::unique_ptr<Store> store = open(60);  // the empty schema takes about 30 pages
  absl::Status status;
  int written = 0;
  for (; written < 2000 && status.ok(); ++written) {
    status = store->transact([&](Transaction& t) { return t.append(an_event(std::string(900, 'x'))); }).status();
  }
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("disk is full"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
  const int64_t revision = store->revision();
  EXPECT_EQ(revision, written - 1);
  // Legal, readable, and it works again when there is room.
  EXPECT_EQ(store->events(0, "", 5000)->size(), static_cast<size_t>(revision));
  Retention retention;
  retention.events = 5;
  ASSERT_TRUE(store->prune(retention, at(1)).ok());
  EXPECT_EQ(*store->transact([](Transaction& t) { return t.append(an_event("again")); }), revision + 1);
}

TEST_F(StoreTest, ADamagedFileIsRefusedAndLeftAlone) {
  open();
  {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 + 100);
    for (int i = 0; i < 20000; ++i) file.put('\x5a');
  }
  absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({path_, 0});
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << store.status();
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("backup"));
}

TEST_F(StoreTest, AFileThatIsNoDatabaseIsRefused) {
  std::ofstream(path_) << std::string(10000, 'n');
  absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({path_, 0});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << store.status();
  std::ifstream file(path_);
  EXPECT_EQ(file.get(), 'n');
}

TEST_F(StoreTest, SomebodyElsesDatabaseIsRefused) {
  raw("CREATE TABLE theirs (x); PRAGMA application_id = 77;");
  absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({path_, 0});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("another program"));
}

TEST_F(StoreTest, ANewerSchemaIsRefused) {
  open();
  raw("PRAGMA user_version = 99;");
  absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({path_, 0});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("newer dxpu-poolmgr"));
}

TEST_F(StoreTest, ASecondPoolManagerIsRefused) {
  std::unique_ptr<Store> first = open();
  absl::StatusOr<std::unique_ptr<Store>> second = open_sqlite_store({path_, 0});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use by another"));
  first = nullptr;
  EXPECT_TRUE(open_sqlite_store({path_, 0}).ok());
}

TEST_F(StoreTest, AMissingDirectoryIsNamed) {
  absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({dir_ + "/no/such/pool.db", 0});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("directory must exist"));
}

// A child writes for ever, in transactions of three; it is killed at a random moment, also in the middle of one.
TEST_F(StoreTest, KilledInTheMiddleItReopensWithWholeTransactionsOnly) {
  int64_t least = 0;
  for (int round = 0; round < 8; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(::pipe(pipe_fds), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      absl::StatusOr<std::unique_ptr<Store>> store = open_sqlite_store({path_, 0});
      if (!store.ok()) ::_exit(3);
      while (true) {
        absl::StatusOr<int64_t> revision = (*store)->transact([&](Transaction& t) {
          for (const char* part : {"1", "2", "3"}) (void)t.append(an_event(part));
          if (round % 2 == 1 && t.revision() > least + 60) ::kill(::getpid(), SIGKILL);  // in mid-transaction
          return absl::OkStatus();
        });
        if (!revision.ok() || ::write(pipe_fds[1], &*revision, sizeof(*revision)) < 0) ::_exit(4);
      }
    }
    ::close(pipe_fds[1]);
    int64_t acknowledged = 0;
    for (int i = 0; i < 20; ++i) {
      if (::read(pipe_fds[0], &acknowledged, sizeof(acknowledged)) != sizeof(acknowledged)) break;
    }
    if (round % 2 == 0) ::kill(child, SIGKILL);
    int state = 0;
    while (::read(pipe_fds[0], &acknowledged, sizeof(acknowledged)) == sizeof(acknowledged)) {
    }
    ::close(pipe_fds[0]);
    ASSERT_EQ(::waitpid(child, &state, 0), child);
    ASSERT_TRUE(WIFSIGNALED(state)) << state;

    std::unique_ptr<Store> store = open();
    ASSERT_NE(store, nullptr);
    // What was acknowledged is there; what is there is whole.
    EXPECT_GE(store->revision(), acknowledged);
    EXPECT_GT(acknowledged, least);
    absl::StatusOr<std::vector<EventRecord>> events = store->events(least, "", 1'000'000);
    ASSERT_TRUE(events.ok());
    ASSERT_EQ(events->size() % 3, 0u);
    EXPECT_EQ(static_cast<int64_t>(events->size()), store->revision() - least);
    least = store->revision();
  }
}

}  // namespace
}  // namespace dxpu::poolmgr
