#include "cli/format.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace dxpu::cli {
namespace {

struct Unit {
  absl::string_view name;
  uint64_t bytes;
};
// Longest names first, so that "MiB" is not read as "B".
constexpr std::array<Unit, 9> kUnits = {{{"TiB", 1ull << 40},
                                         {"GiB", 1ull << 30},
                                         {"MiB", 1ull << 20},
                                         {"KiB", 1ull << 10},
                                         {"TB", 1000000000000},
                                         {"GB", 1000000000},
                                         {"MB", 1000000},
                                         {"KB", 1000},
                                         {"B", 1}}};

// Values this program's protocol does not know yet (a newer pool manager) are shown by number.
std::string without_prefix(const std::string& name, absl::string_view prefix, int value) {
  if (name.empty()) return absl::StrCat(value);
  return std::string(absl::StripPrefix(name, prefix));
}

}  // namespace

absl::StatusOr<absl::Duration> parse_duration(absl::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a duration: write it like 500ms, 60s or 2m"));
  }
  if (duration <= absl::ZeroDuration() || duration > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' must be more than zero and at most 24h"));
  }
  return duration;
}

absl::StatusOr<uint64_t> parse_size(absl::string_view text) {
  auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a size: ", why));
  };
  absl::string_view digits = text;
  uint64_t unit = 1;
  for (const Unit& candidate : kUnits) {
    if (absl::ConsumeSuffix(&digits, candidate.name)) {
      unit = candidate.bytes;
      break;
    }
  }
  digits = absl::StripAsciiWhitespace(digits);
  uint64_t number = 0;
  if (digits.empty() || !absl::ascii_isdigit(digits.front()) || !absl::SimpleAtoi(digits, &number)) {
    return refuse("write it like 256MiB, 80GB or a number of bytes");
  }
  if (number > std::numeric_limits<uint64_t>::max() / unit) return refuse("it does not fit in 64 bits");
  return number * unit;
}

absl::StatusOr<FunctionName> parse_function_name(absl::string_view text) {
  FunctionName name;
  const size_t slash = text.rfind('/');
  const absl::string_view slot = slash == absl::string_view::npos ? "" : text.substr(slash + 1);
  // SimpleAtoi alone would take blanks and a sign.
  if (slash == 0 || slot.empty() || !std::all_of(slot.begin(), slot.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(slot, &name.slot)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a function: write it as BOX/SLOT, like b1/0"));
  }
  name.box = std::string(text.substr(0, slash));
  return name;
}

std::string size_text(uint64_t bytes) {
  for (const Unit& unit : kUnits) {
    if (unit.name.size() == 3 && bytes >= unit.bytes && bytes % unit.bytes == 0) {
      return absl::StrCat(bytes / unit.bytes, unit.name);
    }
  }
  return absl::StrCat(bytes, "B");
}

std::string seconds_text(absl::Duration duration) { return absl::StrFormat("%.2f s", absl::ToDoubleSeconds(duration)); }

std::string age_text(absl::Duration duration) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(duration));
  if (seconds < 120) return absl::StrCat(seconds, "s");
  if (seconds < 7200) return absl::StrCat(seconds / 60, "m");
  if (seconds < 48 * 3600) return absl::StrCat(seconds / 3600, "h");
  return absl::StrCat(seconds / 86400, "d");
}

absl::Time time_of(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

std::string time_text(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0 && time.nanos() == 0) return "-";
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time_of(time), absl::UTCTimeZone());
}

std::string name_of(v1::Lifecycle value) { return without_prefix(v1::Lifecycle_Name(value), "LIFECYCLE_", value); }
std::string name_of(v1::Condition value) { return without_prefix(v1::Condition_Name(value), "CONDITION_", value); }
std::string name_of(v1::AttachmentState value) {
  return without_prefix(v1::AttachmentState_Name(value), "ATTACHMENT_STATE_", value);
}
std::string name_of(v1::StepState value) { return without_prefix(v1::StepState_Name(value), "STEP_STATE_", value); }

std::string printable(absl::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // C1 controls are 0xc2 0x80 … 0xc2 0x9f in UTF-8; some terminals obey them.
    if (byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
        static_cast<unsigned char>(text[i + 1]) < 0xa0) {
      result += '?';
      ++i;
    } else {
      result += absl::ascii_iscntrl(byte) ? '?' : text[i];
    }
  }
  return result;
}

}  // namespace dxpu::cli
