#include "proxy/box/boxd.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proxy/agent/agent_stream.h"
#include "proxy/agent/daemon.h"
#include "proxy/agent/version.h"
#include "proxy/base/status.h"
#include "proxy/base/sync_point.h"
#include "proxy/base/unique_fd.h"
#include "proxy/box/control.h"
#include "proxy/box/event_loop.h"
#include "proxy/box/gate.h"
#include "proxy/box/physical_gpus.h"
#include "proxy/box/process.h"
#include "proxy/gpu/command_set.h"

namespace dxpu::box {
namespace {

// A live worker answers at once; one that is stopped must not hold up the others for long.
constexpr absl::Duration kAdoptDeadline = absl::Seconds(2);
// How often a lease that only was renewed is told.
constexpr absl::Duration kRenewalReport = absl::Seconds(2);

v1::SlotPhase phase_of(SlotState state) {
  switch (state) {
    case SlotState::kScrubbing:
      return v1::SLOT_PHASE_SCRUBBING;
    case SlotState::kValidating:
      return v1::SLOT_PHASE_VALIDATING;
    case SlotState::kIdle:
      return v1::SLOT_PHASE_IDLE;
    case SlotState::kStarting:
      return v1::SLOT_PHASE_IDLE;  // nothing serves yet
    case SlotState::kServing:
      return v1::SLOT_PHASE_SERVING;
    case SlotState::kStopping:
      return v1::SLOT_PHASE_SERVING;  // the worker still holds the function
    case SlotState::kFailed:
      return v1::SLOT_PHASE_FAILED;
  }
  return v1::SLOT_PHASE_UNSPECIFIED;
}

// What runs in a slot: a job, a worker of ours, or one that was adopted.
struct Runner {
  Child child;             // pid 0: adopted, not yet known
  base::UniqueFd control;  // workers
  base::UniqueFd message;  // jobs: the pipe with the reason
  bool job = false;
  bool ended = false;  // said goodbye
  EndedMessage end;
};

class BoxdImpl : public Boxd, public SlotWorld {
 public:
  explicit BoxdImpl(BoxdOptions options) : options_(std::move(options)), boot_id_(agent::make_boot_id()) {}
  ~BoxdImpl() override { shut(); }

  absl::Status open();
  void run(int stop_fd) override;
  std::string endpoint() const override { return gate_->endpoint(); }

  // SlotWorld
  void start_scrub(uint32_t slot) override { start_job(slot, "--scrub"); }
  void start_validate(uint32_t slot) override { start_job(slot, "--validate"); }
  void start_worker(uint32_t slot, const SlotTicket& ticket) override;
  void stop_worker(uint32_t slot) override;
  void kill_child(uint32_t slot) override;
  absl::Status save(const SlotRecord& record) override { return box::save(path(record.slot, "json"), record); }
  void changed(uint32_t) override { publish(); }
  void event(const std::string& type, uint32_t slot, const std::string& message,
             const std::string& attachment_id) override;

 private:
  std::string path(uint32_t slot, const char* suffix) const {
    return absl::StrCat(options_.runtime_dir, "/slot-", slot, ".", suffix);
  }
  absl::Status take_runtime_dir();
  absl::Status check_room() const;
  absl::Status open_slot(uint32_t slot);
  absl::StatusOr<bool> try_adopt(uint32_t slot);

  std::vector<std::string> worker_command(uint32_t slot, const std::string& mode) const;
  void start_job(uint32_t slot, const std::string& mode);
  void watch_child(uint32_t slot);
  void child_exited(uint32_t slot);
  void control_readable(uint32_t slot);
  void adopt_pid(uint32_t slot, int32_t pid);
  void forget_runner(uint32_t slot);
  // By value: the runner that holds the detail is forgotten in here.
  void end_worker(uint32_t slot, WorkerEnd end, std::string detail);

