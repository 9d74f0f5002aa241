// CRC32C (Castagnoli polynomial, reflected), the checksum of the CHECKSUM command. Uses the CPU's instruction where
// there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dxpu::gpu {

// `seed` is the CRC of what came before (0 at the start), so pieces can be chained.
uint32_t crc32c(std::span<const std::byte> data, uint32_t seed = 0);
// The same without the instruction; for tests.
uint32_t crc32c_table(std::span<const std::byte> data, uint32_t seed = 0);

}  // namespace dxpu::gpu
