// Code books as codes (core/code_books.h), a vector at a time.
#pragma once

#include "core/bitpack.h"
#include "core/code_books.h"
#include "cpu/codes.h"

COMMKERN_BEGIN_ISA

// fp32 numbers are kept as their bits, as look_up() takes tables.
constexpr int32_t table_entry(float x) { return __builtin_bit_cast(int32_t, x); }

// A book's values by stored code.
template <class Book>
struct DecodedTable {
  int32_t bits[1 << Book::kBits];
  constexpr DecodedTable() : bits() {
    for (int32_t code = 0; code < 1 << Book::kBits; ++code) {
      bits[code] = table_entry(book_decoded<Book>(code));
    }
  }
  template <class C>
  COMMKERN_MEMBER C value(int32_t code) const {
    return static_cast<C>(bits_as<float>(bits[code]));
  }
};
static constexpr DecodedTable<NormalFloat4Book> kNormalFloat4Values;
static constexpr DecodedTable<Dynamic8Book> kDynamic8Values;

// As book_code(), by halving a table of values.
template <class Book, class C>
COMMKERN_INLINE int32_t search(const DecodedTable<Book>& table, C p) {
  const auto value = [&](int32_t index) {
    return table.template value<double>(index ^ Book::kZero);
  };
  int32_t index = 0;
  for (int32_t step = 1 << (Book::kBits - 1); step > 0; step /= 2) {
    const int32_t next = index + step;
    const double middle = (value(next - 1) + value(next)) * 0.5;
    index = middle < static_cast<double>(p) ? next : index;
  }
  return index ^ Book::kZero;
}

// The largest fp32 number that is not above `x`: fp32 numbers are above both or
// neither.
constexpr float float_below(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) <= x) return nearest;
  const uint32_t bits = __builtin_bit_cast(uint32_t, nearest);
  return __builtin_bit_cast(float, nearest > 0 ? bits - 1 : bits + 1);
}

// NF4's midpoints, and bins of the positions -1 ... 1 that hold one at most: the number
// of midpoints below a bin, and the one in it.
struct NormalFloat4Midpoints {
  static constexpr float kScale = 15.9f;  // a position's bin is floor((p + 1) * kScale)
  float value[15];
  int32_t below[32];
  int32_t within[32];

  constexpr NormalFloat4Midpoints() : value(), below(), within() {
    int32_t bin = 0;
    for (int32_t i = 0; i < 15; ++i) {
      value[i] = float_below(book_midpoint<NormalFloat4Book>(i));
      const int32_t own = static_cast<int32_t>((value[i] + 1) * kScale);
      for (; bin <= own; ++bin) {
        below[bin] = i;
        within[bin] = table_entry(bin == own ? value[i] : __builtin_inff());
      }
    }
    for (; bin < 32; ++bin) {
      below[bin] = 15;
      within[bin] = table_entry(__builtin_inff());
    }
  }
  // That no two share a bin, nor is one where rounding may choose between bins.
  constexpr bool is_safe() const {
    for (int32_t i = 0; i < 15; ++i) {
      const float place = (value[i] + 1) * kScale;
      const float fraction = place - static_cast<float>(static_cast<int32_t>(place));
      if (fraction < 0.001f || fraction > 0.999f) return false;
      if (below[static_cast<int32_t>(place)] != i) return false;
    }
    return true;
  }
};
static constexpr NormalFloat4Midpoints kNormalFloat4Midpoints;
static_assert(kNormalFloat4Midpoints.is_safe());

struct NormalFloat4 : CodeDefaults {
  static constexpr int kBits = 4;
  static constexpr bool kSigned = false;

  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t) {
    static_assert(!kStochastic);
    return search(kNormalFloat4Values, p);
  }
  // By bin where that costs a shuffle, else by comparing with all midpoints.
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t*) {
    static_assert(!kStochastic);
    const NormalFloat4Midpoints& midpoints = kNormalFloat4Midpoints;
    Ints index{};
#if defined(__AVX512BW__)
    const Floats place = clipped(p, 1.0f) * midpoints.kScale + midpoints.kScale;
    const Ints bin = truncated(place);
    const Floats within = bits_as<Floats>(look_up(midpoints.within, bin));
    index = plus_above(look_up(midpoints.below, bin), p, within);
#else
    for (float m : midpoints.value) index = plus_above(index, p, broadcast(m));
#endif
    return index ^ kNormalFloat4Zero;
  }

  template <class C>
  COMMKERN_MEMBER static C decode(int32_t code) {
    return kNormalFloat4Values.template value<C>(code);
  }
  COMMKERN_MEMBER static Floats decode_lanes(Ints code) {
    return bits_as<Floats>(look_up(kNormalFloat4Values.bits, code));
  }
};