  void greet(std::unique_ptr<fabric::Transport> transport, const fabric::Hello& hello);
  void apply(const v1::BoxIntents& intents);
  v1::AgentMessage hello_message() const;
  v1::SlotFact fact(const Slot& slot) const;
  void publish();
  absl::Duration tick();
  void shut();

  const BoxdOptions options_;
  const std::string boot_id_;
  base::UniqueFd lock_;
  std::unique_ptr<EventLoop> loop_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<std::unique_ptr<Runner>> runners_;  // one place per slot, empty when nothing runs
  std::vector<PhysicalGpu> physical_gpus_;
  std::unique_ptr<Gate> gate_;
  std::unique_ptr<agent::AgentStream> stream_;
  bool opened_ = false;  // every slot was begun or adopted
  absl::Duration renewals_told_ = absl::ZeroDuration();
  absl::Time newest_renewal_told_ = absl::InfinitePast();
};

// ---- start ---------------------------------------------------------------------------------------------------------

absl::Status BoxdImpl::take_runtime_dir() {
  const std::string& dir = options_.runtime_dir;
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) {
    return base::errno_status(absl::StrCat("--runtime-dir=", dir, ": cannot make the directory"));
  }
  const std::string name = dir + "/boxd.lock";
  lock_.reset(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock_.valid()) {
    return base::errno_status(absl::StrCat("--runtime-dir=", dir, ": cannot write there (", name, ")"));
  }
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    std::string owner(32, '\0');
    const ssize_t n = ::pread(lock_.get(), owner.data(), owner.size(), 0);
    owner.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return absl::FailedPreconditionError(absl::StrCat("--runtime-dir=", dir, " is in use by another dxpu-boxd (pid ",
                                                      owner, "): stop that one, or choose another directory"));
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(lock_.get(), 0) != 0 || ::pwrite(lock_.get(), pid.data(), pid.size(), 0) < 0 ||
      ::fdatasync(lock_.get()) != 0) {
    return base::errno_status(absl::StrCat("--runtime-dir=", dir, ": cannot write there (", name, ")"));
  }
  return absl::OkStatus();
}

absl::Status BoxdImpl::check_room() const {
  // The files are sparse; a full file system under a mapping kills whoever touches it. Better refused now.
  uint64_t held = 0;
  for (uint32_t slot = 0; slot < options_.slots; ++slot) {
    struct stat info {};
    if (::stat(path(slot, "vram").c_str(), &info) == 0) held += static_cast<uint64_t>(info.st_blocks) * 512;
  }
  struct statvfs room {};
  if (::statvfs(options_.runtime_dir.c_str(), &room) != 0) return base::errno_status(options_.runtime_dir);
  const uint64_t free_bytes = uint64_t{room.f_bavail} * room.f_frsize;
  const uint64_t needed = options_.slots * options_.memory_bytes;
  if (needed > held && needed - held > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "--runtime-dir=%s has %d MiB free; %d slots of %d MiB need %d MiB more: free some, choose another directory, "
        "or "
        "lower --slots or --memory",
        options_.runtime_dir, free_bytes >> 20, options_.slots, options_.memory_bytes >> 20, (needed - held) >> 20));
  }
  return absl::OkStatus();
}

