#include "core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace commkern {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xffu];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t by_table(const uint8_t* data, size_t nbytes, uint32_t crc) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint32_t next = 0;
    for (size_t k = 0; k < 8; ++k) {
      const uint32_t mixed = k < 4 ? (crc >> (8 * k)) & 0xffu : 0u;
      next ^= kTables[7 - k][data[k] ^ mixed];
    }
    crc = next;
  }
  for (; nbytes != 0; ++data, --nbytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xffu];
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* data,
                                                          size_t nbytes, uint32_t crc) {
  uint64_t wide = crc;
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; nbytes != 0; ++data, --nbytes) crc = _mm_crc32_u8(crc, *data);
  return crc;
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__linux__)
__attribute__((target("+crc"))) uint32_t by_instruction(const uint8_t* data,
                                                        size_t nbytes, uint32_t crc) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = __crc32cd(crc, word);
  }
  for (; nbytes != 0; ++data, --nbytes) crc = __crc32cb(crc, *data);
  return crc;
}
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#else
uint32_t by_instruction(const uint8_t* data, size_t nbytes, uint32_t crc) {
  return by_table(data, nbytes, crc);
}
bool has_instruction() { return false; }
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t nbytes, uint32_t value) {
  static const bool fast = has_instruction();
  const auto* bytes = static_cast<const uint8_t*>(data);
  return ~(fast ? by_instruction : by_table)(bytes, nbytes, ~value);
}

uint32_t crc32c_portable(const void* data, size_t nbytes, uint32_t value) {
  return ~by_table(static_cast<const uint8_t*>(data), nbytes, ~value);
}

}  // namespace commkern
