#include "proxy/attach/direct/dma_map.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "absl/strings/str_cat.h"
#include "proxy/function/single_access.h"

namespace dxpu::attach {
namespace {

std::string range_text(uint64_t iova, uint64_t bytes) {
  return absl::StrCat("DMA range 0x", absl::Hex(iova), " of ", bytes, " bytes");
}

}  // namespace

absl::Status DmaMap::add(uint64_t iova, void* memory, uint64_t bytes, bool function_reads, bool function_writes) {
  if (bytes == 0 || iova % kPage != 0 || bytes % kPage != 0 || reinterpret_cast<uintptr_t>(memory) % kPage != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(range_text(iova, bytes), ": address, memory and length must be multiples of 4096"));
  }
  if (memory == nullptr || iova > std::numeric_limits<uint64_t>::max() - bytes) {
    return absl::InvalidArgumentError(absl::StrCat(range_text(iova, bytes), ": no memory, or the range wraps"));
  }
  if (!function_reads && !function_writes) {
    return absl::InvalidArgumentError(absl::StrCat(range_text(iova, bytes), ": neither read nor write asked for"));
  }
  auto mapping = std::make_shared<Mapping>();
  mapping->memory = static_cast<std::byte*>(memory);
  mapping->bytes = bytes;
  mapping->reads = function_reads;
  mapping->writes = function_writes;
  std::lock_guard lock(mutex_);
  const auto next = mappings_.lower_bound(iova);
  const bool hits_next = next != mappings_.end() && next->first < iova + bytes;
  const bool hits_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second->bytes > iova;
  if (hits_next || hits_previous) {
    return absl::AlreadyExistsError(absl::StrCat(range_text(iova, bytes), ": overlaps a mapping, unmap that first"));
  }
  mappings_.emplace(iova, std::move(mapping));
  return absl::OkStatus();
}

absl::Status DmaMap::remove(uint64_t iova, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  std::vector<std::shared_ptr<Mapping>> removed;
  uint64_t at = iova;
  auto it = mappings_.find(iova);
  const auto first = it;
  while (it != mappings_.end() && it->first == at && at - iova < bytes) {
    at += it->second->bytes;
    removed.push_back(it->second);
    ++it;
  }
  if (removed.empty() || at - iova != bytes) {
    return absl::NotFoundError(absl::StrCat(range_text(iova, bytes), ": is not one or more whole mappings"));
  }
  mappings_.erase(first, it);
  wait_unused(lock, removed);
  return absl::OkStatus();
}

void DmaMap::remove_all() {
  std::unique_lock lock(mutex_);
  std::vector<std::shared_ptr<Mapping>> removed;
  for (auto& [iova, mapping] : mappings_) removed.push_back(mapping);
  mappings_.clear();
  wait_unused(lock, removed);
}

void DmaMap::wait_unused(std::unique_lock<std::mutex>& lock, const std::vector<std::shared_ptr<Mapping>>& mappings) {
  // A user is a memcpy that runs now: this ends by itself.
  released_.wait(lock, [&] {
    return std::all_of(mappings.begin(), mappings.end(), [](const auto& mapping) { return mapping->users == 0; });
  });
}

std::vector<DmaMap::Piece> DmaMap::take(uint64_t iova, uint64_t bytes, bool reads, bool writes) {
  std::vector<Piece> pieces;
  if (bytes == 0 || iova > std::numeric_limits<uint64_t>::max() - bytes) return pieces;
  std::lock_guard lock(mutex_);
  auto it = mappings_.upper_bound(iova);
  if (it == mappings_.begin()) return pieces;
  --it;
  for (uint64_t done = 0; done < bytes; ++it) {
    if (it == mappings_.end() || it->first > iova + done) return {};
    const std::shared_ptr<Mapping>& mapping = it->second;
    const uint64_t offset = iova + done - it->first;
    if (offset >= mapping->bytes || (reads && !mapping->reads) || (writes && !mapping->writes)) return {};
    const uint64_t step = std::min(bytes - done, mapping->bytes - offset);
    pieces.push_back({mapping, mapping->memory + offset, step});
    done += step;
  }
  for (const Piece& piece : pieces) ++piece.mapping->users;
  return pieces;
}

void DmaMap::release(const std::vector<Piece>& pieces) {
  std::lock_guard lock(mutex_);
  bool unused = false;
  for (const Piece& piece : pieces) unused = --piece.mapping->users == 0 || unused;
  if (unused) released_.notify_all();
}

bool DmaMap::read(uint64_t iova, std::span<std::byte> out) {
  const std::vector<Piece> pieces = take(iova, out.size(), true, false);
  if (pieces.empty()) return false;
  for (const Piece& piece : pieces) {
    function::single_load(piece.memory, out.data(), piece.bytes);
    out = out.subspan(piece.bytes);
  }
  release(pieces);
  return true;
}

bool DmaMap::write(uint64_t iova, std::span<const std::byte> data) {
  const std::vector<Piece> pieces = take(iova, data.size(), false, true);
  if (pieces.empty()) return false;
  for (const Piece& piece : pieces) {
    function::single_store(piece.memory, data.data(), piece.bytes);
    data = data.subspan(piece.bytes);
  }
  release(pieces);
  return true;
}

bool DmaMap::modify(uint64_t iova, unsigned width, absl::FunctionRef<void(void*)> access) {
  if (iova % width != 0) return false;
  const std::vector<Piece> pieces = take(iova, width, true, true);
  if (pieces.empty()) return false;
  access(pieces.front().memory);  // aligned and mappings are whole pages: always one piece
  release(pieces);
  return true;
}

}  // namespace dxpu::attach