absl::Status BoxdImpl::open() {
  DXPU_RETURN_IF_ERROR(take_runtime_dir());
  DXPU_RETURN_IF_ERROR(check_room());
  DXPU_ASSIGN_OR_RETURN(loop_, EventLoop::create());
  physical_gpus_ = list_physical_gpus();
  runners_.resize(options_.slots);
  for (uint32_t slot = 0; slot < options_.slots; ++slot) {
    SlotRecord record;
    record.slot = slot;
    if (auto loaded = load(path(slot, "json"), slot); loaded.ok()) {
      record = *std::move(loaded);
    } else if (!absl::IsNotFound(loaded.status())) {
      return absl::DataLossError(
          absl::StrCat(loaded.status().message(),
                       ": a record tells which tickets are used up; detach what this box serves, then "
                       "remove that file and start again"));
    }
    slots_.push_back(
        std::make_unique<Slot>(options_.id, std::move(record), options_.slot_deadlines, *this, base::Clock::real()));
  }
  // The door before the stream: a host may come as soon as the pool manager knows of us.
  DXPU_ASSIGN_OR_RETURN(
      gate_, Gate::open(options_.listen, options_.hello_deadline,
                        [this](std::unique_ptr<fabric::Transport> transport, fabric::Hello hello) {
                          auto held = std::make_shared<std::unique_ptr<fabric::Transport>>(std::move(transport));
                          loop_->post([this, held, hello = std::move(hello)] { greet(std::move(*held), hello); });
                        }));
  agent::StreamOptions stream;
  stream.pool_address = options_.pool_address;
  agent::StreamCallbacks callbacks;
  callbacks.hello = [this] { return hello_message(); };
  callbacks.intents = [this](const v1::ManagerMessage& message) {
    if (!message.has_box_intents()) return;
    auto intents = std::make_shared<v1::BoxIntents>(message.box_intents());
    loop_->call([this, intents] { apply(*intents); }, absl::Seconds(10));
  };
  stream_ = agent::AgentStream::start(std::move(stream), std::move(callbacks));
  for (uint32_t slot = 0; slot < options_.slots; ++slot) DXPU_RETURN_IF_ERROR(open_slot(slot));
  opened_ = true;
  publish();
  loop_->set_timer([this] { return tick(); });
  spdlog::info("box={} slots={} fabric={} pool={} runtime_dir={} physical_gpus={}", options_.id, options_.slots,
               gate_->endpoint(), options_.pool_address, options_.runtime_dir, physical_gpus_.size());
  return absl::OkStatus();
}

absl::Status BoxdImpl::open_slot(uint32_t slot) {
  DXPU_ASSIGN_OR_RETURN(const bool adopted, try_adopt(slot));
  if (!adopted) slots_[slot]->begin();
  return absl::OkStatus();
}

absl::StatusOr<bool> BoxdImpl::try_adopt(uint32_t slot) {
  auto control = control_connect(path(slot, "sock"));
  if (!control.ok()) return false;  // nobody has the listening socket: no worker lives
  Slot& s = *slots_[slot];
  WorkerStatus worker;
  worker.box_id = options_.id;
  worker.slot = slot;
  worker.attachment_id = s.record().wanted ? s.record().wanted->attachment_id : s.record().served_attachment;
  worker.generation = s.record().served_generation;
  pollfd waiting{control->get(), POLLIN, 0};
  if (::poll(&waiting, 1, static_cast<int>(absl::ToInt64Milliseconds(kAdoptDeadline))) > 0) {
    base::UniqueFd passed;
    auto message = control_receive(control->get(), &passed);
    if (!message.ok() && absl::IsUnavailable(message.status())) return false;  // it died in this moment
    if (message.ok() && message->has_value() && std::holds_alternative<StatusMessage>(**message)) {
      worker = std::get<StatusMessage>(**message).status;
    }
  }
  if (worker.box_id != options_.id || worker.slot != slot) {
    return absl::FailedPreconditionError(
        absl::StrCat("--runtime-dir=", options_.runtime_dir, ": a worker of box ", worker.box_id, " slot ", worker.slot,
                     " lives there; this is box ", options_.id, " slot ", slot, ": choose another directory or --id"));
  }
  runners_[slot] = std::make_unique<Runner>();
  runners_[slot]->control = *std::move(control);
  DXPU_RETURN_IF_ERROR(loop_->watch(runners_[slot]->control.get(), [this, slot] { control_readable(slot); }));
  if (worker.pid != 0) adopt_pid(slot, worker.pid);
  s.adopt(worker);
  return true;
}

// ---- processes -----------------------------------------------------------------------------------------------------

