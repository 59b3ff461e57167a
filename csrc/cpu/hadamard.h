// The transform of kernels/hadamard.h, into a small buffer of the compute type.
//
// A vector form goes over the buffer in passes. Each keeps kCount vectors in registers,
// for the levels among their lanes (the first pass) and among themselves.
#pragma once

#include "cpu/random.h"
#include "kernels/hadamard.h"

COMMKERN_BEGIN_ISA

// Vectors that fit in registers with what else a pass needs.
constexpr int kMostVectors = kLanes == 16 ? 16 : 8;

enum class Turn { kForward, kInverse };

template <class C>
COMMKERN_INLINE C rotation_factor(int64_t size) {
  const bool odd = __builtin_ctzll(static_cast<uint64_t>(size)) % 2 != 0;
  C factor = odd ? C(0x1.6a09e667f3bcdp-1) : C(1);
  for (; size > 3; size /= 4) factor *= C(0.5);
  return factor;
}

COMMKERN_INLINE bool bit_at(const uint8_t* bits, int64_t i) {
  return (bits[i / 8] >> (i % 8) & 1) != 0;
}

// A run of pieces of equal size; `source` may be `values`, and need not be aligned.
template <class C>
struct Pieces {
  const uint8_t* source;
  C* values;
  int64_t length;  // of all pieces together
  int64_t size;    // of one
  const uint8_t* bits;
  int64_t first_bit;  // of the first value
};

// ---- values one by one ----

template <class C>
COMMKERN_INLINE C flip_scalar(const Pieces<C>& p, int64_t i, C x) {
  return bit_at(p.bits, p.first_bit + i) ? -x : x;
}

template <class C, Turn kTurn>
static void turn_scalar(const Pieces<C>& p) {
  for (int64_t i = 0; i < p.length; ++i) {
    const C x = load<C>(p.source, i);
    p.values[i] = kTurn == Turn::kForward ? flip_scalar(p, i, x) : x;
  }
  for (int64_t half = 1; half < p.size; half *= 2) {
    for (int64_t first = 0; first < p.length; first += 2 * half) {
      C* left = p.values + first;
      for (int64_t j = 0; j < half; ++j) {
        const C a = left[j], b = left[j + half];
        left[j] = a + b;
        left[j + half] = a - b;
      }
    }
  }
  const C factor = rotation_factor<C>(p.size);
  for (int64_t i = 0; i < p.length; ++i) {
    const C y = p.values[i] * factor;
    p.values[i] = kTurn == Turn::kInverse ? flip_scalar(p, i, y) : y;
  }
}

// ---- vectors ----

// Lanes without the bit kHalf get a + b, the others a - b; a product by +-1 is exact.
template <int kHalf>
COMMKERN_INLINE Floats lane_butterfly(Floats x) {
  Floats signs;
  for (int lane = 0; lane < kLanes; ++lane) signs[lane] = lane & kHalf ? -1.0f : 1.0f;
  return multiply_add(x, signs, swap_lanes<kHalf>(x));
}

COMMKERN_INLINE Floats lane_butterflies(Floats x) {
  x = lane_butterfly<2>(lane_butterfly<1>(x));
  if constexpr (kLanes >= 8) x = lane_butterfly<4>(x);
  if constexpr (kLanes >= 16) x = lane_butterfly<8>(x);
  return x;
}

