// A pool with one of everything that output has to show: free, attached, cordoned and missing functions, a host with a
// holder, a box that is away, an attachment that failed, text with control characters from a hostile agent.
#pragma once

#include <string>

#include "tests/cli/fake_pool.h"

namespace dxpu::cli {

// FakeClock stands at this second.
inline constexpr int64_t kNow = 50LL * 365 * 24 * 3600;

inline void set_time(google::protobuf::Timestamp* time, int64_t seconds_ago, int32_t millis = 0) {
  time->set_seconds(kNow - seconds_ago);
  time->set_nanos(millis * 1000000);
}

inline v1::Step step(const std::string& name, v1::StepState state, const std::string& detail = "") {
  v1::Step step;
  step.set_name(name);
  step.set_state(state);
  step.set_detail(detail);
  if (state != v1::STEP_STATE_PENDING && state != v1::STEP_STATE_SKIPPED) set_time(step.mutable_started(), 10);
  if (state == v1::STEP_STATE_DONE || state == v1::STEP_STATE_FAILED) set_time(step.mutable_finished(), 10, 250);
  return step;
}

// The attach operation op-1 of attachment a-1, after `done` of its steps.
inline v1::Operation attach_operation(int done) {
  v1::Operation operation;
  operation.set_id("op-1");
  operation.set_kind("attach");
  operation.set_owner("alice");
  operation.add_attachment_ids("a-1");
  set_time(operation.mutable_created(), 10);
  const char* names[] = {"place", "serve", "link", "plug"};
  for (int i = 0; i < 4; ++i) {
    *operation.add_steps() = step(names[i],
                                  i < done    ? v1::STEP_STATE_DONE
                                  : i == done ? v1::STEP_STATE_RUNNING
                                              : v1::STEP_STATE_PENDING,
                                  i == 0 ? "b1/1 to vm1 port 0" : "");
  }
  if (done == 4) {
    operation.set_done(true);
    set_time(operation.mutable_finished(), 9, 840);
  }
  return operation;
}

inline v1::Attachment sample_attachment(v1::AttachmentState state) {
  v1::Attachment attachment;
  attachment.set_id("a-1");
  attachment.set_owner("alice");
  attachment.set_host_id("vm1");
  attachment.set_port(0);
  attachment.set_box_id("b1");
  attachment.set_slot(1);
  attachment.set_generation(7);
  attachment.add_paths("127.0.0.1:7600");
  attachment.set_state(state);
  set_time(attachment.mutable_since(), 9);
  set_time(attachment.mutable_created(), 10);
  attachment.set_operation_id("op-1");
  attachment.set_version(41);
  if (state == v1::ATTACHMENT_STATE_ATTACHED) {
    attachment.set_bus_address("0001:01:00.0");
    set_time(attachment.mutable_lease_renewed(), 2);
  }
  return attachment;
}

inline void fill_sample(FakePool& fake) {
  fake.pool.set_revision(42);
  fake.pool.set_database("/var/lib/dxpu/pool.db");
  fake.pool.set_software_version("0.1.0");
  (*fake.pool.mutable_functions_by_lifecycle())["FREE"] = 2;
  (*fake.pool.mutable_functions_by_lifecycle())["ATTACHED"] = 1;
  (*fake.pool.mutable_functions_by_lifecycle())["DISCOVERED"] = 1;
  fake.pool.set_boxes(2);
  fake.pool.set_boxes_connected(1);
  fake.pool.set_hosts(1);
  fake.pool.set_hosts_connected(1);
  fake.pool.set_attachments(1);

  for (int i = 0; i < 4; ++i) {
    v1::Function* function = fake.functions.add_functions();
    const std::string box = i < 3 ? "b1" : "b2";
    const uint32_t slot = i < 3 ? static_cast<uint32_t>(i) : 0;
    function->set_id(box + "/" + std::to_string(slot));
    function->set_version(10 + i);
    v1::FunctionSpec* spec = function->mutable_spec();
    spec->set_box_id(box);
    spec->set_slot(slot);
    spec->set_model(i == 2 ? "H100" : "dxpu-soft");
    spec->set_memory_bytes(i == 2 ? 80ull << 30 : 256ull << 20);
    spec->set_engine("copy");
    spec->set_vendor_id(0x1de5);
    spec->set_device_id(0x0001);
    spec->set_serial("00000000000000a" + std::to_string(i));
    v1::FunctionStatus* status = function->mutable_status();
    status->set_lifecycle(i == 1 ? v1::LIFECYCLE_ATTACHED : i == 3 ? v1::LIFECYCLE_DISCOVERED : v1::LIFECYCLE_FREE);
    set_time(status->mutable_since(), 60 * i);
    if (i == 1) {
      status->set_attachment_id("a-1");
      status->set_generation(7);
      status->set_reason("attached to vm1 port 0");
    }
    if (i == 2) status->add_conditions(v1::CONDITION_CORDONED);
    if (i == 3) {
      status->add_conditions(v1::CONDITION_UNHEALTHY);
      status->add_conditions(v1::CONDITION_MISSING);
    }
  }
  fake.functions.set_revision(42);

  for (const char* id : {"b1", "b2"}) {
    v1::Box* box = fake.boxes.add_boxes();
    box->set_id(id);
    box->set_cordoned(box->id() == "b2");
    box->mutable_spec()->set_slot_count(box->id() == "b1" ? 3 : 1);
    box->mutable_spec()->add_paths(box->id() == "b1" ? "127.0.0.1:7600" : "127.0.0.1:7601");
    box->mutable_agent()->set_connected(box->id() == "b1");
    box->mutable_agent()->set_software_version("0.1.0");
    box->mutable_agent()->set_boot_id("5e1f");
    set_time(box->mutable_agent()->mutable_last_seen(), box->id() == "b1" ? 1 : 4000);
  }
  v1::PhysicalGpu* gpu = fake.boxes.mutable_boxes(0)->mutable_spec()->add_physical_gpus();
  gpu->set_pci_address("0000:17:00.0");
  gpu->set_vendor_id(0x10de);
  gpu->set_device_id(0x2330);
  gpu->set_name("NVIDIA Corporation GH100 [H100 SXM5 80GB]");
  fake.boxes.set_revision(42);

  v1::Host* host = fake.hosts.add_hosts();
  host->set_id("vm1");
  host->mutable_spec()->set_port_count(2);
  host->mutable_spec()->set_attach_point("kernel");
  host->mutable_agent()->set_connected(true);
  host->mutable_agent()->set_software_version("0.1.0");
  host->mutable_agent()->set_boot_id("77aa");
  set_time(host->mutable_agent()->mutable_last_seen(), 3);
  v1::HostPort* port = host->add_ports();
  port->set_attachment_id("a-1");
  port->set_phase("attached");
  port->set_holder("pid 123 (qemu-system-x86)");
  port->set_bus_address("0001:01:00.0");
  port = host->add_ports();
  port->set_port(1);
  port->set_phase("empty");
  fake.hosts.set_revision(42);

  *fake.attachments.add_attachments() = sample_attachment(v1::ATTACHMENT_STATE_ATTACHED);
  v1::Attachment* failed = fake.attachments.add_attachments();
  *failed = sample_attachment(v1::ATTACHMENT_STATE_FAILED);
  failed->set_id("a-2");
  failed->set_slot(0);
  failed->set_reason("the host did not answer within 60 s");
  fake.attachments.set_revision(42);

  const char* messages[][4] = {{"box.connected", "b1", "box b1 connected with 3 slots", ""},
                               {"function.lifecycle", "b1/1", "RESERVED to ATTACHING: intents sent", "a-1"},
                               {"worker.died", "b1/1", "worker 77 died: signal 9 \x1b[31m", "a-1"}};
  for (int i = 0; i < 3; ++i) {
    v1::Event* event = fake.events.add_events();
    event->set_revision(40 + i);
    set_time(event->mutable_time(), 30 - 10 * i, 125);
    event->set_type(messages[i][0]);
    event->set_subject(messages[i][1]);
    event->set_message(messages[i][2]);
    event->set_attachment_id(messages[i][3]);
  }
  fake.events.set_revision(42);

  v1::HostTableRow* host_row = fake.tables.add_host_rows();
  host_row->set_host_id("vm1");
  host_row->set_bus_address("0001:01:00.0");
  host_row->set_box_id("b1");
  host_row->set_slot(1);
  host_row->add_paths("127.0.0.1:7600");
  host_row->set_attachment_id("a-1");
  host_row->set_generation(7);
  host_row->set_phase("attached");
  host_row = fake.tables.add_host_rows();
  host_row->set_host_id("vm1");
  host_row->set_port(1);
  host_row->set_phase("empty");
  v1::BoxTableRow* box_row = fake.tables.add_box_rows();
  box_row->set_box_id("b1");
  box_row->set_phase("idle");
  box_row = fake.tables.add_box_rows();
  box_row->set_box_id("b1");
  box_row->set_slot(1);
  box_row->set_host_id("vm1");
  box_row->add_paths("127.0.0.1:7600");
  box_row->set_attachment_id("a-1");
  box_row->set_generation(7);
  box_row->set_phase("serving");
  box_row->set_epoch(3);
  box_row->set_worker_pid(4711);
  fake.tables.set_revision(42);

  fake.operation = attach_operation(1);
  *fake.attach.mutable_operation() = attach_operation(0);
  *fake.attach.add_attachments() = sample_attachment(v1::ATTACHMENT_STATE_PLACED);
  fake.attach.set_revision(42);
  fake.detach.mutable_operation()->set_id("op-2");
  fake.detach.mutable_operation()->set_kind("detach");
  fake.detach.mutable_operation()->add_attachment_ids("a-1");
  set_time(fake.detach.mutable_operation()->mutable_created(), 5);
  for (const char* name : {"check-users", "unplug", "unlink", "scrub", "validate"}) {
    *fake.detach.mutable_operation()->add_steps() = step(name, v1::STEP_STATE_PENDING);
  }
  fake.detach.set_revision(42);
}

}  // namespace dxpu::cli
