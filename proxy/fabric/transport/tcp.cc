// Transport over TCP.
#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proxy/base/clock.h"
#include "proxy/base/status.h"
#include "proxy/base/unique_fd.h"
#include "proxy/fabric/transport/transport.h"

namespace dxpu::fabric {
namespace {

// A connection with unacknowledged data dies after this even when nobody pings.
constexpr unsigned kUserTimeoutMs = 20'000;
constexpr int kBacklog = 64;

// poll()'s timeout: rounded up so that a short wait is not a busy loop; -1 waits for ever.
int poll_ms(absl::Duration d) {
  if (d == absl::InfiniteDuration()) return -1;
  if (d <= absl::ZeroDuration()) return 0;
  return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(absl::Ceil(d, absl::Milliseconds(1))), 1 << 30));
}

// True when `events` (or an error) showed within `wait`.
bool poll_one(int fd, short events, absl::Duration wait) {
  const absl::Duration until = wait == absl::InfiniteDuration() ? wait : base::Clock::real().monotonic() + wait;
  while (true) {
    pollfd p{fd, events, 0};
    const int rc = ::poll(&p, 1, poll_ms(wait));
    if (rc > 0) return true;
    if (rc < 0 && errno != EINTR) return true;  // let the call that follows report it
    if (wait == absl::InfiniteDuration()) continue;
    wait = until - base::Clock::real().monotonic();
    if (wait <= absl::ZeroDuration()) return false;
  }
}

std::string to_text(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  return std::strchr(host, ':') != nullptr ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

std::string local_name(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "?";
  return to_text(address, length);
}

std::string peer_name(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "?";
  return to_text(address, length);
}

struct Endpoint {
  std::string host, port;
};

absl::StatusOr<Endpoint> parse_endpoint(const std::string& text) {
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("endpoint \"", text, "\": ", why, "; write address:port, [v6-address]:port or name:port"));
  };
  Endpoint out;
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return bad("no port");
  out.host = text.substr(0, colon);
  out.port = text.substr(colon + 1);
  if (out.host.size() >= 2 && out.host.front() == '[' && out.host.back() == ']') {
    out.host = out.host.substr(1, out.host.size() - 2);
  } else if (out.host.find(':') != std::string::npos) {
    return bad("an IPv6 address needs brackets");
  }
  if (out.host.empty()) return bad("no address");
  uint32_t port = 0;
  if (!absl::SimpleAtoi(out.port, &port) || port > 65535) return bad("the port is not a number up to 65535");
  return out;
}

struct AddressList {
  addrinfo* head = nullptr;
  ~AddressList() {
    if (head != nullptr) freeaddrinfo(head);
  }
};

absl::Status resolve(const std::string& text, bool passive, AddressList& out) {
  DXPU_ASSIGN_OR_RETURN(const Endpoint endpoint, parse_endpoint(text));
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  if (const int rc = getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &out.head); rc != 0) {
    return absl::UnavailableError(absl::StrCat("endpoint \"", text, "\": ", gai_strerror(rc)));
  }
  return absl::OkStatus();
}

