// absl::Status ↔ grpc::Status, in this one place.
//
// The canonical codes are the same numbers on both sides. The payload of type kRefusalUrl (a serialised
// dxpu.v1.RefusalDetails) travels in the gRPC status's binary details, nothing else does.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace dxpu {

inline constexpr char kRefusalUrl[] = "type.dxpu/dxpu.v1.RefusalDetails";

grpc::Status to_grpc(const absl::Status& status);
absl::Status to_absl(const grpc::Status& status);

}  // namespace dxpu