std::vector<std::string> BoxdImpl::worker_command(uint32_t slot, const std::string& mode) const {
  return {options_.worker_program,
          mode,
          absl::StrCat("--box=", options_.id),
          absl::StrCat("--slot=", slot),
          absl::StrCat("--model=", options_.model),
          absl::StrCat("--memory=", options_.memory_bytes),
          absl::StrCat("--engine=", options_.engine),
          absl::StrFormat("--serial=%016x", serial_number(options_.id, slot)),
          absl::StrCat("--memory-file=", path(slot, "vram"))};
}

void BoxdImpl::watch_child(uint32_t slot) {
  absl::Status watched = loop_->watch(runners_[slot]->child.pidfd.get(), [this, slot] { child_exited(slot); });
  if (!watched.ok()) spdlog::error("slot={} watch=failed reason=\"{}\"", slot, watched.ToString());
}

void BoxdImpl::start_job(uint32_t slot, const std::string& mode) {
  forget_runner(slot);
  auto fail = [this, slot](const absl::Status& status) {
    loop_->post([this, slot, status] { slots_[slot]->job_ended(status); });
  };
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC | O_NONBLOCK) != 0) return fail(base::errno_status("pipe"));
  base::UniqueFd read_end(pipe[0]), write_end(pipe[1]);
  std::vector<std::string> command = worker_command(slot, mode);
  command.push_back(absl::StrCat("--parent=", ::getpid()));
  auto child = spawn(command, {{write_end.get(), kInheritedFd}});
  if (!child.ok()) return fail(child.status());
  auto runner = std::make_unique<Runner>();
  runner->job = true;
  runner->child = *std::move(child);
  runner->message = std::move(read_end);
  runners_[slot] = std::move(runner);
  watch_child(slot);
}

void BoxdImpl::start_worker(uint32_t slot, const SlotTicket& ticket) {
  forget_runner(slot);
  auto start = [&]() -> absl::Status {
    const std::string socket = path(slot, "sock");
    DXPU_ASSIGN_OR_RETURN(base::UniqueFd listener, control_listen(socket));
    std::vector<std::string> command = worker_command(slot, "--serve");
    command.push_back(absl::StrCat("--attachment=", ticket.attachment_id));
    command.push_back(absl::StrCat("--generation=", ticket.generation));
    for (std::string& flag : agent::DeadlineFlags::to_flags(options_.deadlines)) command.push_back(std::move(flag));
    // Connected before the worker lives: it waits in the backlog, and a worker that dies at once is an end of stream.
    DXPU_ASSIGN_OR_RETURN(base::UniqueFd control, control_connect(socket));
    DXPU_ASSIGN_OR_RETURN(Child child, spawn(command, {{listener.get(), kInheritedFd}}));
    runners_[slot] = std::make_unique<Runner>();
    runners_[slot]->child = std::move(child);
    runners_[slot]->control = std::move(control);
    watch_child(slot);
    return loop_->watch(runners_[slot]->control.get(), [this, slot] { control_readable(slot); });
  };
  if (absl::Status started = start(); !started.ok()) {
    if (runners_[slot] != nullptr) {
      kill_child(slot);
      return;
    }
    loop_->post([this, slot, started] {
      slots_[slot]->worker_ended(WorkerEnd::kDied, absl::StrCat("could not be started: ", started.ToString()));
    });
  }
}

void BoxdImpl::adopt_pid(uint32_t slot, int32_t pid) {
  Runner& runner = *runners_[slot];
  auto pidfd = open_pidfd(pid);
  if (!pidfd.ok()) return;
  // The number is the worker's only if the worker lived when the descriptor was made, and it did if its socket is open
  // still.
  pollfd alive{runner.control.get(), POLLIN, 0};
  if (::poll(&alive, 1, 0) > 0 && (alive.revents & (POLLHUP | POLLERR)) != 0) return;
  runner.child.pid = pid;
  runner.child.pidfd = *std::move(pidfd);
  watch_child(slot);
}

void BoxdImpl::forget_runner(uint32_t slot) {
  Runner* runner = runners_[slot].get();
  if (runner == nullptr) return;
  if (runner->child.pidfd.valid()) loop_->unwatch(runner->child.pidfd.get());
  if (runner->control.valid()) loop_->unwatch(runner->control.get());
  runners_[slot].reset();
}

