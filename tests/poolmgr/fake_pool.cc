#include "fake_pool.h"

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"

namespace dxpu::poolmgr {

std::string SeededRandom::bytes(size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    out.push_back(static_cast<char>(state >> 56));
  }
  return out;
}

// ---- box ----

FakeBox::FakeBox(FakePool& pool, std::string name, uint32_t count) : id(std::move(name)), pool_(pool) {
  for (uint32_t i = 0; i < count; ++i) {
    slots[i].fact.set_slot(i);
    slots[i].fact.set_phase(v1::SLOT_PHASE_IDLE);
  }
}

absl::Status FakeBox::connect() {
  auto fresh = std::make_shared<FakeLink>();
  v1::AgentMessage message;
  v1::BoxHello& hello = *message.mutable_box_hello();
  hello.set_box_id(id);
  hello.set_boot_id(boot);
  hello.add_paths("127.0.0.1:7000");
  for (const auto& [number, slot] : slots) {
    v1::SlotDescription& d = *hello.add_slots();
    d.set_slot(number);
    d.set_model(model);
    d.set_memory_bytes(memory);
    d.set_engine("copy");
  }
  if (absl::Status status = pool_.reconciler->message(fresh, message); !status.ok()) return status;
  link = fresh;
  applied = 0;
  publish();
  return absl::OkStatus();
}

void FakeBox::disconnect() {
  auto old = std::exchange(link, nullptr);
  if (old != nullptr) pool_.reconciler->disconnected(old.get());
}

void FakeBox::publish() {
  if (link == nullptr) return;
  v1::AgentMessage message;
  for (const auto& [number, slot] : slots) *message.mutable_box_facts()->add_slots() = slot.fact;
  message.mutable_box_facts()->set_intents_applied(applied);
  EXPECT_TRUE(pool_.reconciler->message(link, message).ok());
}

void FakeBox::die(uint32_t number, const std::string& detail) {
  slots[number].fact.set_phase(v1::SLOT_PHASE_SCRUBBING);
  slots[number].fact.set_detail(detail);
  publish();
}

bool FakeBox::act() {
  if (link == nullptr) return false;
  bool changed = false;
  if (!deaf && !link->sent.empty()) {
    for (const v1::ManagerMessage& message : std::exchange(link->sent, {})) {
      if (!message.has_box_intents()) continue;
      for (const v1::SlotIntent& intent : message.box_intents().slots()) {
        slots.at(intent.slot()).intent = intent;
        if (intent.serve()) slots.at(intent.slot()).tokens.insert(intent.ticket().token());
      }
      applied = message.sequence();
      changed = true;
    }
  }
  for (auto& [number, slot] : slots) {
    v1::SlotFact& fact = slot.fact;
    const bool serving = fact.phase() == v1::SLOT_PHASE_SERVING;
    if (slot.intent.serve() && serves) {
      const v1::Ticket& ticket = slot.intent.ticket();
      // A worker that died for an attachment is not started again for it under the same ticket.
      const bool again = fact.attachment_id() == ticket.attachment_id() && fact.generation() >= ticket.generation();
      if ((fact.phase() == v1::SLOT_PHASE_IDLE && !again) ||
          (serving && fact.attachment_id() == ticket.attachment_id() && fact.generation() < ticket.generation())) {
        fact.set_phase(v1::SLOT_PHASE_SERVING);
        fact.set_attachment_id(ticket.attachment_id());
        fact.set_generation(ticket.generation());
        fact.clear_detail();
        changed = true;
        continue;
      }
    }
    if (serving && applied > 0 && !slot.intent.serve() && slot.intent.slot() == number) {
      fact.set_phase(quick ? v1::SLOT_PHASE_IDLE : v1::SLOT_PHASE_SCRUBBING);
      changed = true;
    } else if (fact.phase() == v1::SLOT_PHASE_SCRUBBING && scrub_fails) {
      fact.set_phase(v1::SLOT_PHASE_FAILED);
      fact.set_detail("byte 17 is not zero");
      changed = true;
    } else if (fact.phase() == v1::SLOT_PHASE_FAILED && !scrub_fails) {
      fact.set_phase(v1::SLOT_PHASE_SCRUBBING);
      changed = true;
    } else if (fact.phase() == v1::SLOT_PHASE_SCRUBBING && scrubs) {
      fact.set_phase(quick ? v1::SLOT_PHASE_IDLE : v1::SLOT_PHASE_VALIDATING);
      changed = true;
    } else if (fact.phase() == v1::SLOT_PHASE_VALIDATING) {
      fact.set_phase(v1::SLOT_PHASE_IDLE);
      changed = true;
    }
  }
  if (changed) publish();
  return changed;
}

