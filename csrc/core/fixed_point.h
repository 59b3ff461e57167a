// Scalars of block fixed point, for host and device: what an agreed exponent means.
#pragma once

#include "core/numerics.h"
#include "core/types.h"

namespace commkern {

template <class C>
struct ExponentOf;
template <>
struct ExponentOf<float> {
  using Stored = uint8_t;
  static constexpr int32_t kFractionBits = 23, kBias = 127, kSpecial = 255;
};
template <>
struct ExponentOf<double> {
  using Stored = uint16_t;
  static constexpr int32_t kFractionBits = 52, kBias = 1023, kSpecial = 2047;
};
// How an exponent travels.
template <class C>
using StoredExponent = typename ExponentOf<C>::Stored;

// 2^exponent, any number of C, denormals included.
template <class C>
COMMKERN_HD C any_power_of_two(int32_t exponent) {
  using E = ExponentOf<C>;
  const int32_t biased = exponent + E::kBias;
  if (biased > 0) {
    return bits_as<C>(static_cast<BitsOf<C>>(BitsOf<C>(biased) << E::kFractionBits));
  }
  return bits_as<C>(
      static_cast<BitsOf<C>>(BitsOf<C>{1} << (E::kFractionBits - 1 + biased)));
}

// The largest number of C that is at most `whole`.
template <class C>
COMMKERN_HD C at_most(int32_t whole) {
  const C nearest = static_cast<C>(whole);
  const bool above = static_cast<int64_t>(nearest) > whole;
  return bits_as<C>(static_cast<BitsOf<C>>(bits_as<BitsOf<C>>(nearest) - above));
}

// The biased exponent of the largest finite T, in T's compute type.
template <class T>
constexpr int32_t kTopExponent = ExponentOf<ComputeOf<T>>::kSpecial - 1;
template <>
constexpr int32_t kTopExponent<Half> = 142;

// Numbers of one block: 0 <= |a| < 2^e, scale 2^(e - digits).
template <class C>
struct FixedScale {
  C scale;       // what a code is multiplied by; NaN for a block that is not finite
  C reciprocal;  // of scale * lift
  C lift;        // 1, or 2^100 where 1 / scale would overflow
  C limit;       // of the codes
  bool finite;
};

// For elements T. `exponent` is the biased one, `digits` 1 ... 31.
template <class T>
COMMKERN_HD FixedScale<ComputeOf<T>> fixed_scale(int32_t exponent, int32_t digits,
                                                 int32_t largest) {
  using C = ComputeOf<T>;
  using E = ExponentOf<C>;
  if (exponent >= E::kSpecial) {
    return {bits_as<C>(FloatBits<C>::kNan), C(0), C(1), C(0), false};
  }
  constexpr int32_t kSmallest = 1 - E::kBias - E::kFractionBits;
  int32_t power = exponent + 1 - E::kBias - digits;
  power = power < kSmallest ? kSmallest : power;
  if (exponent == kTopExponent<T>) {  // 2^digits times the scale is no T
    const int32_t below = static_cast<int32_t>((uint32_t{1} << digits) - 1);
    largest = below < largest ? below : largest;
  }
  const bool lifted = power < -100;
  return {any_power_of_two<C>(power),
          any_power_of_two<C>(lifted ? -100 - power : -power),
          lifted ? C(0x1p100) : C(1), at_most<C>(largest), true};
}

}  // namespace commkern
