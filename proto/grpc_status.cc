#include "proto/grpc_status.h"

#include <string>

#include "absl/strings/cord.h"

namespace dxpu {
namespace {
// A message that fits gRPC's default limit on headers (8 KiB) whatever an agent or an operator wrote into it.
constexpr size_t kMaxMessage = 2048;
}  // namespace

grpc::Status to_grpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message().substr(0, kMaxMessage));
  std::string details;
  if (auto payload = status.GetPayload(kRefusalUrl)) details = std::string(*payload);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message, details);
}

absl::Status to_absl(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status out(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  if (!status.error_details().empty()) out.SetPayload(kRefusalUrl, absl::Cord(status.error_details()));
  return out;
}

}  // namespace dxpu