// ---- host ----

FakeHost::FakeHost(FakePool& pool, std::string name, uint32_t count) : id(std::move(name)), pool_(pool) {
  for (uint32_t i = 1; i <= count; ++i) {  // ports need not start at 0
    ports[i].fact.set_port(i);
    ports[i].fact.set_phase(v1::PORT_PHASE_EMPTY);
  }
}

absl::Status FakeHost::connect() {
  auto fresh = std::make_shared<FakeLink>();
  v1::AgentMessage message;
  v1::HostHello& hello = *message.mutable_host_hello();
  hello.set_host_id(id);
  hello.set_boot_id(boot);
  hello.set_port_count(static_cast<uint32_t>(ports.size()));
  hello.set_attach_point("direct");
  if (absl::Status status = pool_.reconciler->message(fresh, message); !status.ok()) return status;
  link = fresh;
  applied = 0;
  publish();
  return absl::OkStatus();
}

void FakeHost::disconnect() {
  auto old = std::exchange(link, nullptr);
  if (old != nullptr) pool_.reconciler->disconnected(old.get());
}

void FakeHost::publish() {
  if (link == nullptr) return;
  v1::AgentMessage message;
  for (auto& [number, port] : ports) {
    auto holder = holders.find(number);
    const bool open = holder != holders.end() && port.fact.phase() != v1::PORT_PHASE_EMPTY;
    port.fact.set_holder(open ? holder->second : "");
    *message.mutable_host_facts()->add_ports() = port.fact;
  }
  message.mutable_host_facts()->set_intents_applied(applied);
  EXPECT_TRUE(pool_.reconciler->message(link, message).ok());
}

bool FakeHost::act() {
  if (link == nullptr) return false;
  bool changed = false;
  if (!deaf && !link->sent.empty()) {
    for (const v1::ManagerMessage& message : std::exchange(link->sent, {})) {
      if (!message.has_host_intents()) continue;
      for (const v1::PortIntent& intent : message.host_intents().ports()) ports.at(intent.port()).intent = intent;
      applied = message.sequence();
      changed = true;
    }
  }
  for (auto& [number, port] : ports) {
    v1::PortFact& fact = port.fact;
    const v1::Ticket& ticket = port.intent.ticket();
    const bool holds = fact.phase() == v1::PORT_PHASE_CONNECTING || fact.phase() == v1::PORT_PHASE_PLUGGING ||
                       fact.phase() == v1::PORT_PHASE_ATTACHED;
    if (port.intent.attach()) {
      const bool fresh = fact.attachment_id() != ticket.attachment_id() || fact.generation() < ticket.generation();
      if (fresh &&
          (fact.phase() == v1::PORT_PHASE_EMPTY || fact.phase() == v1::PORT_PHASE_FAILED || fact.wants_ticket())) {
        fact.set_attachment_id(ticket.attachment_id());
        fact.set_generation(ticket.generation());
        fact.set_wants_ticket(false);
        fact.set_phase(fails.empty() ? v1::PORT_PHASE_CONNECTING : v1::PORT_PHASE_FAILED);
        fact.set_detail(fails);
        changed = true;
      } else if (fact.phase() == v1::PORT_PHASE_CONNECTING && stop_at > v1::PORT_PHASE_CONNECTING) {
        fact.set_phase(v1::PORT_PHASE_PLUGGING);
        changed = true;
      } else if (fact.phase() == v1::PORT_PHASE_PLUGGING && stop_at > v1::PORT_PHASE_PLUGGING) {
        fact.set_phase(v1::PORT_PHASE_ATTACHED);
        fact.set_bus_address(absl::StrCat("0001:0", number, ":00.0"));
        changed = true;
      }
    } else if (applied > 0 && port.intent.port() == number) {
      if (holds) {
        fact.set_phase(v1::PORT_PHASE_GONE);
        changed = true;
      } else if (fact.phase() == v1::PORT_PHASE_GONE && holders.count(number) == 0) {
        fact.set_phase(v1::PORT_PHASE_EMPTY);
        fact.clear_bus_address();
        changed = true;
      }
    }
  }
  if (changed) publish();
  return changed;
}

