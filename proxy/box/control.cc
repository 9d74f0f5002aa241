#include "proxy/box/control.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "proxy/base/status.h"

namespace dxpu::box {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;

absl::StatusOr<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": longer than the ", sizeof(address.sun_path) - 1,
                                                   " bytes a UNIX socket may have; choose a shorter --runtime-dir"));
  }
  path.copy(address.sun_path, path.size());
  return address;
}

absl::StatusOr<base::UniqueFd> seqpacket() {
  base::UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return base::errno_status("socket");
  return fd;
}

const char* name_of(WorkerEnd end) {
  switch (end) {
    case WorkerEnd::kStopped:
      return "stopped";
    case WorkerEnd::kLeaseExpired:
      return "lease-expired";
    case WorkerEnd::kDied:
      return "failed";
  }
  return "failed";
}

json to_json(const WorkerStatus& s) {
  json out = {{"kind", "status"},
              {"version", kVersion},
              {"box", s.box_id},
              {"slot", s.slot},
              {"attachment", s.attachment_id},
              {"generation", s.generation},
              {"pid", s.pid},
              {"epoch", s.epoch},
              {"session_up", s.session_up}};
  if (s.heard_ago < absl::InfiniteDuration()) out["heard_ago_us"] = absl::ToInt64Microseconds(s.heard_ago);
  return out;
}

WorkerStatus status_from(const json& in) {
  WorkerStatus s;
  s.box_id = in.at("box").get<std::string>();
  s.slot = in.at("slot").get<uint32_t>();
  s.attachment_id = in.at("attachment").get<std::string>();
  s.generation = in.at("generation").get<uint64_t>();
  s.pid = in.at("pid").get<int32_t>();
  s.epoch = in.at("epoch").get<uint64_t>();
  s.session_up = in.at("session_up").get<bool>();
  if (in.contains("heard_ago_us")) s.heard_ago = absl::Microseconds(in.at("heard_ago_us").get<int64_t>());
  return s;
}

struct ToJson {
  json operator()(const SessionMessage& m) const {
    return {{"kind", "session"}, {"version", kVersion}, {"epoch", m.epoch}, {"hello", absl::BytesToHexString(m.hello)}};
  }
  json operator()(const StopMessage&) const { return {{"kind", "stop"}, {"version", kVersion}}; }
  json operator()(const StatusMessage& m) const { return to_json(m.status); }
  json operator()(const EndedMessage& m) const {
    return {{"kind", "ended"}, {"version", kVersion}, {"end", name_of(m.end)}, {"detail", m.detail}};
  }
};

}  // namespace

std::string encode(const ControlMessage& message) {
  return std::visit(ToJson{}, message).dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<ControlMessage> decode(const std::string& text) {
  json in = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!in.is_object()) return absl::InvalidArgumentError("control message: not a JSON object");
  try {
    const std::string kind = in.at("kind").get<std::string>();
    if (kind == "session") {
      const std::string digits = in.at("hello").get<std::string>();
      if (digits.size() % 2 != 0 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
        return absl::InvalidArgumentError("control message: hello is not hexadecimal");
      }
      return SessionMessage{in.at("epoch").get<uint64_t>(), absl::HexStringToBytes(digits)};
    }
    if (kind == "stop") return StopMessage{};
    if (kind == "status") return StatusMessage{status_from(in)};
    if (kind == "ended") {
      const std::string end = in.at("end").get<std::string>();
      EndedMessage m;
      m.end = end == "stopped"         ? WorkerEnd::kStopped
              : end == "lease-expired" ? WorkerEnd::kLeaseExpired
                                       : WorkerEnd::kDied;
      m.detail = in.at("detail").get<std::string>();
      return m;
    }
    return absl::UnimplementedError(absl::StrCat("control message: kind \"", kind, "\" is not known to this release"));
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("control message: ", e.what()));
  }
}

absl::StatusOr<base::UniqueFd> control_listen(const std::string& path) {
  DXPU_ASSIGN_OR_RETURN(sockaddr_un address, address_of(path));
  DXPU_ASSIGN_OR_RETURN(base::UniqueFd fd, seqpacket());
  // The slot's lock is ours, so nobody listens there any more.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return base::errno_status(path);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return base::errno_status(path);
  if (::listen(fd.get(), 8) != 0) return base::errno_status(path);
  return fd;
}

absl::StatusOr<base::UniqueFd> control_connect(const std::string& path) {
  DXPU_ASSIGN_OR_RETURN(sockaddr_un address, address_of(path));
  DXPU_ASSIGN_OR_RETURN(base::UniqueFd fd, seqpacket());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN) return absl::UnavailableError(absl::StrCat(path, ": nobody listens"));
    return base::errno_status(path);
  }
  return fd;
}

absl::StatusOr<std::optional<base::UniqueFd>> control_accept(int listener) {
  for (;;) {
    base::UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.valid()) return std::optional<base::UniqueFd>(std::move(fd));
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<base::UniqueFd>();
    return base::errno_status("accept on the control socket");
  }
}

absl::Status control_send(int socket, const ControlMessage& message, int passed) {
  const std::string text = encode(message);
  if (text.size() > kMaxControlBytes) return absl::InvalidArgumentError("control message: too long");
  iovec io{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> ancillary{};
  msghdr header{};
  header.msg_iov = &io;
  header.msg_iovlen = 1;
  if (passed >= 0) {
    header.msg_control = ancillary.data();
    header.msg_controllen = ancillary.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &passed, sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return absl::OkStatus();
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return absl::ResourceExhaustedError("control socket: the peer does not read");
    }
    return base::errno_status("control socket");
  }
}

absl::StatusOr<std::optional<ControlMessage>> control_receive(int socket, base::UniqueFd* passed) {
  std::string text(kMaxControlBytes, '\0');
  iovec io{text.data(), text.size()};
  // Room for more descriptors than a message may carry, so that surplus ones are seen and closed, never leaked.
  alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> ancillary{};
  msghdr header{};
  ssize_t n = 0;
  do {
    header = {};
    header.msg_iov = &io;
    header.msg_iovlen = 1;
    header.msg_control = ancillary.data();
    header.msg_controllen = ancillary.size();
    n = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<ControlMessage>();
    return absl::UnavailableError(absl::StrCat("control socket: ", std::strerror(errno)));
  }
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      passed->reset(fd);
    }
  }
  if (n == 0) return absl::UnavailableError("control socket: the peer closed it");
  if ((header.msg_flags & MSG_TRUNC) != 0) return absl::InvalidArgumentError("control message: too long");
  text.resize(static_cast<size_t>(n));
  DXPU_ASSIGN_OR_RETURN(ControlMessage message, decode(text));
  return std::optional<ControlMessage>(std::move(message));
}

}  // namespace dxpu::box
