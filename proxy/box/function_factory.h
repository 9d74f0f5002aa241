// The function a slot lends, made on the slot's memory file. The one place where the box room knows which functions
// exist.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proxy/function/function.h"

namespace dxpu::box {

struct FunctionOptions {
  std::string model;
  uint64_t memory_bytes = 0;
  std::string engine;
  uint64_t serial = 0;
  std::string memory_file;
};

class SlotFunction {
 public:
  virtual ~SlotFunction() = default;
  virtual function::Function& function() = 0;
  // For a function that was scrubbed by another process: DATA_LOSS when anything is left, else the function's
  // self-test.
  virtual absl::Status validate() = 0;
};

// FAILED_PRECONDITION: another process holds the memory file.
absl::StatusOr<std::unique_ptr<SlotFunction>> make_function(const FunctionOptions& options);

}  // namespace dxpu::box
