// Dense codes of 1 to 8 bits: code j fills bits [j * bits, (j + 1) * bits),
// little-endian bit order; the last byte is padded with zero bits. Through 64-bit
// words: eight codes are at most eight bytes, so a group of eight starts on a byte at
// any width.
#pragma once

#include <cstdint>

#include "core/numerics.h"

namespace commkern {

inline constexpr int kPackGroup = 8;

COMMKERN_HD int64_t packed_nbytes(int64_t count, int bits) {
  return count / kPackGroup * bits + (count % kPackGroup * bits + 7) / 8;
}

// `count` <= 8 codes into one word; the higher bits of every code are dropped.
COMMKERN_HD uint64_t pack_word(const uint8_t* codes, int count, int bits) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint64_t word = 0;
  for (int j = 0; j < count; ++j) word |= (codes[j] & mask) << (j * bits);
  return word;
}

COMMKERN_HD void unpack_word(uint64_t word, uint8_t* codes, int count, int bits) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int j = 0; j < count; ++j) {
    codes[j] = static_cast<uint8_t>((word >> (j * bits)) & mask);
  }
}

// Eight bytes hold a code each and zeros above it: push the codes together into the low
// kBits bytes, pairs first, then fours, then all eight; and back.
template <int kBits>
COMMKERN_HD uint64_t squeeze_codes(uint64_t x) {
  if constexpr (kBits == 8) return x;
  x = (x & 0x00ff00ff00ff00ffu) | ((x & 0xff00ff00ff00ff00u) >> (8 - kBits));
  x = (x & 0x0000ffff0000ffffu) | ((x & 0xffff0000ffff0000u) >> (16 - 2 * kBits));
  return (x & 0xffffffffu) | ((x >> 32) << (4 * kBits));
}

template <int kBits>
COMMKERN_HD uint64_t spread_codes(uint64_t x) {
  if constexpr (kBits == 8) return x;
  constexpr uint64_t kOne = (uint64_t{1} << kBits) - 1;
  constexpr uint64_t kTwo = (uint64_t{1} << (2 * kBits)) - 1;
  constexpr uint64_t kFour = (uint64_t{1} << (4 * kBits)) - 1;
  x = (x & kFour) | (((x >> (4 * kBits)) & kFour) << 32);
  constexpr uint64_t kTwos = kTwo * 0x0000000100000001u;
  x = (x & kTwos) | (((x >> (2 * kBits)) & kTwos) << 16);
  constexpr uint64_t kOnes = kOne * 0x0001000100010001u;
  return (x & kOnes) | (((x >> kBits) & kOnes) << 8);
}

// The two's-complement value of a code.
COMMKERN_HD int32_t signed_code(uint32_t code, int bits) {
  const uint32_t sign = 1u << (bits - 1);
  return static_cast<int32_t>((code & (2 * sign - 1)) ^ sign) -
         static_cast<int32_t>(sign);
}

// Words are little-endian: byte k of the stream holds bits [8k, 8k + 8).
COMMKERN_HD void store_word(uint64_t word, uint8_t* out, int64_t nbytes) {
  for (int64_t k = 0; k < nbytes; ++k) out[k] = static_cast<uint8_t>(word >> (8 * k));
}

COMMKERN_HD uint64_t load_word(const uint8_t* in, int64_t nbytes) {
  uint64_t word = 0;
  for (int64_t k = 0; k < nbytes; ++k) word |= uint64_t{in[k]} << (8 * k);
  return word;
}

COMMKERN_HD void pack_codes(const uint8_t* codes, int64_t count, int bits,
                            uint8_t* out) {
  for (int64_t j = 0; j < count; j += kPackGroup, out += bits) {
    const int group = static_cast<int>(count - j < kPackGroup ? count - j : kPackGroup);
    store_word(pack_word(codes + j, group, bits), out, packed_nbytes(group, bits));
  }
}

COMMKERN_HD void unpack_codes(const uint8_t* in, int64_t count, int bits,
                              uint8_t* codes) {
  for (int64_t j = 0; j < count; j += kPackGroup, in += bits) {
    const int group = static_cast<int>(count - j < kPackGroup ? count - j : kPackGroup);
    unpack_word(load_word(in, packed_nbytes(group, bits)), codes + j, group, bits);
  }
}

}  // namespace commkern