void BoxdImpl::control_readable(uint32_t slot) {
  while (runners_[slot] != nullptr && runners_[slot]->control.valid()) {
    base::UniqueFd passed;
    auto message = control_receive(runners_[slot]->control.get(), &passed);
    if (!message.ok()) {
      if (!absl::IsUnavailable(message.status())) {
        spdlog::warn("slot={} control=ignored reason=\"{}\"", slot, message.status().ToString());
        continue;
      }
      Runner& runner = *runners_[slot];
      loop_->unwatch(runner.control.get());
      runner.control.reset();
      // Without a pidfd the end of the stream is all there is to see of its end.
      if (!runner.child.pidfd.valid()) end_worker(slot, WorkerEnd::kDied, "its control socket closed");
      return;
    }
    if (!message->has_value()) return;
    if (const auto* status = std::get_if<StatusMessage>(&**message)) {
      if (!runners_[slot]->child.pidfd.valid() && status->status.pid != 0) adopt_pid(slot, status->status.pid);
      slots_[slot]->worker_status(status->status);
    } else if (const auto* ended = std::get_if<EndedMessage>(&**message)) {
      runners_[slot]->ended = true;
      runners_[slot]->end = *ended;
    }
  }
}

void BoxdImpl::child_exited(uint32_t slot) {
  Runner* runner = runners_[slot].get();
  if (runner == nullptr) return;
  if (runner->job) {
    const Exit exit = collect(runner->child.pidfd.get());
    std::string reason(4096, '\0');
    const ssize_t n = ::read(runner->message.get(), reason.data(), reason.size());
    reason.resize(n > 0 ? static_cast<size_t>(n) : 0);
    forget_runner(slot);
    if (exit.known && exit.signal == 0 && exit.code == kExitStopped) {
      slots_[slot]->job_ended(absl::OkStatus());
    } else {
      slots_[slot]->job_ended(absl::InternalError(reason.empty() ? describe(exit) : reason));
    }
    return;
  }
  control_readable(slot);  // its last words
  if (runners_[slot] == nullptr) return;
  runner = runners_[slot].get();
  const Exit exit = collect(runner->child.pidfd.get());
  if (runner->ended) return end_worker(slot, runner->end.end, runner->end.detail);
  if (exit.known && exit.signal == 0 && exit.code == kExitStopped)
    return end_worker(slot, WorkerEnd::kStopped, "stopped");
  if (exit.known && exit.signal == 0 && exit.code == kExitLeaseExpired) {
    return end_worker(slot, WorkerEnd::kLeaseExpired, "lease");
  }
  end_worker(slot, WorkerEnd::kDied, describe(exit));
}

void BoxdImpl::end_worker(uint32_t slot, WorkerEnd end, std::string detail) {
  forget_runner(slot);
  ::unlink(path(slot, "sock").c_str());
  slots_[slot]->worker_ended(end, detail);
}

void BoxdImpl::stop_worker(uint32_t slot) {
  Runner* runner = runners_[slot].get();
  if (runner == nullptr || !runner->control.valid()) return;  // its end is on the way
  if (absl::Status sent = control_send(runner->control.get(), StopMessage{}); !sent.ok()) kill_child(slot);
}

void BoxdImpl::kill_child(uint32_t slot) {
  Runner* runner = runners_[slot].get();
  if (runner != nullptr && runner->child.pidfd.valid()) kill_pidfd(runner->child.pidfd.get(), SIGKILL);
}

// ---- hosts ---------------------------------------------------------------------------------------------------------

