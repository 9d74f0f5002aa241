#include "tests/integration/cluster.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sqlite3.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dxpu::test {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kPause = absl::Milliseconds(20);

absl::Status to_status(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

void set_deadline(grpc::ClientContext& context, absl::Duration d) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + d));
  context.set_wait_for_ready(false);
}

// "ok", or what is wrong.
std::string check_database(const std::string& path) {
  sqlite3* db = nullptr;
  std::string out = "cannot open";
  if (sqlite3_open_v2(path.c_str(), &db, SQLITE_OPEN_READONLY, nullptr) == SQLITE_OK) {
    sqlite3_busy_timeout(db, 5000);
    out.clear();
    auto row = [](void* to, int, char** values, char**) {
      static_cast<std::string*>(to)->append(values[0] == nullptr ? "null" : values[0]);
      return 0;
    };
    char* error = nullptr;
    sqlite3_exec(db, "PRAGMA integrity_check; PRAGMA foreign_key_check", row, &out, &error);
    if (error != nullptr) out = error;
    sqlite3_free(error);
  }
  sqlite3_close(db);
  return out;
}

}  // namespace

// ---- Process -------------------------------------------------------------------------------------------------------

Process::Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, 0)) {}
Process& Process::operator=(Process&& other) noexcept {
  if (this != &other) {
    kill_and_wait();
    pid_ = std::exchange(other.pid_, 0);
  }
  return *this;
}
Process::~Process() { kill_and_wait(); }

