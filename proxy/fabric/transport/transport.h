// An ordered, reliable byte stream between two proxies. tcp now; shm and rdma behind the same calls later.
//
// Threads: one sender and one receiver at a time (two threads, one each, are fine); wait_room() and shutdown() from
// anywhere.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dxpu::fabric {

class Transport {
 public:
  virtual ~Transport() = default;

  // Sends all of the batch, in order, or fails. Waits at most `deadline` for room (DEADLINE_EXCEEDED: part may have
  // gone, the stream is broken). UNAVAILABLE: the peer is gone.
  virtual absl::Status send(std::span<const iovec> batch, absl::Duration deadline) = 0;
  // Sends what fits at once, in order, and never waits: how many bytes were taken, 0 when there is no room.
  // UNAVAILABLE.
  virtual absl::StatusOr<size_t> try_send(std::span<const iovec> batch) = 0;
  // Waits until try_send() would take something: true. False when `deadline` passed first.
  virtual bool wait_room(absl::Duration deadline) = 0;
  // Takes what is there, at least 1 byte, into `out`; 0 when nothing came within `deadline`; UNAVAILABLE at end of
  // stream.
  virtual absl::StatusOr<size_t> receive(std::span<std::byte> out, absl::Duration deadline) = 0;
  // Ends both directions; a blocked send or receive returns UNAVAILABLE soon.
  virtual void shutdown() = 0;
  // Descriptor that poll() shows readable when receive() would not wait; -1 when the transport has none.
  virtual int poll_fd() const = 0;
  // Gives the underlying descriptor away (boxd hands it to the worker); the object is dead afterwards. -1: not
  // possible.
  virtual int release_fd() = 0;
  // "tcp 127.0.0.1:4711 → 127.0.0.1:7501", for logs.
  virtual std::string description() const = 0;
};

// tcp ("address:port"; IPv4, [IPv6] or a name). TCP_NODELAY, TCP_USER_TIMEOUT.
absl::StatusOr<std::unique_ptr<Transport>> tcp_connect(const std::string& endpoint, absl::Duration deadline);
std::unique_ptr<Transport> tcp_adopt(int connected_fd);

class TcpListener {
 public:
  static absl::StatusOr<std::unique_ptr<TcpListener>> listen(const std::string& endpoint);
  virtual ~TcpListener() = default;
  // nullptr after shutdown() or when nothing came within `deadline`.
  virtual absl::StatusOr<std::unique_ptr<Transport>> accept(absl::Duration deadline) = 0;
  virtual std::string endpoint() const = 0;  // with the real port when 0 was asked
  virtual void shutdown() = 0;
};

}  // namespace dxpu::fabric