// ---- pool ----

FakePool::FakePool() {
  char pattern[] = "/tmp/dxpu-pool-XXXXXX";
  dir = ::mkdtemp(pattern);
  start();
}

FakePool::~FakePool() {
  reconciler.reset();
  store.reset();
  std::filesystem::remove_all(dir);
}

void FakePool::start() {
  absl::StatusOr<std::unique_ptr<Store>> opened = open_sqlite_store({dir + "/pool.db", max_pages});
  ASSERT_TRUE(opened.ok()) << opened.status();
  store = *std::move(opened);
  absl::StatusOr<std::unique_ptr<Reconciler>> made = Reconciler::create(*store, clock, random, options);
  ASSERT_TRUE(made.ok()) << made.status();
  reconciler = *std::move(made);
}

void FakePool::restart() {
  for (auto& [id, b] : boxes) b->link = nullptr;
  for (auto& [id, h] : hosts) h->link = nullptr;
  reconciler.reset();
  store.reset();
  start();
  for (auto& [id, b] : boxes) ASSERT_TRUE(b->connect().ok());
  for (auto& [id, h] : hosts) ASSERT_TRUE(h->connect().ok());
}

void FakePool::add_boxes(int count, uint32_t slots) {
  for (int i = 1; i <= count; ++i) {
    const std::string id = absl::StrCat("b", i);
    boxes[id] = std::make_unique<FakeBox>(*this, id, slots);
    ASSERT_TRUE(boxes[id]->connect().ok());
  }
}

FakeHost& FakePool::add_host(const std::string& id, uint32_t ports) {
  hosts[id] = std::make_unique<FakeHost>(*this, id, ports);
  EXPECT_TRUE(hosts[id]->connect().ok());
  return *hosts[id];
}

bool FakePool::step() {
  bool any = false;
  for (auto& [id, b] : boxes) any = b->act() || any;
  for (auto& [id, h] : hosts) any = h->act() || any;
  check_legal();
  return any;
}

void FakePool::settle() {
  for (int i = 0; i < 200; ++i) {
    if (!step()) {
      reconciler->tick();
      if (!step()) return;
    }
  }
  FAIL() << "the pool does not come to rest";
}

void FakePool::pass(absl::Duration time) {
  const absl::Duration slice = absl::Seconds(1);
  for (absl::Duration done; done < time; done += slice) {
    clock.advance(slice);
    for (auto& [id, b] : boxes) b->publish();
    for (auto& [id, h] : hosts) h->publish();
    reconciler->tick();
    settle();
  }
}

v1::AttachResponse FakePool::attach(uint32_t count, bool same_box) {
  v1::AttachRequest request;
  request.set_host_id("h1");
  request.set_count(count);
  request.set_same_box(same_box);
  absl::StatusOr<v1::AttachResponse> response = reconciler->attach(request);
  EXPECT_TRUE(response.ok()) << response.status();
  return response.ok() ? *response : v1::AttachResponse();
}

absl::StatusOr<v1::DetachResponse> FakePool::try_detach(const std::string& id, bool force) {
  v1::DetachRequest request;
  request.set_attachment_id(id);
  request.set_force(force);
  return reconciler->detach(request);
}

