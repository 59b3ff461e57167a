// Words of 1 to 8 bytes in memory: exactly those bytes are read or written.
#pragma once

#include "cpu/elements.h"

COMMKERN_BEGIN_ISA

template <int kBytes>
COMMKERN_INLINE uint64_t load_exactly(const uint8_t* in) {
  if constexpr (kBytes == 1) {
    return in[0];
  } else if constexpr (kBytes == 2) {
    return load<uint16_t>(in, 0);
  } else if constexpr (kBytes == 4) {
    return load<uint32_t>(in, 0);
  } else if constexpr (kBytes == 7) {
    return load_exactly<4>(in) | load_exactly<4>(in + 3) >> 8 << 32;
  } else if constexpr (kBytes == 8) {
    return load<uint64_t>(in, 0);
  } else {  // 3, 5, 6
    constexpr int kFirst = kBytes / 4 == 0 ? 2 : 4;
    return load_exactly<kFirst>(in) | load_exactly<kBytes - kFirst>(in + kFirst)
                                          << (8 * kFirst);
  }
}

// Bits past those bytes are dropped.
template <int kBytes>
COMMKERN_INLINE void store_exactly(uint8_t* out, uint64_t word) {
  if constexpr (kBytes == 1) {
    out[0] = static_cast<uint8_t>(word);
  } else if constexpr (kBytes == 2) {
    store(out, 0, static_cast<uint16_t>(word));
  } else if constexpr (kBytes == 4) {
    store(out, 0, static_cast<uint32_t>(word));
  } else if constexpr (kBytes == 7) {
    store_exactly<4>(out, word);
    store_exactly<4>(out + 3, word >> 24);
  } else if constexpr (kBytes == 8) {
    store(out, 0, word);
  } else {  // 3, 5, 6
    constexpr int kFirst = kBytes / 4 == 0 ? 2 : 4;
    store_exactly<kFirst>(out, word);
    store_exactly<kBytes - kFirst>(out + kFirst, word >> (8 * kFirst));
  }
}

COMMKERN_END_ISA
