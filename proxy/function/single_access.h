// Copies whose small aligned cases are one access, as on a bus.
//
// Memory that a function writes by DMA is polled by whoever waits for it: an aligned 1, 2, 4 or 8 byte store must never
// be seen half done, and all stores before it must be seen with it. Longer copies are plain memcpy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dxpu::function {

namespace internal {
template <typename T>
inline bool aligned(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0;
}
template <typename T>
inline void store(void* to, const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  __atomic_store_n(static_cast<T*>(to), value, __ATOMIC_RELEASE);
}
template <typename T>
inline void load(const void* from, void* to) {
  const T value = __atomic_load_n(static_cast<const T*>(from), __ATOMIC_ACQUIRE);
  std::memcpy(to, &value, sizeof value);
}
}  // namespace internal

// `shared` is the memory that others look at, `from` is private.
inline void single_store(void* shared, const void* from, size_t bytes) {
  if (bytes == 8 && internal::aligned<uint64_t>(shared)) return internal::store<uint64_t>(shared, from);
  if (bytes == 4 && internal::aligned<uint32_t>(shared)) return internal::store<uint32_t>(shared, from);
  if (bytes == 2 && internal::aligned<uint16_t>(shared)) return internal::store<uint16_t>(shared, from);
  if (bytes == 1) return internal::store<uint8_t>(shared, from);
  if (bytes != 0) std::memcpy(shared, from, bytes);
}

inline void single_load(const void* shared, void* to, size_t bytes) {
  if (bytes == 8 && internal::aligned<uint64_t>(shared)) return internal::load<uint64_t>(shared, to);
  if (bytes == 4 && internal::aligned<uint32_t>(shared)) return internal::load<uint32_t>(shared, to);
  if (bytes == 2 && internal::aligned<uint16_t>(shared)) return internal::load<uint16_t>(shared, to);
  if (bytes == 1) return internal::load<uint8_t>(shared, to);
  if (bytes != 0) std::memcpy(to, shared, bytes);
}

}  // namespace dxpu::function