v1::Attachment FakePool::attachment(const std::string& id) {
  v1::ListAttachmentsRequest request;
  request.set_id(id);
  absl::StatusOr<v1::ListAttachmentsResponse> response = reconciler->attachments(request);
  EXPECT_TRUE(response.ok() && response->attachments_size() == 1) << id;
  return response.ok() && response->attachments_size() == 1 ? response->attachments(0) : v1::Attachment();
}

std::vector<v1::Function> FakePool::functions() {
  v1::ListFunctionsRequest request;
  request.set_page_size(1000);
  absl::StatusOr<v1::ListFunctionsResponse> response = reconciler->functions(request);
  EXPECT_TRUE(response.ok());
  return {response->functions().begin(), response->functions().end()};
}

v1::Function FakePool::function(const std::string& id) {
  for (const v1::Function& f : functions()) {
    if (f.id() == id) return f;
  }
  ADD_FAILURE() << "no function " << id;
  return {};
}

v1::Operation FakePool::operation(const std::string& id) {
  absl::StatusOr<std::optional<OperationRecord>> op = store->operation(id);
  EXPECT_TRUE(op.ok() && op->has_value()) << id;
  v1::Operation out;
  if (!op.ok() || !op->has_value()) return out;
  out.set_done((*op)->done);
  out.set_error_code((*op)->error_code);
  out.set_error_message((*op)->error_message);
  for (const StepRecord& s : (*op)->steps) {
    v1::Step& step = *out.add_steps();
    step.set_name(s.name);
    step.set_state(static_cast<v1::StepState>(s.state));
    step.set_detail(s.detail);
  }
  return out;
}

std::vector<std::string> FakePool::history(const std::string& subject) {
  std::vector<std::string> out;
  absl::StatusOr<std::vector<EventRecord>> events = store->events(0, "", 1'000'000);
  EXPECT_TRUE(events.ok());
  for (const EventRecord& e : *events) {
    if (e.subject == subject && (e.type == "function.lifecycle" || e.type == "attachment.state")) {
      out.push_back(e.message.substr(0, e.message.find(':')));
    }
  }
  return out;
}

void FakePool::check_legal() {
  // What the agents hold: never one slot for two, never one port for two, and nothing nobody knows of.
  std::map<std::string, std::string> port_of;
  for (const auto& [id, host] : hosts) {
    for (const auto& [number, port] : host->ports) {
      if (!port.intent.attach()) continue;
      const v1::Ticket& ticket = port.intent.ticket();
      const std::string slot = absl::StrCat(ticket.box_id(), "/", ticket.slot());
      const auto [at, fresh] = port_of.emplace(slot, absl::StrCat(id, ":", number));
      EXPECT_TRUE(fresh || host->link == nullptr)
          << slot << " is offered to " << at->second << " and " << id << ":" << number;
    }
  }
  // Records: a FREE function has no attachment, every other attachment holds what it says.
  absl::StatusOr<Snapshot> now = store->load();
  ASSERT_TRUE(now.ok()) << now.status();
  std::set<std::string> held;
  for (const AttachmentRecord& a : now->attachments) {
    if (!a.box_released) {
      EXPECT_TRUE(held.insert(a.function()).second) << a.function() << " has two holders";
    }
  }
  for (const FunctionRecord& f : now->functions) {
    const bool lent = f.lifecycle == Lifecycle::kReserved || f.lifecycle == Lifecycle::kAttaching ||
                      f.lifecycle == Lifecycle::kAttached || f.lifecycle == Lifecycle::kDraining;
    EXPECT_EQ(held.count(f.id) != 0, !f.attachment_id.empty()) << f.id;
    if (lent) {
      EXPECT_TRUE(held.count(f.id) != 0) << f.id;
    }
    if (f.lifecycle == Lifecycle::kFree) {
      EXPECT_TRUE(f.attachment_id.empty()) << f.id;
    }
  }
}

}  // namespace dxpu::poolmgr
