// Which host memory a function may reach, and at which addresses. The whole of invariant 1 for direct attach.
//
// Every access is checked for its full length and direction, and may span mappings that touch. remove() waits for
// copies in flight; after it returns nothing reaches there. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace dxpu::attach {

class DmaMap {
 public:
  static constexpr uint64_t kPage = 4096;

  // INVALID_ARGUMENT: not page aligned, empty, wraps, no direction. ALREADY_EXISTS: overlaps a mapping.
  absl::Status add(uint64_t iova, void* memory, uint64_t bytes, bool function_reads, bool function_writes);
  // The range must be one or more whole mappings, without a gap: NOT_FOUND otherwise.
  absl::Status remove(uint64_t iova, uint64_t bytes);
  void remove_all();

  // False when any byte is not mapped in that direction; then nothing was touched.
  bool read(uint64_t iova, std::span<std::byte> out);
  bool write(uint64_t iova, std::span<const std::byte> data);
  // Runs `access` on an 4 or 8 byte aligned place that is mapped in both directions.
  bool modify(uint64_t iova, unsigned width, absl::FunctionRef<void(void*)> access);

 private:
  struct Mapping {
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
    bool reads = false, writes = false;
    unsigned users = 0;
  };
  struct Piece {
    std::shared_ptr<Mapping> mapping;
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
  };
  // The pieces of a range, each counted as in use until release(); empty when the range is not all mapped.
  std::vector<Piece> take(uint64_t iova, uint64_t bytes, bool reads, bool writes);
  void release(const std::vector<Piece>& pieces);
  void wait_unused(std::unique_lock<std::mutex>& lock, const std::vector<std::shared_ptr<Mapping>>& mappings);

  std::mutex mutex_;
  std::condition_variable released_;
  std::map<uint64_t, std::shared_ptr<Mapping>> mappings_;  // by first address
};

}  // namespace dxpu::attach
