// Records to messages.
#pragma once

#include "absl/time/time.h"
#include "dxpu/v1/agent.pb.h"
#include "dxpu/v1/pool.pb.h"
#include "poolmgr/core/types.h"

namespace dxpu::poolmgr {

// "Never" and "no deadline" leave the message's field unset.
void set_time(absl::Time time, google::protobuf::Timestamp* out);
absl::Time get_time(const google::protobuf::Timestamp& stamp);
// ZeroDuration when unset. INVALID values (out of protobuf's range) are ZeroDuration too.
absl::Duration get_duration(const google::protobuf::Duration& duration);
void set_duration(absl::Duration duration, google::protobuf::Duration* out);

void fill_ticket(const AttachmentRecord& a, uint64_t generation, const std::string& token, absl::Time expires,
                 v1::Ticket& out);
v1::Operation to_proto(const OperationRecord& op);
v1::Event to_proto(const EventRecord& event);
// "GONE" → "gone", as HostPort.phase and the tables have it.
std::string phase_name(v1::PortPhase phase);
std::string phase_name(v1::SlotPhase phase);

}  // namespace dxpu::poolmgr
