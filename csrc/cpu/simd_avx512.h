// Sixteen lanes; see simd.h.
#pragma once

// GCC 12 takes its own _mm512_undefined_* for a mistake (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "cpu/words.h"

COMMKERN_BEGIN_ISA

inline constexpr int kLanes = 16;
inline constexpr int kParts = 1;
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

COMMKERN_INLINE Ints truncated(Floats x) {
  return bits_as<Ints>(_mm512_cvttps_epi32(x));
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

// The low kBits of sixteen bytes, pushed together into each half's low kBits bytes:
// pairs and fours by multiply-add, then the two dwords of a half.
template <int kBits>
COMMKERN_INLINE __m128i squeeze_bytes(__m128i bytes) {
  const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi16(1 | 1 << (8 + kBits)), bytes);
  const __m128i fours =
      _mm_madd_epi16(pairs, _mm_set1_epi32(1 | 1 << (16 + 2 * kBits)));
  const __m128i second = _mm_srli_epi64(fours, 32 - 4 * kBits);
  const __m128i low = _mm_set1_epi64x((int64_t{1} << (4 * kBits)) - 1);
  return _mm_ternarylogic_epi64(fours, second, low, 0xe4);  // low ? fours : second
}

template <int kBits>
COMMKERN_INLINE void store_group(uint8_t* out, const Ints (&codes)[kParts]) {
  const __m512i all = bits_as<__m512i>(codes[0]);
  if constexpr (kBits == 1) {
    store(out, 0, _mm512_test_epi32_mask(all, _mm512_set1_epi32(1)));
  } else if constexpr (kBits == 8) {
    store(out, 0, _mm512_cvtepi32_epi8(all));
  } else if constexpr (kBits == 4) {
    // Two codes meet in the low byte of each 64-bit lane.
    const __m512i second = _mm512_srli_epi64(all, 28);
    const __m512i low = _mm512_set1_epi64(15);  // low ? all : second
    const __m512i pairs = _mm512_ternarylogic_epi64(all, second, low, 0xe4);
    store_exactly<8>(out, _mm_cvtsi128_si64(_mm512_cvtepi64_epi8(pairs)));
  } else {
    const __m128i mask = _mm_set1_epi8((1 << kBits) - 1);
    const __m128i bytes = _mm_and_si128(_mm512_cvtepi32_epi8(all), mask);
    const __m128i halves = squeeze_bytes<kBits>(bytes);
    store_exactly<kBits>(out, _mm_cvtsi128_si64(halves));
    store_exactly<kBits>(out + kBits, _mm_extract_epi64(halves, 1));
  }
}

// Each lane gets the two bytes that its code lies in, moves the code to the top, and
// back down with its sign or with zeros.
template <int kBits, bool kSigned>
COMMKERN_INLINE void load_group(const uint8_t* in, Ints (&codes)[kParts]) {
  if constexpr (kBits == 8) {
    const __m128i bytes = load<__m128i>(in, 0);
    codes[0] = bits_as<Ints>(kSigned ? _mm512_cvtepi8_epi32(bytes)
                                     : _mm512_cvtepu8_epi32(bytes));
    return;
  }
  Ints words, up;
  if constexpr (kBits <= 2) {
    words = bits_as<Ints>(
        _mm512_set1_epi32(static_cast<int32_t>(load_exactly<2 * kBits>(in))));
    for (int j = 0; j < kLanes; ++j) up[j] = 32 - kBits - j * kBits;
  } else {
    Ints pick;
    for (int j = 0; j < kLanes; ++j) {
      const int byte = j * kBits / 8;
      pick[j] = static_cast<int32_t>(0x80800000u | (byte + 1) << 8 | byte);
      up[j] = 32 - kBits - j * kBits % 8;
    }
    const __m128i bytes = _mm_maskz_loadu_epi8((1u << (2 * kBits)) - 1, in);
    words = bits_as<Ints>(
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), bits_as<__m512i>(pick)));
  }
  const __m512i top = _mm512_sllv_epi32(bits_as<__m512i>(words), bits_as<__m512i>(up));
  codes[0] = bits_as<Ints>(kSigned ? _mm512_srai_epi32(top, 32 - kBits)
                                   : _mm512_srli_epi32(top, 32 - kBits));
}

// x, or the number of its sign and magnitude `most` where that is nearer 0.
COMMKERN_INLINE Floats clipped(Floats x, float most) {
  return _mm512_range_ps(x, _mm512_set1_ps(most), 0x2);
}

// `count`, and one more in lanes where x > limit.
COMMKERN_INLINE Ints plus_above(Ints count, Floats x, Floats limit) {
  const __mmask16 above = _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ);
  const __m512i n = bits_as<__m512i>(count);
  return bits_as<Ints>(_mm512_mask_sub_epi32(n, above, n, _mm512_set1_epi32(-1)));
}

// 32 entries of a table.
COMMKERN_INLINE __m512i look_up_32(const int32_t* table, __m512i index) {
  return _mm512_permutex2var_epi32(load<__m512i>(table, 0), index,
                                   load<__m512i>(table, 1));
}

// table[index] of each lane, from registers where it fits.
template <int kSize>
COMMKERN_INLINE Ints look_up(const int32_t (&table)[kSize], Ints index) {
  const __m512i at = bits_as<__m512i>(index);
  if constexpr (kSize == 16) {
    return bits_as<Ints>(_mm512_permutexvar_epi32(at, load<__m512i>(table, 0)));
  } else if constexpr (kSize == 32) {
    return bits_as<Ints>(look_up_32(table, at));
  } else if constexpr (kSize == 128) {
    const __mmask16 odd = _mm512_test_epi32_mask(at, _mm512_set1_epi32(32));
    const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(64));
    const __m512i low =
        _mm512_mask_mov_epi32(look_up_32(table, at), odd, look_up_32(table + 32, at));
    const __m512i high = _mm512_mask_mov_epi32(look_up_32(table + 64, at), odd,
                                               look_up_32(table + 96, at));
    return bits_as<Ints>(_mm512_mask_mov_epi32(low, upper, high));
  } else {
    return bits_as<Ints>(_mm512_i32gather_epi32(at, table, 4));
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
