// What a block's scale comes from.
#pragma once

#include "core/block_scale.h"
#include "cpu/simd.h"

COMMKERN_BEGIN_ISA

// Values of the compute type, in memory of any alignment.
template <class C>
struct PlainSource {
  const uint8_t* values;

  COMMKERN_MEMBER C at(int64_t i) const { return load<C>(values, i); }
  COMMKERN_MEMBER Floats lanes(int64_t i) const {
    return load_floats<float>(values, i);
  }
  COMMKERN_MEMBER PlainSource from(int64_t i) const {
    return {values + i * static_cast<int64_t>(sizeof(C))};
  }
};

// The same plus a residual.
template <class C>
struct FedSource {
  const uint8_t* values;
  const uint8_t* residual;

  COMMKERN_MEMBER C at(int64_t i) const {
    return load<C>(values, i) + static_cast<C>(load<float>(residual, i));
  }
  COMMKERN_MEMBER Floats lanes(int64_t i) const {
    return load_floats<float>(values, i) + load_floats<float>(residual, i);
  }
  COMMKERN_MEMBER FedSource from(int64_t i) const {
    return {values + i * static_cast<int64_t>(sizeof(C)),
            residual + i * static_cast<int64_t>(sizeof(float))};
  }
};

// As integers over the bits with the sign cleared: a NaN is larger than any number.
template <class C, class Source>
COMMKERN_INLINE C absmax_of(const Source& source, int64_t n) {
  BitsOf<C> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    Ints lanes{};
    for (; i + kLanes <= n; i += kLanes) {
      lanes = larger(lanes, magnitude_of(source.lanes(i)));
    }
    most = largest_lane(lanes);
  }
  for (; i < n; ++i) {
    const BitsOf<C> bits = magnitude_bits(source.at(i));
    most = bits > most ? bits : most;
  }
  return bits_as<C>(most);
}

template <class C>
struct ValueRange {
  C least, most;
};

// Of finite values, at least one.
template <class C, class Source>
COMMKERN_INLINE ValueRange<C> range_of(const Source& source, int64_t n) {
  C least = source.at(0), most = least;
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    Floats low = broadcast(least), high = low;
    for (; i + kLanes <= n; i += kLanes) {
      const Floats x = source.lanes(i);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      least = low[lane] < least ? low[lane] : least;
      most = high[lane] > most ? high[lane] : most;
    }
  }
  for (; i < n; ++i) {
    const C x = source.at(i);
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  // Whichever of two zeros was met first; +0 on every path.
  return {least + C(0), most + C(0)};
}

// ---- sums in the fixed order of core/format.h ----

constexpr int kPartials = 16;

template <Statistic kStatistic, class C>
COMMKERN_INLINE C summand(C x, C q) {
  if constexpr (kStatistic == Statistic::kL2) return (x * q) * (x * q);
  return bits_as<C>(magnitude_bits(x)) * q;
}

// The sixteen partial sums of a tile, combined pairwise.
template <class C>
COMMKERN_INLINE C combined(const C (&p)[kPartials]) {
  C eight[8], four[4];
  for (int lane = 0; lane < 8; ++lane) eight[lane] = p[lane] + p[lane + 8];
  for (int lane = 0; lane < 4; ++lane) four[lane] = eight[lane] + eight[lane + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <class C>
struct TileFacts {
  C absmax;
  C sum;  // of the summands; means nothing where absmax is not finite
};

// Of one tile, in one pass; q scales every value.
template <Statistic kStatistic, class C, class Source>
COMMKERN_INLINE TileFacts<C> tile_facts(const Source& source, int64_t n, C q) {
  alignas(64) C partial[kPartials] = {};
  BitsOf<C> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    constexpr int kVectors = kPartials / kLanes;
    Floats sums[kVectors] = {};
    Ints largest{};
    for (; i + kPartials <= n; i += kPartials) {
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = source.lanes(i + v * kLanes);
        const Ints magnitude = magnitude_of(x);
        largest = larger(largest, magnitude);
        if constexpr (kStatistic == Statistic::kL2) {
          sums[v] += (x * q) * (x * q);
        } else {
          sums[v] += bits_as<Floats>(magnitude) * q;
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      store_floats<float>(partial, v * kLanes, sums[v]);
    }
    most = largest_lane(largest);
  }
  for (; i < n; ++i) {
    const C x = source.at(i);
    const BitsOf<C> bits = magnitude_bits(x);
    most = bits > most ? bits : most;
    partial[i % kPartials] += summand<kStatistic>(x, q);
  }
  return {bits_as<C>(most), combined(partial)};
}

template <class C, class Source>
COMMKERN_INLINE TileFacts<C> tile_facts(Statistic statistic, const Source& source,
                                        int64_t n, C q) {
  if (statistic == Statistic::kL2) {
    return tile_facts<Statistic::kL2, C>(source, n, q);
  }
  return tile_facts<Statistic::kMean, C>(source, n, q);
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

// Of a block.
template <class C, class Source>
COMMKERN_INLINE TileFacts<C> facts_of(Statistic statistic, const Source& source,
                                      int64_t n, C q) {
  if (n <= kSumTile) return tile_facts<C>(statistic, source, n, q);
  TileTree<C> tree;
  BitsOf<C> most = 0;
  for (int64_t i = 0; i < n; i += kSumTile) {
    const auto facts =
        tile_facts<C>(statistic, source.from(i), smaller(kSumTile, n - i), q);
    const BitsOf<C> bits = magnitude_bits(facts.absmax);
    most = bits > most ? bits : most;
    tree.add(facts.sum);
  }
  return {bits_as<C>(most), tree.total()};
}

// What the sum of `count` values, each scaled by q, makes of the scale.
template <class C>
COMMKERN_INLINE C wanted_of_sum(const Format& f, C sum, int64_t count, C q) {
  if (f.statistic == Statistic::kMean) return sum / static_cast<C>(count) / q;
  return static_cast<C>(__builtin_sqrt(sum)) / static_cast<C>(largest_value(f)) / q;
}

COMMKERN_END_ISA