class TcpTransport : public Transport {
 public:
  explicit TcpTransport(int fd)
      : fd_(fd), number_(fd), description_(absl::StrCat("tcp ", local_name(fd), " → ", peer_name(fd))) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const unsigned timeout = kUserTimeoutMs;
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof(timeout));
    // A descriptor from elsewhere may be a non-blocking one or carry a receive timeout: receive() counts on neither.
    if (const int flags = ::fcntl(fd, F_GETFL); flags >= 0 && (flags & O_NONBLOCK) != 0) {
      ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    }
    const timeval none{};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
  }

  absl::Status send(std::span<const iovec> batch, absl::Duration deadline) override {
    std::vector<iovec> rest(batch.begin(), batch.end());
    size_t at = 0;
    const absl::Duration until = base::Clock::real().monotonic() + deadline;
    while (at < rest.size()) {
      DXPU_ASSIGN_OR_RETURN(size_t taken, try_send(std::span<const iovec>(rest).subspan(at)));
      if (taken == 0) {
        if (!poll_one(number_, POLLOUT, until - base::Clock::real().monotonic())) {
          return absl::DeadlineExceededError(
              absl::StrCat(description_, ": no room to send within ", absl::FormatDuration(deadline)));
        }
        continue;
      }
      while (at < rest.size() && taken >= rest[at].iov_len) taken -= rest[at++].iov_len;
      if (taken != 0) {
        rest[at].iov_base = static_cast<std::byte*>(rest[at].iov_base) + taken;
        rest[at].iov_len -= taken;
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> try_send(std::span<const iovec> batch) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(batch.data());
    message.msg_iovlen = std::min<size_t>(batch.size(), IOV_MAX);
    while (true) {
      const ssize_t n = ::sendmsg(number_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n >= 0) return static_cast<size_t>(n);
      if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t{0};
      if (errno != EINTR) return gone("send");
    }
  }

  bool wait_room(absl::Duration deadline) override { return poll_one(number_, POLLOUT, deadline); }

  absl::StatusOr<size_t> receive(std::span<std::byte> out, absl::Duration deadline) override {
    if (out.empty()) return absl::InvalidArgumentError("receive into an empty buffer");
    // A blocking recv with the socket's own timeout is one system call; poll() and recv() would be two. Callers wait
    // for the same durations again and again, so the timeout is rarely set.
    int flags = 0;
    if (deadline <= absl::ZeroDuration()) {
      flags = MSG_DONTWAIT;
    } else if (deadline != receive_timeout_) {
      timeval timeout{};
      if (deadline != absl::InfiniteDuration()) {
        timeout = absl::ToTimeval(std::clamp(deadline, absl::Microseconds(1), absl::Hours(24)));
        if (timeout.tv_sec == 0 && timeout.tv_usec == 0) timeout.tv_usec = 1;
      }
      if (setsockopt(number_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) != 0)
        return gone("set receive timeout");
      receive_timeout_ = deadline;
    }
    while (true) {
      const ssize_t n = ::recv(number_, out.data(), out.size(), flags);
      if (n > 0) return static_cast<size_t>(n);
      if (n == 0) return absl::UnavailableError(absl::StrCat(description_, ": the peer closed the connection"));
      if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t{0};
      if (errno == EINTR) {
        if (deadline != absl::InfiniteDuration()) return size_t{0};
        continue;
      }
      return gone("receive");
    }
  }

  void shutdown() override { ::shutdown(number_, SHUT_RDWR); }
  int poll_fd() const override { return number_; }
  int release_fd() override {
    const timeval none{};
    setsockopt(number_, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
    number_ = -1;
    return fd_.release();
  }
  std::string description() const override { return description_; }

 private:
  absl::Status gone(const char* what) const {
    const int error = errno;
    return absl::UnavailableError(absl::StrCat(description_, ": ", what, ": ", std::strerror(error)));
  }

  base::UniqueFd fd_;
  int number_;
  const std::string description_;
  absl::Duration receive_timeout_ = absl::InfiniteDuration();  // what SO_RCVTIMEO is set to
};

class TcpListenerImpl : public TcpListener {
 public:
  TcpListenerImpl(base::UniqueFd fd, base::UniqueFd wake)
      : fd_(std::move(fd)), wake_(std::move(wake)), endpoint_(local_name(fd_.get())) {}

  absl::StatusOr<std::unique_ptr<Transport>> accept(absl::Duration deadline) override {
    const absl::Duration until =
        deadline == absl::InfiniteDuration() ? deadline : base::Clock::real().monotonic() + deadline;
    while (!down_.load(std::memory_order_acquire)) {
      pollfd waits[2] = {{fd_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      const absl::Duration left = until == absl::InfiniteDuration() ? until : until - base::Clock::real().monotonic();
      const int rc = ::poll(waits, 2, poll_ms(left));
      if (rc < 0 && errno != EINTR) return base::errno_status(absl::StrCat("listener ", endpoint_));
      if (rc <= 0) {
        if (left <= absl::ZeroDuration()) return nullptr;
        continue;
      }
      if (waits[1].revents != 0) break;
      const int fd = ::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) return tcp_adopt(fd);
      // The caller of a connection that died in the queue is the caller's problem, running out of descriptors is ours.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        return base::errno_status(absl::StrCat("listener ", endpoint_, ": accept"));
      }
    }
    return nullptr;
  }

  std::string endpoint() const override { return endpoint_; }

  void shutdown() override {
    down_.store(true, std::memory_order_release);
    const uint64_t one = 1;
    // Can only fail when the counter is full, and then the reader wakes too.
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof(one));
  }

 private:
  base::UniqueFd fd_, wake_;
  const std::string endpoint_;
  std::atomic<bool> down_{false};
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> tcp_connect(const std::string& endpoint, absl::Duration deadline) {
  const absl::Duration until = base::Clock::real().monotonic() + deadline;
  AddressList addresses;
  DXPU_RETURN_IF_ERROR(resolve(endpoint, false, addresses));
  absl::Status last = absl::UnavailableError(absl::StrCat("connect ", endpoint, ": no address"));
  for (const addrinfo* a = addresses.head; a != nullptr; a = a->ai_next) {
    base::UniqueFd fd(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (!fd.valid()) {
      last = base::errno_status("socket");
      continue;
    }
    int error = ::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      if (!poll_one(fd.get(), POLLOUT, std::max(until - base::Clock::real().monotonic(), absl::ZeroDuration()))) {
        return absl::DeadlineExceededError(
            absl::StrCat("connect ", endpoint, ": no answer within ", absl::FormatDuration(deadline)));
      }
      socklen_t length = sizeof(error);
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0) {
      return tcp_adopt(fd.release());
    }
    last = absl::UnavailableError(absl::StrCat("connect ", endpoint, ": ", std::strerror(error)));
  }
  return last;
}

std::unique_ptr<Transport> tcp_adopt(int connected_fd) { return std::make_unique<TcpTransport>(connected_fd); }

absl::StatusOr<std::unique_ptr<TcpListener>> TcpListener::listen(const std::string& endpoint) {
  AddressList addresses;
  DXPU_RETURN_IF_ERROR(resolve(endpoint, true, addresses));
  absl::Status last = absl::UnavailableError(absl::StrCat("listen ", endpoint, ": no address"));
  for (const addrinfo* a = addresses.head; a != nullptr; a = a->ai_next) {
    base::UniqueFd fd(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (!fd.valid()) {
      last = base::errno_status("socket");
      continue;
    }
    const int on = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) != 0 || ::listen(fd.get(), kBacklog) != 0) {
      last = base::errno_status(absl::StrCat("listen ", endpoint));
      continue;
    }
    base::UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake.valid()) return base::errno_status("eventfd");
    return std::make_unique<TcpListenerImpl>(std::move(fd), std::move(wake));
  }
  return last;
}

}  // namespace dxpu::fabric