// Magnitudes from 2^-22 to 1 by exponent and six bits of mantissa. A bin holds one
// midpoint at most: `below` counts those of smaller bins, `rest` is where in the bin it
// is, in the low 17 bits of an fp32 number, and `exact` whether it is an fp32 number.
// An entry is below << 24 | exact << 23 | rest.
struct Dynamic8Bins {
  static constexpr int kShift = 17;
  static constexpr int32_t kFirst = (127 - 22) << 6;
  static constexpr int32_t kCount = 22 << 6;
  static constexpr int32_t kNone = 1 << 18;  // no `rest` is above it
  int32_t entry[kCount];

  constexpr Dynamic8Bins() : entry() {
    int32_t below = 0;
    for (int32_t bin = 0; bin < kCount; ++bin) {
      entry[bin] = below << 24 | kNone;
      const double middle =
          below < 128 ? book_midpoint<Dynamic8Book>(kDynamic8Zero + below) : 2;
      const float rounded = float_below(middle);
      const uint32_t bits = __builtin_bit_cast(uint32_t, rounded);
      if (static_cast<int32_t>(bits >> kShift) != bin + kFirst) continue;
      const int32_t exact = static_cast<double>(rounded) == middle ? 1 : 0;
      entry[bin] =
          below << 24 | exact << 23 | static_cast<int32_t>(bits & ((1u << kShift) - 1));
      ++below;
    }
  }
};
static constexpr Dynamic8Bins kDynamic8Bins;
static_assert(kDynamic8Bins.entry[Dynamic8Bins::kCount - 1] >> 24 == 127);

struct Dynamic8Magnitudes {
  int32_t bits[128];
  constexpr Dynamic8Magnitudes() : bits() {
    for (int32_t k = 0; k < 128; ++k) bits[k] = table_entry(dynamic8_magnitude(k));
  }
};
static constexpr Dynamic8Magnitudes kDynamic8Magnitudes;

// As a signed byte, a stored code is -k for the k-th positive value and k for its
// negative.
struct Dynamic8 : CodeDefaults {
  static constexpr int kBits = 8;
  static constexpr bool kSigned = true;

  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t) {
    static_assert(!kStochastic);
    return signed_code(search(kDynamic8Values, p), kBits);
  }
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t*) {
    static_assert(!kStochastic);
    const Ints first = broadcast_bits(Dynamic8Bins::kFirst << Dynamic8Bins::kShift);
    const Ints last = bits_as<Ints>(broadcast(1.0f)) - 1;
    const Ints bits = smaller(larger(magnitude_of(p), first), last);
    const Ints bin = (bits >> Dynamic8Bins::kShift) - Dynamic8Bins::kFirst;
    const Ints entry = look_up(kDynamic8Bins.entry, bin);
    const Ints negative = bits_as<Ints>(p) < 0;
    // A tie goes to the lower value, so to the larger magnitude on the negative side.
    const Ints rest =
        (bits & ((1 << Dynamic8Bins::kShift) - 1)) + ((entry >> 23) & negative & 1);
    const Ints k = (entry >> 24) - (rest > (entry & ((1 << 23) - 1)));
    return negative ? smaller(k, Ints{} + 127) : -k;
  }

  template <class C>
  COMMKERN_MEMBER static C decode(int32_t code) {
    return kDynamic8Values.template value<C>(code & 255);
  }
  COMMKERN_MEMBER static Floats decode_lanes(Ints code) {
    const Ints k = code < 0 ? -code : code;
    const Ints within = look_up(kDynamic8Magnitudes.bits, k & 127);
    const Ints magnitude = code == -128 ? bits_as<Ints>(broadcast(1.0f)) : within;
    return bits_as<Floats>(magnitude |
                           (-code & broadcast_bits(FloatBits<float>::kSign)));
  }
};

COMMKERN_END_ISA
