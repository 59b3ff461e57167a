// Sixteen lanes; see simd.h.
#pragma once

// GCC 12 takes its own _mm512_undefined_* for a mistake (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "cpu/elements.h"

COMMKERN_BEGIN_ISA

inline constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using Wide = uint64_t __attribute__((vector_size(64)));

// For exact results only: it may or may not round in between.
COMMKERN_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}

COMMKERN_INLINE Ints round_nearest(Floats x) {
  return bits_as<Ints>(
      _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

COMMKERN_INLINE Ints round_down(Floats x) {
  return bits_as<Ints>(
      _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
}

COMMKERN_INLINE uint32_t largest_lane(Ints x) {
  return _mm512_reduce_max_epu32(bits_as<__m512i>(x));
}

COMMKERN_INLINE Ints widen_bytes(const uint8_t* bytes) {
  return bits_as<Ints>(_mm512_cvtepu8_epi32(load<__m128i>(bytes, 0)));
}

COMMKERN_INLINE Halves narrow_words(Words x) {
  return bits_as<Halves>(_mm512_cvtepi32_epi16(bits_as<__m512i>(x)));
}

COMMKERN_INLINE Floats widen_half(Halves x) {
  return _mm512_cvtph_ps(bits_as<__m256i>(x));
}

COMMKERN_INLINE Halves narrow_half(Floats x) {
  const Halves h = bits_as<Halves>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  return (h & 0x7fff) > 0x7c00 ? (h & 0x8000) | 0x7e00 : h;
}

template <int kBits>
COMMKERN_INLINE void store_codes(uint8_t* out, Ints codes) {
  const __m128i bytes = _mm512_cvtepi32_epi8(bits_as<__m512i>(codes));
  if constexpr (kBits == 8) {
    store(out, 0, bytes);
  } else {
    const __m128i nibbles = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(nibbles, _mm_set1_epi16(0x1001));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(pairs, pairs));
  }
}

template <int kBits>
COMMKERN_INLINE Ints load_codes(const uint8_t* in) {
  if constexpr (kBits == 8) {
    return bits_as<Ints>(_mm512_cvtepi8_epi32(load<__m128i>(in, 0)));
  } else {
    const __m512i words =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
    const __m512i high = _mm512_slli_epi64(words, 56);
    const __m512i low = _mm512_slli_epi64(words, 28);
    return bits_as<Ints>(_mm512_srai_epi32(_mm512_or_si512(high, low), 28));
  }
}

COMMKERN_INLINE void stream(void* out, Floats x) {
  _mm512_stream_ps(static_cast<float*>(out), x);
}
COMMKERN_INLINE void stream_fence() { _mm_sfence(); }

// The products of the low 32 bits of each lane.
COMMKERN_INLINE Wide multiply_low(Wide a, Wide b) {
  return bits_as<Wide>(_mm512_mul_epu32(bits_as<__m512i>(a), bits_as<__m512i>(b)));
}

// a[0] b[0] a[2] b[2] ..., and a[1] b[1] a[3] b[3] ...
COMMKERN_INLINE Wide interleave_even(Wide a, Wide b) {
  return bits_as<Wide>(_mm512_unpacklo_epi64(bits_as<__m512i>(a), bits_as<__m512i>(b)));
}
COMMKERN_INLINE Wide interleave_odd(Wide a, Wide b) {
  return bits_as<Wide>(_mm512_unpackhi_epi64(bits_as<__m512i>(a), bits_as<__m512i>(b)));
}

// Lane j of the result is lane j ^ kDistance.
template <int kDistance>
COMMKERN_INLINE Floats swap_lanes(Floats x) {
  if constexpr (kDistance == 1) return _mm512_permute_ps(x, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(x, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
}

// Lane j changes its sign where bit `first` + j is set; `first` is a multiple of
// kLanes.
COMMKERN_INLINE Floats flip_signs(Floats x, const uint8_t* bits, int64_t first) {
  const __mmask16 flips = load<uint16_t>(bits + first / 8, 0);
  const __m512i all = bits_as<__m512i>(x);
  return bits_as<Floats>(
      _mm512_mask_xor_epi32(all, flips, all, _mm512_set1_epi32(INT32_MIN)));
}

COMMKERN_END_ISA
