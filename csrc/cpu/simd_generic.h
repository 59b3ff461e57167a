// Four lanes, for SSE4.1 and for CPUs that have no file of their own; see simd.h.
#pragma once

#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

#include "core/bitpack.h"
#include "cpu/words.h"

COMMKERN_BEGIN_ISA

inline constexpr int kLanes = 4;
inline constexpr int kParts = 2;
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(8)));
using Bytes = uint8_t __attribute__((vector_size(4)));
using SignedBytes = int8_t __attribute__((vector_size(4)));
using Wide = uint64_t __attribute__((vector_size(16)));

// For exact results only: it may or may not round in between.
COMMKERN_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }

// Adding 1.5 * 2^23 leaves the rounded number in the low bits; good for |x| < 2^22.
COMMKERN_INLINE Ints round_nearest(Floats x) {
  const Floats magic = Floats{} + 0x1.8p23f;
  return bits_as<Ints>(x + magic) - bits_as<Ints>(magic);
}

// Truncate, then step down where that went up.
COMMKERN_INLINE Ints round_down(Floats x) {
  const Ints truncated = __builtin_convertvector(x, Ints);
  return truncated + (__builtin_convertvector(truncated, Floats) > x);
}

COMMKERN_INLINE uint32_t largest_lane(Ints x) {
  const Words w = bits_as<Words>(x);
  const uint32_t low = w[0] > w[1] ? w[0] : w[1];
  const uint32_t high = w[2] > w[3] ? w[2] : w[3];
  return low > high ? low : high;
}

// Four bytes to and from four words.
#if defined(__SSE4_1__)
COMMKERN_INLINE __m128i load_4_bytes(const uint8_t* in) {
  return _mm_cvtsi32_si128(load<int32_t>(in, 0));
}
COMMKERN_INLINE Ints widen_bytes(const uint8_t* in) {
  return bits_as<Ints>(_mm_cvtepu8_epi32(load_4_bytes(in)));
}
COMMKERN_INLINE Ints widen_signed_bytes(const uint8_t* in) {
  return bits_as<Ints>(_mm_cvtepi8_epi32(load_4_bytes(in)));
}
COMMKERN_INLINE Wide widen_2_bytes(const uint8_t* in) {
  return bits_as<Wide>(_mm_cvtepu8_epi64(_mm_cvtsi32_si128(load<uint16_t>(in, 0))));
}
COMMKERN_INLINE void store_low_bytes(uint8_t* out, Ints x) {
  const __m128i low = _mm_set1_epi32(0x0c080400);
  store(out, 0, _mm_cvtsi128_si32(_mm_shuffle_epi8(bits_as<__m128i>(x), low)));
}
COMMKERN_INLINE Halves narrow_words(Words x) {
  const __m128i packed = _mm_packus_epi32(bits_as<__m128i>(x), bits_as<__m128i>(x));
  return bits_as<Halves>(_mm_cvtsi128_si64(packed));
}
#else
COMMKERN_INLINE Ints widen_bytes(const uint8_t* in) {
  return __builtin_convertvector(load<Bytes>(in, 0), Ints);
}
COMMKERN_INLINE Ints widen_signed_bytes(const uint8_t* in) {
  return __builtin_convertvector(load<SignedBytes>(in, 0), Ints);
}
COMMKERN_INLINE Wide widen_2_bytes(const uint8_t* in) { return Wide{in[0], in[1]}; }
COMMKERN_INLINE void store_low_bytes(uint8_t* out, Ints x) {
  store(out, 0, __builtin_convertvector(x, Bytes));
}
COMMKERN_INLINE Halves narrow_words(Words x) {
  return __builtin_convertvector(x, Halves);
}
#endif

// As half_to_float and float_to_half of core/numerics.h, lane by lane.
COMMKERN_INLINE Floats widen_half(Halves x) {
  const Words h = __builtin_convertvector(x, Words);
  const Words magnitude = h & 0x7fffu;
  const Words shifted = magnitude << 13;
  const Words nan = bits_as<Words>(magnitude > 0x7c00u) & 0x400000u;
  const Floats denormal = bits_as<Floats>(shifted + (113u << 23)) - 0x1p-14f;
  Words out = magnitude < 0x400u ? bits_as<Words>(denormal) : shifted + (112u << 23);
  out = magnitude >= 0x7c00u ? (shifted | 0x7f800000u | nan) : out;
  return bits_as<Floats>(out | ((h & 0x8000u) << 16));
}