void BoxdImpl::greet(std::unique_ptr<fabric::Transport> transport, const fabric::Hello& hello) {
  uint64_t epoch = 0;
  std::string detail;
  fabric::TerminateReason reason = fabric::TerminateReason::kTicketUnknown;
  if (hello.ticket.slot < slots_.size()) {
    reason = slots_[hello.ticket.slot]->admit(hello.ticket, &epoch, &detail);
  } else {
    detail = absl::StrCat("box ", options_.id, " has slots 0 to ", options_.slots - 1);
  }
  const std::string peer = transport->description();
  if (reason == fabric::TerminateReason::kNone) {
    const uint32_t slot = hello.ticket.slot;
    Runner* runner = runners_[slot].get();
    absl::Status passed = absl::UnavailableError("the worker's control socket is closed");
    base::UniqueFd socket;
    if (runner != nullptr && runner->control.valid()) {
      socket.reset(transport->release_fd());
      passed = control_send(runner->control.get(), SessionMessage{epoch, fabric::serialize(hello)}, socket.get());
    }
    if (passed.ok()) {
      spdlog::info("slot={} host={} attachment={} generation={} epoch={} admitted=\"{}\"", slot, hello.ticket.host_id,
                   hello.ticket.attachment_id, hello.ticket.generation, epoch, peer);
      return;
    }
    reason = fabric::TerminateReason::kFunctionFailed;
    detail = passed.ToString();
    if (socket.valid()) transport = fabric::tcp_adopt(socket.release());
  }
  spdlog::warn("peer=\"{}\" host={} slot={} attachment={} generation={} refused=\"{}\" detail=\"{}\"", peer,
               hello.ticket.host_id, hello.ticket.slot, hello.ticket.attachment_id, hello.ticket.generation,
               fabric::name_of(reason), detail);
  // It fits the socket's empty buffer: a peer that does not read holds up nobody.
  fabric::send_terminate(*transport, reason, 0, detail).IgnoreError();
}

// ---- pool manager --------------------------------------------------------------------------------------------------

void BoxdImpl::apply(const v1::BoxIntents& intents) {
  for (const v1::SlotIntent& intent : intents.slots()) {
    if (intent.slot() >= slots_.size()) {
      spdlog::warn("intent=ignored slot={} reason=\"this box has {} slots\"", intent.slot(), slots_.size());
      continue;
    }
    Slot& slot = *slots_[intent.slot()];
    if (!intent.serve()) {
      slot.want_nothing();
      continue;
    }
    const v1::Ticket& t = intent.ticket();
    if (t.token().size() != fabric::kTokenBytes || t.box_id() != options_.id || t.slot() != intent.slot() ||
        t.attachment_id().empty() || t.attachment_id().size() > fabric::kMaxIdBytes || t.host_id().empty() ||
        t.host_id().size() > fabric::kMaxIdBytes) {
      spdlog::error("intent=ignored slot={} reason=\"its ticket is not one for this slot\"", intent.slot());
      event("intent.refused", intent.slot(), "the ticket in the intent is not one for this slot", t.attachment_id());
      continue;
    }
    SlotTicket ticket;
    ticket.host_id = t.host_id();
    ticket.attachment_id = t.attachment_id();
    ticket.generation = t.generation();
    std::copy_n(reinterpret_cast<const std::byte*>(t.token().data()), t.token().size(), ticket.token.begin());
    if (t.has_expires()) ticket.expires = agent::to_time(t.expires());
    slot.want(ticket);
  }
  publish();  // facts as they are after the intents
}

v1::AgentMessage BoxdImpl::hello_message() const {
  v1::AgentMessage out;
  v1::BoxHello& hello = *out.mutable_box_hello();
  hello.set_box_id(options_.id);
  hello.set_boot_id(boot_id_);
  hello.set_software_version(agent::kSoftwareVersion);
  for (const std::string& p : options_.advertise) hello.add_paths(p);
  if (options_.advertise.empty()) hello.add_paths(gate_->endpoint());
  for (const PhysicalGpu& gpu : physical_gpus_) {
    v1::PhysicalGpu& row = *hello.add_physical_gpus();
    row.set_pci_address(gpu.pci_address);
    row.set_vendor_id(gpu.vendor_id);
    row.set_device_id(gpu.device_id);
    row.set_name(gpu.name);
  }
  for (uint32_t slot = 0; slot < options_.slots; ++slot) {
    v1::SlotDescription& row = *hello.add_slots();
    row.set_slot(slot);
    row.set_model(options_.model);
    row.set_memory_bytes(options_.memory_bytes);
    row.set_engine(options_.engine);
    row.set_vendor_id(DXGPU_VENDOR_ID);
    row.set_device_id(DXGPU_DEVICE_ID);
    row.set_serial(absl::StrFormat("%016x", serial_number(options_.id, slot)));
  }
  return out;
}

