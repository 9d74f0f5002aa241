#include "poolmgr/service/convert.h"

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"

namespace dxpu::poolmgr {

void set_time(absl::Time time, google::protobuf::Timestamp* out) {
  const int64_t seconds = absl::ToUnixSeconds(time);
  out->set_seconds(seconds);
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
}

absl::Time get_time(const google::protobuf::Timestamp& stamp) {
  return absl::FromUnixSeconds(stamp.seconds()) + absl::Nanoseconds(stamp.nanos());
}

absl::Duration get_duration(const google::protobuf::Duration& duration) {
  constexpr int64_t kMaxSeconds = 315'576'000'000;  // protobuf's own range
  if (duration.seconds() < -kMaxSeconds || duration.seconds() > kMaxSeconds) return absl::ZeroDuration();
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

void set_duration(absl::Duration duration, google::protobuf::Duration* out) {
  const int64_t seconds = absl::ToInt64Seconds(duration);
  out->set_seconds(seconds);
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration - absl::Seconds(seconds))));
}

void fill_ticket(const AttachmentRecord& a, uint64_t generation, const std::string& token, absl::Time expires,
                 v1::Ticket& out) {
  out.set_host_id(a.host_id);
  out.set_box_id(a.box_id);
  out.set_slot(a.slot);
  out.set_attachment_id(a.id);
  out.set_generation(generation);
  out.set_token(token);
  set_time(expires, out.mutable_expires());
}

v1::Operation to_proto(const OperationRecord& op) {
  v1::Operation out;
  out.set_id(op.id);
  out.set_kind(op.kind);
  out.set_owner(op.owner);
  for (const std::string& id : op.attachment_ids) out.add_attachment_ids(id);
  for (const StepRecord& s : op.steps) {
    v1::Step& step = *out.add_steps();
    step.set_name(s.name);
    step.set_state(static_cast<v1::StepState>(s.state));
    step.set_detail(s.detail);
    if (s.started != absl::InfinitePast()) set_time(s.started, step.mutable_started());
    if (s.finished != absl::InfinitePast()) set_time(s.finished, step.mutable_finished());
  }
  out.set_done(op.done);
  out.set_error_code(op.error_code);
  out.set_error_message(op.error_message);
  set_time(op.created, out.mutable_created());
  if (op.finished != absl::InfinitePast()) set_time(op.finished, out.mutable_finished());
  out.set_version(op.version);
  return out;
}

v1::Event to_proto(const EventRecord& event) {
  v1::Event out;
  out.set_revision(event.revision);
  set_time(event.time, out.mutable_time());
  out.set_type(event.type);
  out.set_subject(event.subject);
  out.set_message(event.message);
  out.set_attachment_id(event.attachment_id);
  return out;
}

std::string phase_name(v1::PortPhase phase) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::PortPhase_Name(phase), "PORT_PHASE_"));
}

std::string phase_name(v1::SlotPhase phase) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::SlotPhase_Name(phase), "SLOT_PHASE_"));
}

}  // namespace dxpu::poolmgr