COMMKERN_INLINE Halves narrow_half(Floats x) {
  const Words bits = bits_as<Words>(x);
  const Words magnitude = bits & 0x7fffffffu;
  const Words normal =
      (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words denormal =
      bits_as<Words>(bits_as<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  Words out = magnitude < 0x38800000u ? denormal : normal;
  out = magnitude >= 0x477ff000u ? Words{} + 0x7c00u : out;
  out = magnitude > 0x7f800000u ? Words{} + 0x7e00u : out;
  return narrow_words(out | ((bits >> 16) & 0x8000u));
}

// Eight words of up to 255 in the bytes of one.
#if defined(__SSE4_1__)
COMMKERN_INLINE uint64_t join_bytes(const Ints (&x)[kParts]) {
  const __m128i shorts =
      _mm_packus_epi32(bits_as<__m128i>(x[0]), bits_as<__m128i>(x[1]));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(shorts, shorts)));
}
COMMKERN_INLINE void split_bytes(uint64_t word, Ints (&x)[kParts]) {
  const __m128i bytes = _mm_cvtsi64_si128(static_cast<int64_t>(word));
  x[0] = bits_as<Ints>(_mm_cvtepu8_epi32(bytes));
  x[1] = bits_as<Ints>(_mm_cvtepu8_epi32(_mm_srli_si128(bytes, 4)));
}
#else
COMMKERN_INLINE uint64_t join_bytes(const Ints (&x)[kParts]) {
  const uint64_t low = bits_as<uint32_t>(__builtin_convertvector(x[0], Bytes));
  const uint64_t high = bits_as<uint32_t>(__builtin_convertvector(x[1], Bytes));
  return low | high << 32;
}
COMMKERN_INLINE void split_bytes(uint64_t word, Ints (&x)[kParts]) {
  const uint32_t high = static_cast<uint32_t>(word >> 32);
  x[0] = __builtin_convertvector(bits_as<Bytes>(static_cast<uint32_t>(word)), Ints);
  x[1] = __builtin_convertvector(bits_as<Bytes>(high), Ints);
}
#endif

template <int kBits>
COMMKERN_INLINE void store_group(uint8_t* out, const Ints (&codes)[kParts]) {
  constexpr int32_t kMask = (1 << kBits) - 1;
  const uint64_t word = join_bytes({codes[0] & kMask, codes[1] & kMask});
  store_exactly<kBits>(out, squeeze_codes<kBits>(word));
}

template <int kBits, bool kSigned>
COMMKERN_INLINE void load_group(const uint8_t* in, Ints (&codes)[kParts]) {
  split_bytes(spread_codes<kBits>(load_exactly<kBits>(in)), codes);
  if constexpr (kSigned) {
    for (Ints& code : codes) code = (code << (32 - kBits)) >> (32 - kBits);
  }
}

COMMKERN_INLINE Ints plus_above(Ints count, Floats x, Floats limit) {
  return count - (x > limit);
}

// table[index] of each lane.
template <int kSize>
COMMKERN_INLINE Ints look_up(const int32_t (&table)[kSize], Ints index) {
  return Ints{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}

#if defined(__SSE4_1__)
COMMKERN_INLINE void stream(void* out, Floats x) {
  _mm_stream_ps(static_cast<float*>(out), x);
}
COMMKERN_INLINE void stream_fence() { _mm_sfence(); }

COMMKERN_INLINE Wide multiply_low(Wide a, Wide b) {
  return bits_as<Wide>(_mm_mul_epu32(bits_as<__m128i>(a), bits_as<__m128i>(b)));
}
#else
COMMKERN_INLINE void stream(void* out, Floats x) { store(out, 0, x); }
COMMKERN_INLINE void stream_fence() {}

COMMKERN_INLINE Wide multiply_low(Wide a, Wide b) {
  return (a & 0xffffffffu) * (b & 0xffffffffu);
}
#endif

COMMKERN_INLINE Wide interleave_even(Wide a, Wide b) { return Wide{a[0], b[0]}; }
COMMKERN_INLINE Wide interleave_odd(Wide a, Wide b) { return Wide{a[1], b[1]}; }

// Lane j of the result is lane j ^ kDistance.
template <int kDistance>
COMMKERN_INLINE Floats swap_lanes(Floats x) {
  if constexpr (kDistance == 1) return Floats{x[1], x[0], x[3], x[2]};
  if constexpr (kDistance == 2) return Floats{x[2], x[3], x[0], x[1]};
}

// Lane j changes its sign where bit `first` + j is set; `first` is a multiple of
// kLanes.
COMMKERN_INLINE Floats flip_signs(Floats x, const uint8_t* bits, int64_t first) {
  const Words lane_bits = {1, 2, 4, 8};
  const Words nibble = Words{} + static_cast<uint32_t>(bits[first / 8] >> first % 8);
  const Words flips = bits_as<Words>((nibble & lane_bits) == lane_bits);
  return bits_as<Floats>(bits_as<Words>(x) ^ (flips & FloatBits<float>::kSign));
}

COMMKERN_END_ISA