template <int kCount>
COMMKERN_INLINE void vector_butterflies(Floats (&x)[kCount]) {
#pragma GCC unroll 4
  for (int half = 1; half < kCount; half *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      if (i & half) continue;
      const Floats a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
}

// The levels from `stride` (1 in the first pass) up to kCount * stride vectors.
template <int kCount, bool kFirst, bool kLast, Turn kTurn>
static void turn_pass(const Pieces<float>& p, int64_t stride) {
  const Floats factor = broadcast(rotation_factor<float>(p.size));
  const void* source = p.values;
  if constexpr (kFirst) source = p.source;
  const int64_t step = stride * kLanes;
  for (int64_t first = 0; first < p.length; first += kCount * step) {
    for (int64_t at = first; at < first + step; at += kLanes) {
      Floats x[kCount];
#pragma GCC unroll 16
      for (int k = 0; k < kCount; ++k) {
        const int64_t i = at + k * step;
        x[k] = load_floats<float>(source, i);
        if constexpr (kFirst && kTurn == Turn::kForward) {
          x[k] = flip_signs(x[k], p.bits, p.first_bit + i);
        }
        if constexpr (kFirst) x[k] = lane_butterflies(x[k]);
      }
      vector_butterflies<kCount>(x);
#pragma GCC unroll 16
      for (int k = 0; k < kCount; ++k) {
        const int64_t i = at + k * step;
        if constexpr (kLast) x[k] = x[k] * factor;
        if constexpr (kLast && kTurn == Turn::kInverse) {
          x[k] = flip_signs(x[k], p.bits, p.first_bit + i);
        }
        store_floats<float>(p.values, i, x[k]);
      }
    }
  }
}

// The last pass over `count` strides, or the only one.
template <int kCount, bool kFirst, Turn kTurn>
COMMKERN_INLINE void last_pass(const Pieces<float>& p, int64_t count, int64_t stride) {
  if (count == kCount) return turn_pass<kCount, kFirst, true, kTurn>(p, stride);
  if constexpr (kCount > 1) last_pass<kCount / 2, kFirst, kTurn>(p, count, stride);
}

template <Turn kTurn>
static void turn_vectors(const Pieces<float>& p) {
  const int64_t count = p.size / kLanes;
  if (count <= kMostVectors) return last_pass<kMostVectors, true, kTurn>(p, count, 1);
  turn_pass<kMostVectors, true, false, kTurn>(p, 1);
  int64_t stride = kMostVectors;
  for (; count / stride > kMostVectors; stride *= kMostVectors) {
    turn_pass<kMostVectors, false, false, kTurn>(p, stride);
  }
  last_pass<kMostVectors, false, kTurn>(p, count / stride, stride);
}

template <Turn kTurn, class C>
COMMKERN_INLINE void turn_pieces(const Pieces<C>& p) {
  if constexpr (kHasVectors<C>) {
    if (p.size >= kLanes) return turn_vectors<kTurn>(p);
  }
  turn_scalar<C, kTurn>(p);
}

// ---- the transform ----

class Rotation {
 public:
  static constexpr int64_t kMostValues = 8192;  // in a call

  Rotation(uint64_t seed, uint32_t parameter_id, int32_t rotation)
      : draws_({seed, parameter_id, 0, kRotationStream}), rotation_(rotation) {}

  // Of n values of C from `source` on, which may be `values`. The first has the index
  // `first` in its parameter, where a piece begins; the last ends a piece or a span.
  template <class C>
  COMMKERN_MEMBER void rotate(const void* source, C* values, int64_t n, int64_t first) {
    turn<Turn::kForward>(source, values, n, first);
  }

  template <class C>
  COMMKERN_MEMBER void unrotate(const void* source, C* values, int64_t n,
                                int64_t first) {
    turn<Turn::kInverse>(source, values, n, first);
  }

 private:
  static constexpr int64_t kDrawBits = 128;

  template <Turn kTurn, class C>
  COMMKERN_MEMBER void turn(const void* source, C* values, int64_t n, int64_t first) {
    const auto* from = static_cast<const uint8_t*>(source);
    const int64_t first_bit = first % kDrawBits;
    collect_bits(static_cast<uint64_t>(first / kDrawBits), first_bit + n);
    int64_t size = rotation_;
    for (int64_t begin = 0; begin < n; size /= 2) {
      const int64_t length = (n - begin) / size * size;
      if (length == 0) continue;
      turn_pieces<kTurn>(Pieces<C>{from + begin * static_cast<int64_t>(sizeof(C)),
                                   values + begin, length, size, bits_,
                                   first_bit + begin});
      begin += length;
    }
  }

  COMMKERN_MEMBER void collect_bits(uint64_t draw, int64_t count) {
    for (int64_t at = 0; at < count; at += kDrawBits) {
      std::memcpy(bits_ + at / 8, draws_.bytes_of(draw++), kDrawBits / 8);
    }
  }

  Draws draws_;
  int64_t rotation_;
  uint8_t bits_[(kMostValues + kDrawBits) / 8];
};

COMMKERN_END_ISA
