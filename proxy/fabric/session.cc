#include "proxy/fabric/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proxy/base/status.h"
#include "proxy/fabric/hello.h"

namespace dxpu::fabric {

absl::Status check(const Deadlines& d) {
  const auto ordered = [](const char* low_name, absl::Duration low, const char* high_name, absl::Duration high) {
    if (low > absl::ZeroDuration() && low < high) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("deadline ", low_name, " (", absl::FormatDuration(low), ") must be above 0 and below ", high_name,
                     " (", absl::FormatDuration(high), "): read < fast_io_fail < ctrl_loss < lease"));
  };
  DXPU_RETURN_IF_ERROR(ordered("read", d.read, "fast_io_fail", d.fast_io_fail));
  DXPU_RETURN_IF_ERROR(ordered("fast_io_fail", d.fast_io_fail, "ctrl_loss", d.ctrl_loss));
  DXPU_RETURN_IF_ERROR(ordered("ctrl_loss", d.ctrl_loss, "lease", d.lease));
  return ordered("keep_alive", d.keep_alive, "ctrl_loss", d.ctrl_loss);
}

const char* name_of(TerminateReason reason) {
  switch (reason) {
    case TerminateReason::kNone:
      return "none";
    case TerminateReason::kShutdown:
      return "shutdown";
    case TerminateReason::kProtocolError:
      return "protocol error";
    case TerminateReason::kVersion:
      return "version";
    case TerminateReason::kTicketUnknown:
      return "ticket unknown";
    case TerminateReason::kTicketStale:
      return "ticket stale";
    case TerminateReason::kBusy:
      return "busy";
    case TerminateReason::kLeaseExpired:
      return "lease expired";
    case TerminateReason::kFunctionFailed:
      return "function failed";
    case TerminateReason::kKeepAliveLost:
      return "keep-alive lost";
    case TerminateReason::kOverCredit:
      return "over credit";
  }
  return "unknown reason";
}

absl::Status send_terminate(Transport& transport, TerminateReason reason, uint32_t offset, const std::string& detail) {
  std::vector<std::byte> frame = encode_terminate_frame(reason, offset, detail);
  const iovec part{frame.data(), frame.size()};
  return transport.send({&part, 1}, absl::Seconds(1));
}

absl::StatusOr<Hello> read_hello(Transport& transport, absl::Duration deadline) {
  std::vector<std::byte> bytes;
  Frame frame;
  FrameError error;
  Hello hello;
  absl::Status status = receive_hello_frame(transport, deadline, bytes, frame, error);
  if (status.ok() && frame.envelope.type == FrameType::kTerminate) {
    return to_status(decode_terminate(frame.header, frame.payload));
  }
  if (status.ok() && frame.envelope.type != FrameType::kHello) {
    error = {TerminateReason::kProtocolError, 0, absl::StrCat("expected Hello, got ", name_of(frame.envelope.type))};
    status = absl::InvalidArgumentError(absl::StrCat(transport.description(), ": ", error.detail));
  }
  if (status.ok() && !decode_hello(frame.header, hello, error)) {
    status = absl::InvalidArgumentError(absl::StrCat(transport.description(), ": hello refused: ", error.detail));
  }
  if (status.ok()) return hello;
  if (absl::IsDeadlineExceeded(status)) {
    error = {TerminateReason::kProtocolError, 0, "no whole hello in time"};
  }
  if (!absl::IsUnavailable(status)) {
    // The peer may be gone or deaf; the hello's own error is the one to report.
    send_terminate(transport, error.reason, error.offset, error.detail).IgnoreError();
    transport.shutdown();
  }
  return status;
}

std::string serialize(const Hello& hello) {
  SessionOptions options;
  options.max_payload = hello.max_payload;
  options.max_read_request = hello.max_read_request;
  options.read_completion_boundary = hello.read_completion_boundary;
  options.max_outstanding = hello.max_outstanding;
  options.deadlines.keep_alive = hello.keep_alive;
  std::vector<std::byte> frame = encode_hello_frame(hello.ticket, options);
  HelloWire wire;
  std::memcpy(&wire, frame.data() + kEnvelopeBytes, sizeof(wire));
  wire.version_min.set(hello.version);
  wire.version_max.set(hello.version);
  wire.features_mandatory.set(hello.features);
  std::memcpy(frame.data() + kEnvelopeBytes, &wire, sizeof(wire));
  return std::string(reinterpret_cast<const char*>(frame.data()), frame.size());
}

absl::StatusOr<Hello> parse_hello(std::string_view bytes) {
  const std::span<const std::byte> in(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  Envelope envelope;
  FrameError error;
  Hello hello;
  if (in.size() != kEnvelopeBytes + sizeof(HelloWire)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a serialized hello has ", kEnvelopeBytes + sizeof(HelloWire), " bytes, not ", bytes.size()));
  }
  if (!decode_envelope(in.first<kEnvelopeBytes>(), Phase::kHello, 0, envelope, error) ||
      envelope.type != FrameType::kHello || !decode_hello(in.subspan(kEnvelopeBytes), hello, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("serialized hello: ", error.detail.empty() ? "not a Hello" : error.detail));
  }
  return hello;
}

}  // namespace dxpu::fabric
