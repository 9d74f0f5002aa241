#include "proxy/box/slot_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <span>

#include "absl/strings/escaping.h"
#include "proxy/base/status.h"
#include "proxy/base/unique_fd.h"

namespace dxpu::box {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;
// A record is a few hundred bytes; anything larger is not ours.
constexpr size_t kMaxRecordBytes = 64 << 10;

std::string hex(std::span<const std::byte> bytes) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | std::to_integer<uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

std::string encode(const SlotRecord& record) {
  json out = {{"format", kFormat},
              {"slot", record.slot},
              {"epoch", record.epoch},
              {"served_attachment", record.served_attachment},
              {"served_generation", record.served_generation},
              {"lease_expired", record.lease_expired}};
  if (record.wanted) {
    const SlotTicket& t = *record.wanted;
    out["wanted"] = {{"host", t.host_id},
                     {"attachment", t.attachment_id},
                     {"generation", t.generation},
                     {"token", hex(t.token)},
                     {"expires_ns", t.expires == absl::InfiniteFuture() ? -1 : absl::ToUnixNanos(t.expires)},
                     {"used", t.used}};
  }
  return out.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

absl::StatusOr<SlotRecord> decode(const std::string& text, uint32_t slot) {
  auto damaged = [](const std::string& why) { return absl::DataLossError("slot record: " + why); };
  json in = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!in.is_object()) return damaged("not JSON");
  try {
    if (in.at("format").get<int>() != kFormat) return damaged("another format");
    SlotRecord out;
    out.slot = in.at("slot").get<uint32_t>();
    if (out.slot != slot) return damaged("of another slot");
    out.epoch = in.at("epoch").get<uint64_t>();
    out.served_attachment = in.at("served_attachment").get<std::string>();
    out.served_generation = in.at("served_generation").get<uint64_t>();
    out.lease_expired = in.at("lease_expired").get<bool>();
    if (in.contains("wanted")) {
      const json& w = in.at("wanted");
      SlotTicket t;
      t.host_id = w.at("host").get<std::string>();
      t.attachment_id = w.at("attachment").get<std::string>();
      t.generation = w.at("generation").get<uint64_t>();
      t.used = w.at("used").get<bool>();
      const int64_t expires = w.at("expires_ns").get<int64_t>();
      if (expires >= 0) t.expires = absl::FromUnixNanos(expires);
      const std::string digits = w.at("token").get<std::string>();
      if (digits.size() != 2 * fabric::kTokenBytes ||
          digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
        return damaged("token");
      }
      const std::string token = absl::HexStringToBytes(digits);
      std::copy(reinterpret_cast<const std::byte*>(token.data()),
                reinterpret_cast<const std::byte*>(token.data()) + token.size(), t.token.begin());
      out.wanted = std::move(t);
    }
    return out;
  } catch (const json::exception& e) {
    return damaged(e.what());
  }
}

absl::StatusOr<SlotRecord> load(const std::string& path, uint32_t slot) {
  base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return base::errno_status(path);
  std::string text(kMaxRecordBytes, '\0');
  size_t used = 0;
  while (used < text.size()) {
    ssize_t n = ::read(fd.get(), text.data() + used, text.size() - used);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return base::errno_status(path);
    if (n == 0) break;
    used += static_cast<size_t>(n);
  }
  text.resize(used);
  auto record = decode(text, slot);
  if (!record.ok()) return absl::DataLossError(absl::StrCat(path, ": ", record.status().message()));
  return record;
}

absl::Status save(const std::string& path, const SlotRecord& record) {
  const std::string text = encode(record);
  const std::string next = path + ".new";
  base::UniqueFd fd(::open(next.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return base::errno_status(next);
  for (size_t done = 0; done < text.size();) {
    ssize_t n = ::write(fd.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return base::errno_status(next);
    done += static_cast<size_t>(n);
  }
  if (::fdatasync(fd.get()) != 0) return base::errno_status(next);
  if (::rename(next.c_str(), path.c_str()) != 0) return base::errno_status(path);
  const std::string directory = path.substr(0, path.rfind('/'));
  base::UniqueFd dir(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!dir.valid() || ::fsync(dir.get()) != 0) return base::errno_status(directory);
  return absl::OkStatus();
}

fabric::TerminateReason check_ticket(const SlotRecord& record, const std::string& box_id, bool serving,
                                     const fabric::Ticket& shown, absl::Time now) {
  using fabric::TerminateReason;
  if (!record.wanted) return TerminateReason::kTicketUnknown;
  const SlotTicket& t = *record.wanted;
  const bool token = equal_in_constant_time(t.token, shown.token);
  if (shown.box_id != box_id || shown.slot != record.slot || shown.host_id != t.host_id ||
      shown.attachment_id != t.attachment_id) {
    return TerminateReason::kTicketUnknown;
  }
  // An old ticket of the same attachment carries an old token: say that it is stale, its holder can ask for another.
  if (shown.generation < t.generation) return TerminateReason::kTicketStale;
  if (shown.generation > t.generation || !token) return TerminateReason::kTicketUnknown;
  if (t.used || now >= t.expires) return TerminateReason::kTicketStale;
  if (!serving) return TerminateReason::kBusy;
  return TerminateReason::kNone;
}

}  // namespace dxpu::box