v1::SlotFact BoxdImpl::fact(const Slot& slot) const {
  v1::SlotFact out;
  const SlotRecord& record = slot.record();
  out.set_slot(record.slot);
  out.set_phase(phase_of(slot.state()));
  out.set_attachment_id(record.served_attachment);
  out.set_generation(record.served_generation);
  out.set_session_up(slot.session_up());
  out.set_epoch(record.epoch);
  if (slot.lease_renewed() > absl::InfinitePast()) agent::stamp(out.mutable_lease_renewed(), slot.lease_renewed());
  if (const Runner* runner = runners_[record.slot].get(); runner != nullptr && !runner->job) {
    out.set_worker_pid(static_cast<uint32_t>(runner->child.pid));
  }
  out.set_detail(slot.detail());
  out.set_lease_expired(record.lease_expired);
  return out;
}

void BoxdImpl::publish() {
  if (!opened_) return;  // half a truth would be believed
  v1::AgentMessage message;
  for (const auto& slot : slots_) {
    *message.mutable_box_facts()->add_slots() = fact(*slot);
    newest_renewal_told_ = std::max(newest_renewal_told_, slot->lease_renewed());
  }
  renewals_told_ = base::Clock::real().monotonic();
  stream_->publish(std::move(message));
}

void BoxdImpl::event(const std::string& type, uint32_t slot, const std::string& message,
                     const std::string& attachment_id) {
  spdlog::info("event={} slot={} attachment={} message=\"{}\"", type, slot, attachment_id, message);
  if (stream_ != nullptr) stream_->event(type, absl::StrCat(options_.id, "/", slot), message, attachment_id);
}

absl::Duration BoxdImpl::tick() {
  absl::Duration next = absl::InfiniteDuration();
  for (auto& slot : slots_) next = std::min(next, slot->tick());
  const absl::Duration since = base::Clock::real().monotonic() - renewals_told_;
  absl::Time newest = absl::InfinitePast();
  for (auto& slot : slots_) newest = std::max(newest, slot->lease_renewed());
  if (newest > newest_renewal_told_) {
    if (since >= kRenewalReport) {
      publish();
    } else {
      next = std::min(next, kRenewalReport - since);
    }
  }
  return next;
}

void BoxdImpl::run(int stop_fd) {
  if (absl::Status watched = loop_->watch(stop_fd, [this] { loop_->stop(); }); !watched.ok()) {
    spdlog::error("stop=unwatched reason=\"{}\"", watched.ToString());
    return;
  }
  loop_->run();
  spdlog::info("box={} stop=orderly (workers stay)", options_.id);
  shut();
}

void BoxdImpl::shut() {
  if (loop_ != nullptr) loop_->stop();
  if (gate_ != nullptr) gate_->close();
  if (stream_ != nullptr) stream_->stop(absl::Milliseconds(500));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Boxd>> Boxd::create(BoxdOptions options) {
  auto boxd = std::make_unique<BoxdImpl>(std::move(options));
  DXPU_RETURN_IF_ERROR(boxd->open());
  return boxd;
}

uint64_t serial_number(const std::string& box_id, uint32_t slot) {
  // FNV-1a, 64 bits: the same on every machine and in every release.
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : absl::StrCat(box_id, "/", slot)) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash == 0 ? 1 : hash;
}

}  // namespace dxpu::box
