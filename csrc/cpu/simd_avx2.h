// Eight lanes; see simd.h.
#pragma once

#include <immintrin.h>

#include "cpu/words.h"

COMMKERN_BEGIN_ISA

inline constexpr int kLanes = 8;
inline constexpr int kParts = 1;
using Floats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(16)));
using Wide = uint64_t __attribute__((vector_size(32)));

// For exact results only: it may or may not round in between.
COMMKERN_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}

COMMKERN_INLINE Ints round_nearest(Floats x) {
  return bits_as<Ints>(_mm256_cvtps_epi32(x));
}

COMMKERN_INLINE Ints round_down(Floats x) {
  return bits_as<Ints>(_mm256_cvttps_epi32(_mm256_floor_ps(x)));
}

COMMKERN_INLINE __m128i lower_half(__m256i x) { return _mm256_castsi256_si128(x); }
COMMKERN_INLINE __m128i upper_half(__m256i x) { return _mm256_extracti128_si256(x, 1); }

COMMKERN_INLINE uint32_t largest_lane(Ints x) {
  const __m256i all = bits_as<__m256i>(x);
  __m128i most = _mm_max_epu32(lower_half(all), upper_half(all));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}

COMMKERN_INLINE __m128i load_8_bytes(const uint8_t* in) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in));
}

COMMKERN_INLINE Ints widen_bytes(const uint8_t* bytes) {
  return bits_as<Ints>(_mm256_cvtepu8_epi32(load_8_bytes(bytes)));
}

COMMKERN_INLINE Halves narrow_words(Words x) {
  const __m256i all = bits_as<__m256i>(x);
  return bits_as<Halves>(_mm_packus_epi32(lower_half(all), upper_half(all)));
}

COMMKERN_INLINE Floats widen_half(Halves x) {
  return _mm256_cvtph_ps(bits_as<__m128i>(x));
}

COMMKERN_INLINE Halves narrow_half(Floats x) {
  const Halves h = bits_as<Halves>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  return (h & 0x7fff) > 0x7c00 ? (h & 0x8000) | 0x7e00 : h;
}

// Eight bytes of kBits each in the low kBits bytes of a word: pairs and fours by
// multiply-add, then the two dwords.
template <int kBits>
COMMKERN_INLINE uint64_t squeeze_bytes(__m128i bytes) {
  const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi16(1 | 1 << (8 + kBits)), bytes);
  const __m128i fours =
      _mm_madd_epi16(pairs, _mm_set1_epi32(1 | 1 << (16 + 2 * kBits)));
  const uint64_t word = _mm_cvtsi128_si64(fours);
  return (word & 0xffffffffu) | word >> 32 << (4 * kBits);
}

template <int kBits>
COMMKERN_INLINE void store_group(uint8_t* out, const Ints (&codes)[kParts]) {
  if constexpr (kBits == 1) {
    const Floats signs = bits_as<Floats>(codes[0] << 31);
    store_exactly<1>(out, _mm256_movemask_ps(signs));
  } else {
    const __m256i all = bits_as<__m256i>(codes[0] & ((1 << kBits) - 1));
    const __m128i shorts = _mm_packus_epi32(lower_half(all), upper_half(all));
    const __m128i bytes = _mm_packus_epi16(shorts, shorts);
    if constexpr (kBits == 8) {
      store_exactly<8>(out, _mm_cvtsi128_si64(bytes));
    } else {
      store_exactly<kBits>(out, squeeze_bytes<kBits>(bytes));
    }
  }
}

