#include "proxy/gpu/crc32c.h"

#include <array>
#include <cstring>

namespace dxpu::gpu {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41 reflected

// Eight tables, so that eight bytes are folded at once: table[k][b] is the CRC of byte b followed by k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (size_t k = 1; k < 8; ++k) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
  }
  return tables;
}
constexpr auto kTables = make_tables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_instruction(std::span<const std::byte> data, uint32_t seed) {
  uint64_t crc = static_cast<uint32_t>(~seed);
  const std::byte* at = data.data();
  size_t left = data.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  for (; left > 0; --left, ++at) {
    crc = __builtin_ia32_crc32qi(static_cast<uint32_t>(crc), static_cast<unsigned char>(*at));
  }
  return ~static_cast<uint32_t>(crc);
}
#endif

}  // namespace

uint32_t crc32c_table(std::span<const std::byte> data, uint32_t seed) {
  uint32_t crc = ~seed;
  const std::byte* at = data.data();
  size_t left = data.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint32_t byte[8];
    for (int i = 0; i < 8; ++i) byte[i] = static_cast<uint32_t>(at[i]);
    crc ^= byte[0] | byte[1] << 8 | byte[2] << 16 | byte[3] << 24;
    crc = kTables[7][crc & 0xff] ^ kTables[6][crc >> 8 & 0xff] ^ kTables[5][crc >> 16 & 0xff] ^ kTables[4][crc >> 24] ^
          kTables[3][byte[4]] ^ kTables[2][byte[5]] ^ kTables[1][byte[6]] ^ kTables[0][byte[7]];
  }
  for (; left > 0; --left, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*at)) & 0xff];
  return ~crc;
}

uint32_t crc32c(std::span<const std::byte> data, uint32_t seed) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_instruction(data, seed);
#endif
  return crc32c_table(data, seed);
}

}  // namespace dxpu::gpu
