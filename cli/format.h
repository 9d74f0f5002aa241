// Values as people write and read them: durations, sizes, times, enum names. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "dxpu/v1/pool.pb.h"

namespace dxpu::cli {

// "60s", "2m", "1h30m", "500ms"; more than zero and at most 24 hours. INVALID_ARGUMENT says what is accepted.
absl::StatusOr<absl::Duration> parse_duration(absl::string_view text);
// "256MiB", "80GB", "4096": bytes. B, KiB, MiB, GiB, TiB and the decimal KB, MB, GB, TB.
absl::StatusOr<uint64_t> parse_size(absl::string_view text);
// "<box>/<slot>".
struct FunctionName {
  std::string box;
  uint32_t slot = 0;
};
absl::StatusOr<FunctionName> parse_function_name(absl::string_view text);

std::string size_text(uint64_t bytes);              // "256MiB": the largest binary unit that leaves no rest
std::string seconds_text(absl::Duration duration);  // "0.84 s"
std::string age_text(absl::Duration duration);      // "3s", "4m", "2h", "5d"
std::string time_text(const google::protobuf::Timestamp& time);  // "2026-12-01T01:38:17.250Z", "-" when not set
absl::Time time_of(const google::protobuf::Timestamp& time);

// Enum values without their prefix: "FREE", "CORDONED", "ATTACHED", "RUNNING".
std::string name_of(v1::Lifecycle value);
std::string name_of(v1::Condition value);
std::string name_of(v1::AttachmentState value);
std::string name_of(v1::StepState value);

// Text that came over the wire, safe for a terminal: control characters become '?'.
std::string printable(absl::string_view text);

}  // namespace dxpu::cli
