// kLanes floats at once. GNU vector types give arithmetic, comparison and shuffles on
// every compiler and CPU; what they cannot say well is in simd_avx512.h, simd_avx2.h
// and simd_generic.h (SSE4.1 where there is x86, else plain C++), with the same names.
#pragma once

#include "cpu/elements.h"

#if defined(__AVX512BW__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_generic.h"
#endif

COMMKERN_BEGIN_ISA

// Codes go to and from memory kParts vectors at once, kWhole lanes: such a group of any
// width begins and ends on a byte.
inline constexpr int kWhole = kLanes * kParts;

COMMKERN_INLINE Floats broadcast(float x) { return Floats{} + x; }
COMMKERN_INLINE Ints broadcast_bits(uint32_t x) {
  return Ints{} + static_cast<int32_t>(x);
}

COMMKERN_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// As rounding_offset() of core/philox.h; exact, so that fusing it changes nothing.
COMMKERN_INLINE Floats rounding_offsets(const uint8_t* bytes) {
  return multiply_add(to_floats(widen_bytes(bytes)), Floats{} + 0x1p-8f,
                      Floats{} + 0x1p-9f);
}

COMMKERN_INLINE Ints magnitude_of(Floats x) {
  return bits_as<Ints>(x) & broadcast_bits(~FloatBits<float>::kSign);
}

COMMKERN_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
COMMKERN_INLINE Ints smaller(Ints a, Ints b) { return a < b ? a : b; }

// The bits of |x|, or of `most` where that is less.
COMMKERN_INLINE Ints clipped_magnitude(Floats x, float most) {
#if defined(__AVX512DQ__)
  return bits_as<Ints>(_mm512_range_ps(x, broadcast(most), 0xa));
#else
  return smaller(magnitude_of(x), bits_as<Ints>(broadcast(most)));
#endif
}

template <int... kLane>
struct LaneList {};
template <int kCount, int... kLane>
struct FirstLanes : FirstLanes<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct FirstLanes<0, kLane...> {
  using type = LaneList<kLane...>;
};

// Of two vectors end to end, the lanes whose index has bit kBit set, or not.
template <int kBit, bool kSet, int... kLane>
COMMKERN_INLINE Ints lanes_by_bit(Ints a, Ints b, LaneList<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kLane * 2 - kLane % kBit + kSet * kBit)...);
#else
  return __builtin_shuffle(a, b, Ints{(kLane * 2 - kLane % kBit + kSet * kBit)...});
#endif
}

// x[0] becomes the largest lane of each of the kLanes vectors, in their order.
template <int kBit = kLanes / 2>
COMMKERN_INLINE void gather_largest(Ints* x) {
  if constexpr (kBit > 0) {
    using All = typename FirstLanes<kLanes>::type;
    for (int i = 0; i < kBit; ++i) {
      x[i] = larger(lanes_by_bit<kBit, false>(x[2 * i], x[2 * i + 1], All{}),
                    lanes_by_bit<kBit, true>(x[2 * i], x[2 * i + 1], All{}));
    }
    gather_largest<kBit / 2>(x);
  }
}

// Per lane `mask` (all ones or all zeros).
COMMKERN_INLINE Floats choose(Ints mask, Floats yes, Floats no) {
  return bits_as<Floats>((bits_as<Ints>(yes) & mask) | (bits_as<Ints>(no) & ~mask));
}

COMMKERN_INLINE Ints finite_mask(Floats x) {
  return magnitude_of(x) < broadcast_bits(FloatBits<float>::kInf);
}

// ---- elements of 32 and 16 bits ----

template <class T>
struct ElementsOf {
  using type = Halves;
};
template <>
struct ElementsOf<float> {
  using type = Floats;
};
template <class T>
using Elements = typename ElementsOf<T>::type;