Process Process::start(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                       const std::string& log) {
  std::vector<char*> argv, envp;
  for (const auto& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  for (char** e = environ; *e != nullptr; ++e) {
    if (!std::string(*e).starts_with("DXPU_SYNC_POINT=")) envp.push_back(*e);
  }
  for (const auto& e : environment) envp.push_back(const_cast<char*>(e.c_str()));
  envp.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  Process p;
  int error = posix_spawn(&p.pid_, arguments[0].c_str(), &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(error, 0) << arguments[0];
  if (error != 0) p.pid_ = 0;
  return p;
}

bool Process::running() { return pid_ != 0 && !wait(absl::ZeroDuration()); }

void Process::signal(int number) {
  if (pid_ != 0) ::kill(pid_, number);
}

bool Process::wait(absl::Duration deadline) {
  if (pid_ == 0) return true;
  const absl::Time end = absl::Now() + deadline;
  for (;;) {
    if (::waitpid(pid_, nullptr, WNOHANG) != 0) {
      pid_ = 0;
      return true;
    }
    if (absl::Now() >= end) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

void Process::kill_and_wait() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

// ---- SyncPoint -----------------------------------------------------------------------------------------------------

SyncPoint::SyncPoint(std::string name, std::string marker, std::string action)
    : name_(std::move(name)), marker_(std::move(marker)), action_(std::move(action)) {
  disarm();
}
std::string SyncPoint::environment() const {
  return absl::StrCat("DXPU_SYNC_POINT=", name_, " ", action_, " ", marker_);
}
void SyncPoint::arm() { fs::remove(marker_); }
void SyncPoint::disarm() { std::ofstream(marker_) << "disarmed\n"; }
bool SyncPoint::reached() const { return fs::exists(marker_); }

// ---- Cluster -------------------------------------------------------------------------------------------------------

int free_port() {
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  socklen_t size = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

std::vector<std::string> Cluster::deadlines() {
  return {"--read-deadline=1s", "--fast-io-fail=1500ms", "--ctrl-loss=2s", "--lease=5s", "--keep-alive=200ms"};
}

Cluster::Cluster(const Shape& s) : shape(s) {
  std::string name = fs::temp_directory_path() / "dxpu-cluster-XXXXXX";
  EXPECT_NE(::mkdtemp(name.data()), nullptr);
  dir_ = name;
  pool_port_ = free_port();
  for (int i = 0; i < shape.boxes; ++i) box_ports_.push_back(free_port());
}

Cluster::~Cluster() {
  processes_.clear();
  for (const auto& [pid, command] : workers()) ::kill(pid, SIGKILL);
  // A worker that is still dying may hold a file a moment longer.
  eventually([this] { return workers().empty(); }, absl::Seconds(10));
  std::error_code ignored;
  fs::remove_all(dir_, ignored);
}

std::string Cluster::pool_address() const { return absl::StrCat("127.0.0.1:", pool_port_); }
std::string Cluster::runtime_dir(int box) const { return absl::StrCat(dir_, "/box", box); }

void Cluster::start(const std::string& name, const std::vector<std::string>& environment) {
  const std::string bin = DXPU_BIN_DIR;
  std::vector<std::string> arguments;
  if (name == "pool") {
    arguments = {bin + "/dxpu-poolmgr", "--listen=" + pool_address(), "--database=" + dir_ + "/pool.db",
                 "--heartbeat=500ms", "--agent-silence=5s"};
  } else if (name.starts_with("box")) {
    const int number = std::stoi(name.substr(3));
    arguments = {bin + "/dxpu-boxd",
                 "--id=" + name,
                 "--pool=" + pool_address(),
                 absl::StrCat("--listen=127.0.0.1:", box_ports_.at(number - 1)),
                 absl::StrCat("--slots=", shape.slots),
                 "--memory=1MiB",
                 "--runtime-dir=" + runtime_dir(number)};
  } else {
    arguments = {bin + "/dxpu-hostd", "--id=h1", "--pool=" + pool_address(), "--attach=direct",
                 absl::StrCat("--ports=", shape.ports)};
  }
  if (name != "pool") {
    for (const auto& flag : deadlines()) arguments.push_back(flag);
  }
  processes_[name] = Process::start(arguments, environment, absl::StrCat(dir_, "/", name, ".log"));
}

void Cluster::start_all() {
  start("pool");
  for (int i = 1; i <= shape.boxes; ++i) start(absl::StrCat("box", i));
  if (shape.host_process) start("host");
}

// A channel that failed once has been seen to take 10 s to find the pool manager again, whatever its back-off is set
// to: a new one instead, as each call of the dxpu program has.
void Cluster::refresh() {
  if (channel_ != nullptr) {
    const grpc_connectivity_state state = channel_->GetState(false);
    if (state != GRPC_CHANNEL_TRANSIENT_FAILURE && state != GRPC_CHANNEL_SHUTDOWN) return;
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ = grpc::CreateCustomChannel(pool_address(), grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::PoolService::NewStub(channel_);
}

bool Cluster::eventually(const std::function<bool()>& good, absl::Duration deadline) {
  const absl::Time end = absl::Now() + deadline;
  for (;;) {
    if (good()) return true;
    if (absl::Now() >= end) return false;
    absl::SleepFor(kPause);
  }
}

std::vector<v1::Function> Cluster::functions() {
  refresh();
  grpc::ClientContext context;
  set_deadline(context, absl::Seconds(5));
  v1::ListFunctionsResponse response;
  stub_->ListFunctions(&context, {}, &response).ok();
  return {response.functions().begin(), response.functions().end()};
}

absl::StatusOr<v1::Attachment> Cluster::attachment(const std::string& id) {
  refresh();
  grpc::ClientContext context;
  set_deadline(context, absl::Seconds(5));
  v1::ListAttachmentsRequest request;
  request.set_id(id);
  request.set_include_ended(true);
  v1::ListAttachmentsResponse response;
  if (auto status = stub_->ListAttachments(&context, request, &response); !status.ok()) return to_status(status);
  if (response.attachments_size() != 1) return absl::NotFoundError(id);
  return response.attachments(0);
}

std::vector<v1::Event> Cluster::events() {
  std::vector<v1::Event> out;
  v1::ListEventsRequest request;
  request.set_page_size(1000);
  for (int page = 0; page < 20; ++page) {
    refresh();
    grpc::ClientContext context;
    set_deadline(context, absl::Seconds(5));
    v1::ListEventsResponse response;
    if (!stub_->ListEvents(&context, request, &response).ok()) break;
    out.insert(out.end(), response.events().begin(), response.events().end());
    if (response.next_page_token().empty()) break;
    request.set_page_token(response.next_page_token());
  }
  return out;
}

v1::GetTablesResponse Cluster::tables() {
  refresh();
  grpc::ClientContext context;
  set_deadline(context, absl::Seconds(5));
  v1::GetTablesResponse response;
  stub_->GetTables(&context, {}, &response).ok();
  return response;
}

std::string Cluster::holder(uint32_t port) {
  refresh();
  grpc::ClientContext context;
  set_deadline(context, absl::Seconds(5));
  v1::ListHostsResponse hosts;
  if (!stub_->ListHosts(&context, {}, &hosts).ok()) return "unknown";
  for (const auto& h : hosts.hosts()) {
    for (const auto& p : h.ports()) {
      if (p.port() == port) return p.holder();
    }
  }
  return "unknown";
}

testing::AssertionResult Cluster::wait_ready(absl::Duration deadline) {
  std::string why;
  auto ready = [&] {
    refresh();
    grpc::ClientContext context;
    set_deadline(context, absl::Seconds(5));
    v1::GetPoolResponse pool;
    if (auto status = stub_->GetPool(&context, {}, &pool); !status.ok()) {
      why = status.error_message();
      return false;
    }
    why = pool.ShortDebugString();
    auto free = pool.functions_by_lifecycle().find("FREE");
    return pool.boxes_connected() == static_cast<uint32_t>(shape.boxes) && pool.hosts_connected() == 1 &&
           free != pool.functions_by_lifecycle().end() &&
           free->second == static_cast<uint32_t>(shape.boxes * shape.slots);
  };
  if (eventually(ready, deadline)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "not ready: " << why << "\n" << logs();
}

absl::StatusOr<v1::Operation> Cluster::attach(const std::string& function, absl::Duration deadline) {
  v1::AttachRequest request;
  request.set_request_id(absl::StrCat("r", ++requests_));
  request.set_host_id("h1");
  request.set_count(1);
  request.set_function_id(function);
  last_attach_ = request;
  return attach_again(deadline);
}

absl::StatusOr<v1::Operation> Cluster::attach_again(absl::Duration deadline) {
  absl::StatusOr<v1::Operation> out = absl::DeadlineExceededError("attach");
  eventually(
      [&] {
        refresh();
        grpc::ClientContext context;
        set_deadline(context, absl::Seconds(5));
        v1::AttachResponse response;
        auto status = stub_->Attach(&context, last_attach_, &response);
        if (status.ok()) {
          out = response.operation();
          return true;
        }
        out = to_status(status);
        // A box that was just restarted is not connected yet: no capacity for a moment.
        return !absl::IsUnavailable(out.status()) && !absl::IsDeadlineExceeded(out.status()) &&
               !absl::IsResourceExhausted(out.status()) && !absl::IsFailedPrecondition(out.status());
      },
      deadline);
  return out;
}

absl::StatusOr<v1::Operation> Cluster::detach(const std::string& attachment, bool force, absl::Duration deadline) {
  v1::DetachRequest request;
  request.set_request_id(absl::StrCat("r", ++requests_));
  request.set_attachment_id(attachment);
  request.set_force(force);
  absl::StatusOr<v1::Operation> out = absl::DeadlineExceededError("detach");
  eventually(
      [&] {
        refresh();
        grpc::ClientContext context;
        set_deadline(context, absl::Seconds(5));
        v1::DetachResponse response;
        auto status = stub_->Detach(&context, request, &response);
        if (status.ok()) {
          out = response.operation();
          return true;
        }
        out = to_status(status);
        return !absl::IsUnavailable(out.status()) && !absl::IsDeadlineExceeded(out.status());
      },
      deadline);
  return out;
}

absl::StatusOr<v1::Operation> Cluster::wait(const v1::Operation& operation, const std::function<void()>& meanwhile,
                                            absl::Duration deadline) {
  absl::StatusOr<v1::Operation> out = absl::DeadlineExceededError(absl::StrCat("operation ", operation.id()));
  v1::GetOperationRequest request;
  request.set_id(operation.id());
  v1::Operation last;
  eventually(
      [&] {
        meanwhile();
        refresh();
        grpc::ClientContext context;
        set_deadline(context, absl::Seconds(2));
        auto status = stub_->GetOperation(&context, request, &last);
        if (status.ok() && last.done()) out = last;
        return status.ok() && last.done();
      },
      deadline);
  if (!out.ok()) out = absl::DeadlineExceededError(absl::StrCat("operation not done: ", last.ShortDebugString()));
  return out;
}

std::map<pid_t, std::string> Cluster::workers() const {
  std::map<pid_t, std::string> out;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "cmdline");
    std::stringstream text;
    text << file.rdbuf();
    std::string command = text.str();
    std::replace(command.begin(), command.end(), '\0', ' ');
    if (command.find("dxpu-worker") != std::string::npos && command.find(dir_ + "/") != std::string::npos &&
        command.find(" --serve ") != std::string::npos) {
      out[std::stoi(name)] = command;
    }
  }
  return out;
}

testing::AssertionResult Cluster::wait_clean(absl::Duration deadline) {
  std::string why;
  auto clean = [&] {
    why.clear();
    auto all = functions();
    if (all.size() != static_cast<size_t>(shape.boxes * shape.slots)) absl::StrAppend(&why, all.size(), " functions; ");
    for (const auto& f : all) {
      if (f.status().lifecycle() != v1::LIFECYCLE_FREE || !f.status().attachment_id().empty() ||
          f.status().conditions_size() != 0) {
        absl::StrAppend(&why, f.id(), ": ", f.status().ShortDebugString(), "; ");
      }
    }
    refresh();
    grpc::ClientContext context;
    set_deadline(context, absl::Seconds(5));
    v1::ListAttachmentsResponse attachments;
    if (!stub_->ListAttachments(&context, {}, &attachments).ok()) absl::StrAppend(&why, "no list of attachments; ");
    for (const auto& a : attachments.attachments()) absl::StrAppend(&why, "held: ", a.ShortDebugString(), "; ");
    refresh();
    grpc::ClientContext host_context;
    set_deadline(host_context, absl::Seconds(5));
    v1::ListHostsResponse hosts;
    if (!stub_->ListHosts(&host_context, {}, &hosts).ok() || hosts.hosts_size() != 1)
      absl::StrAppend(&why, "no host; ");
    for (const auto& h : hosts.hosts()) {
      for (const auto& p : h.ports()) {
        if (!p.attachment_id().empty() || p.phase() != "empty")
          absl::StrAppend(&why, "port: ", p.ShortDebugString(), "; ");
      }
    }
    for (const auto& [pid, command] : workers()) absl::StrAppend(&why, "worker ", pid, "; ");
    return why.empty();
  };
  if (!eventually(clean, deadline)) return testing::AssertionFailure() << "not clean: " << why << "\n" << logs();
  if (const std::string database = check_database(dir_ + "/pool.db"); database != "ok") {
    return testing::AssertionFailure() << "database: " << database;
  }
  return testing::AssertionSuccess();
}

std::string Cluster::logs() const {
  std::string out;
  for (const auto& entry : fs::directory_iterator(dir_)) {
    if (entry.path().extension() != ".log") continue;
    std::ifstream file(entry.path());
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    absl::StrAppend(&out, "---- ", entry.path().filename().string(), "\n");
    for (size_t i = lines.size() > 40 ? lines.size() - 40 : 0; i < lines.size(); ++i)
      absl::StrAppend(&out, lines[i], "\n");
  }
  return out;
}

}  // namespace dxpu::test
