// What a block's scale comes from. `values` are elements of the compute type C, in
// memory of any alignment.
#pragma once

#include "core/block_scale.h"
#include "cpu/simd.h"

COMMKERN_BEGIN_ISA

// As integers over the bits with the sign cleared: a NaN is larger than any number.
template <class C>
COMMKERN_INLINE C absmax_of(const uint8_t* values, int64_t n) {
  BitsOf<C> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    Ints lanes{};
    for (; i + kLanes <= n; i += kLanes) {
      lanes = larger(lanes, magnitude_of(load_floats<float>(values, i)));
    }
    most = largest_lane(lanes);
  }
  for (; i < n; ++i) {
    const BitsOf<C> bits = magnitude_bits(load<C>(values, i));
    most = bits > most ? bits : most;
  }
  return bits_as<C>(most);
}

template <class C>
struct ValueRange {
  C least, most;
};

// Of finite values, at least one.
template <class C>
COMMKERN_INLINE ValueRange<C> range_of(const uint8_t* values, int64_t n) {
  C least = load<C>(values, 0), most = least;
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    Floats low = broadcast(least), high = low;
    for (; i + kLanes <= n; i += kLanes) {
      const Floats x = load_floats<float>(values, i);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      least = low[lane] < least ? low[lane] : least;
      most = high[lane] > most ? high[lane] : most;
    }
  }
  for (; i < n; ++i) {
    const C x = load<C>(values, i);
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  // Whichever of two zeros was met first; +0 on every path.
  return {least + C(0), most + C(0)};
}

// ---- sums in the fixed order of core/format.h ----

constexpr int64_t kTile = 4096;
constexpr int kPartials = 16;

template <Statistic kStatistic, class C>
COMMKERN_INLINE C summand(C x, C q) {
  if constexpr (kStatistic == Statistic::kL2) return (x * q) * (x * q);
  return bits_as<C>(magnitude_bits(x)) * q;
}

// One tile's sum: q scales every value.
template <Statistic kStatistic, class C>
COMMKERN_INLINE C tile_sum(const uint8_t* values, int64_t n, C q) {
  alignas(64) C partial[kPartials] = {};
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    constexpr int kVectors = kPartials / kLanes;
    Floats sums[kVectors] = {};
    for (; i + kPartials <= n; i += kPartials) {
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = load_floats<float>(values, i + v * kLanes);
        if constexpr (kStatistic == Statistic::kL2) {
          sums[v] += (x * q) * (x * q);
        } else {
          sums[v] += bits_as<Floats>(magnitude_of(x)) * q;
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      store_floats<float>(partial, v * kLanes, sums[v]);
    }
  }
  for (; i < n; ++i) {
    partial[i % kPartials] += summand<kStatistic>(load<C>(values, i), q);
  }
  for (int width = kPartials / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
  }
  return partial[0];
}

// Tiles' sums, combined as a binary tree in index order.
template <class C>
class TileTree {
 public:
  COMMKERN_MEMBER void add(C sum) {
    int level = 0;
    for (; held_ >> level & 1; ++level) sum = at_[level] + sum;
    at_[level] = sum;
    ++held_;
  }
  COMMKERN_MEMBER C total() const {
    bool any = false;
    C sum = 0;
    for (int level = 0; level < kLevels; ++level) {
      if ((held_ >> level & 1) == 0) continue;
      sum = any ? at_[level] + sum : at_[level];
      any = true;
    }
    return sum;
  }

 private:
  static constexpr int kLevels = 48;
  uint64_t held_ = 0;  // bit l: at_[l] is the sum of 2^l tiles
  C at_[kLevels];
};

template <class C>
COMMKERN_INLINE C tile_sum(Statistic statistic, const uint8_t* values, int64_t n, C q) {
  if (statistic == Statistic::kL2) {
    return tile_sum<Statistic::kL2>(values, n, q);
  }
  return tile_sum<Statistic::kMean>(values, n, q);
}

template <class C>
COMMKERN_INLINE C sum_of(Statistic statistic, const uint8_t* values, int64_t n, C q) {
  TileTree<C> tree;
  for (int64_t i = 0; i < n; i += kTile) {
    const uint8_t* tile = values + i * static_cast<int64_t>(sizeof(C));
    tree.add(tile_sum(statistic, tile, smaller(kTile, n - i), q));
  }
  return tree.total();
}

// What the sum of `count` values, each scaled by q, makes of the scale.
template <class C>
COMMKERN_INLINE C wanted_of_sum(const Format& f, C sum, int64_t count, C q) {
  if (f.statistic == Statistic::kMean) return sum / static_cast<C>(count) / q;
  return static_cast<C>(__builtin_sqrt(sum)) / static_cast<C>(largest_value(f)) / q;
}

COMMKERN_END_ISA