// Each lane gets the bytes that its code lies in, moves the code to the top, and back
// down with its sign or with zeros.
template <int kBits, bool kSigned>
COMMKERN_INLINE void load_group(const uint8_t* in, Ints (&codes)[kParts]) {
  if constexpr (kBits == 8) {
    const __m128i bytes = load_8_bytes(in);
    codes[0] = bits_as<Ints>(kSigned ? _mm256_cvtepi8_epi32(bytes)
                                     : _mm256_cvtepu8_epi32(bytes));
    return;
  }
  const uint64_t word = load_exactly<kBits>(in);
  Ints words, up;
  if constexpr (kBits <= 4) {
    words = Ints{} + static_cast<int32_t>(word);
    for (int j = 0; j < kLanes; ++j) up[j] = 32 - kBits - j * kBits;
  } else {
    Ints pick;
    for (int j = 0; j < kLanes; ++j) {
      const int byte = j * kBits / 8;
      pick[j] = static_cast<int32_t>(0x80800000u | (byte + 1) << 8 | byte);
      up[j] = 32 - kBits - j * kBits % 8;
    }
    words = bits_as<Ints>(
        _mm256_shuffle_epi8(_mm256_set1_epi64x(word), bits_as<__m256i>(pick)));
  }
  const __m256i top = _mm256_sllv_epi32(bits_as<__m256i>(words), bits_as<__m256i>(up));
  codes[0] = bits_as<Ints>(kSigned ? _mm256_srai_epi32(top, 32 - kBits)
                                   : _mm256_srli_epi32(top, 32 - kBits));
}

COMMKERN_INLINE Ints plus_above(Ints count, Floats x, Floats limit) {
  return count - (x > limit);
}

// table[index] of each lane.
template <int kSize>
COMMKERN_INLINE Ints look_up(const int32_t (&table)[kSize], Ints index) {
  const __m256i at = bits_as<__m256i>(index);
  if constexpr (kSize == 16) {
    const __m256i low = _mm256_permutevar8x32_epi32(load<__m256i>(table, 0), at);
    const __m256i high = _mm256_permutevar8x32_epi32(load<__m256i>(table, 1), at);
    return index > 7 ? bits_as<Ints>(high) : bits_as<Ints>(low);
  } else {
    return bits_as<Ints>(_mm256_i32gather_epi32(table, at, 4));
  }
}

COMMKERN_INLINE void stream(void* out, Floats x) {
  _mm256_stream_ps(static_cast<float*>(out), x);
}
COMMKERN_INLINE void stream_fence() { _mm_sfence(); }

// The products of the low 32 bits of each lane.
COMMKERN_INLINE Wide multiply_low(Wide a, Wide b) {
  return bits_as<Wide>(_mm256_mul_epu32(bits_as<__m256i>(a), bits_as<__m256i>(b)));
}

// a[0] b[0] a[2] b[2] ..., and a[1] b[1] a[3] b[3] ...
COMMKERN_INLINE Wide interleave_even(Wide a, Wide b) {
  return bits_as<Wide>(_mm256_unpacklo_epi64(bits_as<__m256i>(a), bits_as<__m256i>(b)));
}
COMMKERN_INLINE Wide interleave_odd(Wide a, Wide b) {
  return bits_as<Wide>(_mm256_unpackhi_epi64(bits_as<__m256i>(a), bits_as<__m256i>(b)));
}

// Lane j of the result is lane j ^ kDistance.
template <int kDistance>
COMMKERN_INLINE Floats swap_lanes(Floats x) {
  if constexpr (kDistance == 1) return _mm256_permute_ps(x, 0xb1);
  if constexpr (kDistance == 2) return _mm256_permute_ps(x, 0x4e);
  if constexpr (kDistance == 4) return _mm256_permute2f128_ps(x, x, 1);
}

// Lane j changes its sign where bit `first` + j is set; `first` is a multiple of
// kLanes.
COMMKERN_INLINE Floats flip_signs(Floats x, const uint8_t* bits, int64_t first) {
  const Words byte = bits_as<Words>(_mm256_set1_epi8(load<char>(bits + first / 8, 0)));
  const Words at_top = byte << Words{31, 30, 29, 28, 27, 26, 25, 24};
  return bits_as<Floats>(bits_as<Words>(x) ^ (at_top & FloatBits<float>::kSign));
}

COMMKERN_END_ISA