template <class T>
COMMKERN_INLINE Floats widen(Elements<T> x) {
  if constexpr (is_same<T, float>) {
    return x;
  } else if constexpr (is_same<T, Half>) {
    return widen_half(x);
  } else {
    return bits_as<Floats>(__builtin_convertvector(x, Words) << 16);
  }
}

template <class T>
COMMKERN_INLINE Elements<T> narrow(Floats x) {
  if constexpr (is_same<T, float>) {
    return x;
  } else if constexpr (is_same<T, Half>) {
    return narrow_half(x);
  } else {
    const Words bits = bits_as<Words>(x);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
    const Ints is_nan = magnitude_of(x) > broadcast_bits(FloatBits<float>::kInf);
    return narrow_words(is_nan ? nan : rounded);
  }
}

// True where vectors serve these element types; fp64 goes through the scalar loops.
template <class T>
constexpr bool kHasVectors = !is_same<T, double>;

template <class T>
COMMKERN_INLINE Floats load_floats(const void* base, int64_t index) {
  return widen<T>(
      load<Elements<T>>(static_cast<const uint8_t*>(base) + index * sizeof(T), 0));
}

template <class T>
COMMKERN_INLINE void store_elements(void* base, int64_t index, Elements<T> x) {
  store(static_cast<uint8_t*>(base) + index * sizeof(T), 0, x);
}

template <class T>
COMMKERN_INLINE void store_floats(void* base, int64_t index, Floats x) {
  store_elements<T>(base, index, narrow<T>(x));
}

// ---- stores past the cache, for results much larger than it ----

// Below this many bytes a result may still be in the cache when somebody reads it.
inline constexpr int64_t kStreamNbytes = int64_t{8} << 20;

COMMKERN_INLINE bool can_stream(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Floats) == 0;
}

// Whether results of T over these spans go past the cache.
template <class T>
COMMKERN_INLINE bool streams_past_cache(const SpanTable& spans) {
  int64_t elements = 0;
  for (int64_t row = 0; row < spans.count; ++row) elements += spans.rows[row].length;
  return is_same<T, float> && elements * int64_t{sizeof(T)} >= kStreamNbytes;
}

// Whether the residual that a step writes does: never in place, where it was just read.
COMMKERN_INLINE bool streams_residual(const Residual& residual,
                                      const SpanTable& spans) {
  return residual.version[0].data != residual.version[1].data &&
         streams_past_cache<float>(spans);
}

template <class T>
COMMKERN_INLINE void put_elements(void* base, int64_t index, Elements<T> x,
                                  bool streams) {
  if constexpr (is_same<T, float>) {
    if (streams) return stream(static_cast<float*>(base) + index, x);
  }
  store_elements<T>(base, index, x);
}

// y = T(v * factor), with kAdd y = T(y + v * factor), for values of W; whether all that
// it wrote is finite.
template <class T, class W, bool kAdd>
COMMKERN_INLINE bool put_scaled(const void* values, int64_t n, ComputeOf<T> factor,
                                void* output, bool streams) {
  using C = ComputeOf<T>;
  BitsOf<T> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<T> && kHasVectors<W>) {
    Ints lanes{};
    for (; i + kLanes <= n; i += kLanes) {
      Floats value = load_floats<W>(values, i) * factor;
      if constexpr (kAdd) value = load_floats<T>(output, i) + value;
      const Elements<T> y = narrow<T>(value);
      lanes = larger(lanes, magnitude_of(widen<T>(y)));
      put_elements<T>(output, i, y, streams);
    }
    most = largest_lane(lanes);
  }
  for (; i < n; ++i) {
    C value = convert<C>(load<W>(values, i)) * factor;
    if constexpr (kAdd) value = load_compute<T>(output, i) + value;
    const T y = convert<T>(value);
    const BitsOf<T> bits = magnitude_bits(convert<C>(y));
    most = bits > most ? bits : most;
    store(output, i, y);
  }
  return is_finite(bits_as<C>(most));
}

COMMKERN_END_ISA
