// Floats of 4 to 8 bits (OCP 8-bit and Microscaling formats) and the stored forms of
// scales, for host and device. Encoding rounds once, from the compute type.
#pragma once

#include "core/numerics.h"

namespace commkern {

// Sign on top, then kExponentBits, then kMantissaBits; denormals count.
template <int kExponent, int kMantissa, uint32_t kLargest, bool kSpecial>
struct MinifloatFormat {
  static constexpr int kExponentBits = kExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;      // of the smallest normal
  static constexpr uint32_t kLargestCode = kLargest;  // of the largest number
  static constexpr uint32_t kSignCode = 1u << (kBits - 1);
  static constexpr bool kHasSpecials = kSpecial;  // codes past the largest: NaN or Inf
  static constexpr int kMaxExponent = static_cast<int>(kLargest >> kMantissa) - kBias;
  static constexpr float kLargestNumber =
      static_cast<float>((kLargest & ((1u << kMantissa) - 1)) | (1u << kMantissa)) *
      (kMaxExponent < kMantissa
           ? 1.0f / static_cast<float>(1 << (kMantissa - kMaxExponent))
           : static_cast<float>(1 << (kMaxExponent - kMantissa)));
};
using Float8E4M3 = MinifloatFormat<4, 3, 0x7e, true>;   // 448
using Float8E5M2 = MinifloatFormat<5, 2, 0x7b, true>;   // 57344
using Float6E3M2 = MinifloatFormat<3, 2, 0x1f, false>;  // 28
using Float6E2M3 = MinifloatFormat<2, 3, 0x1f, false>;  // 7.5
using Float4E2M1 = MinifloatFormat<2, 1, 0x07, false>;  // 6

// Exponent field of a compute type.
template <class C>
constexpr int kMantissaBitsOf = is_same<C, double> ? 52 : 23;
template <class C>
constexpr int kBiasOf = is_same<C, double> ? 1023 : 127;

// 2^exponent, for exponents of normal numbers.
template <class C>
COMMKERN_HD C power_of_two(int exponent) {
  return bits_as<C>(static_cast<BitsOf<C>>(exponent + kBiasOf<C>)
                    << kMantissaBitsOf<C>);
}

// To nearest, ties to even, saturating; a negative number that rounds to 0 gets code 0.
// Adding a power of two whose unit in the last place is the format's does the rounding.
template <class Format, class C>
COMMKERN_HD uint32_t minifloat_code(C x) {
  using Bits = BitsOf<C>;
  constexpr int kM = kMantissaBitsOf<C>;
  const Bits largest = bits_as<Bits>(static_cast<C>(Format::kLargestNumber));
  const Bits smallest = bits_as<Bits>(power_of_two<C>(Format::kMinExponent));
  const Bits all = magnitude_bits(x);
  const Bits bits = all > largest ? largest : all;
  const Bits binade = bits & FloatBits<C>::kInf;
  const Bits exponent = binade < smallest ? smallest : binade;
  const Bits magic = exponent + (Bits{kM - Format::kMantissaBits} << kM);
  const Bits units = bits_as<Bits>(bits_as<C>(bits) + bits_as<C>(magic)) - magic;
  const uint32_t code = static_cast<uint32_t>(
      units + ((exponent - smallest) >> (kM - Format::kMantissaBits)));
  return x < 0 && code != 0 ? code | Format::kSignCode : code;
}

template <class Format>
COMMKERN_HD float minifloat_value(uint32_t code) {
  constexpr uint32_t kHidden = 1u << Format::kMantissaBits;
  const uint32_t magnitude = code & (Format::kSignCode - 1);
  const uint32_t mantissa = magnitude & (kHidden - 1);
  const int exponent = static_cast<int>(magnitude >> Format::kMantissaBits);
  const bool normal = exponent > 0;
  const float unit = power_of_two<float>((normal ? exponent - 1 : 0) +
                                         Format::kMinExponent - Format::kMantissaBits);
  float value = static_cast<float>(normal ? mantissa | kHidden : mantissa) * unit;
  if (Format::kHasSpecials && magnitude > Format::kLargestCode) {
    const bool inf = Format::kExponentBits == 5 && mantissa == 0;
    value = bits_as<float>(inf ? FloatBits<float>::kInf : FloatBits<float>::kNan);
  }
  return (code & Format::kSignCode) != 0 ? -value : value;
}

// ---- directed rounding to 16 bits; x is finite, the result too ----

template <class Narrow>
constexpr uint16_t kLargestBits = is_same<Narrow, Half> ? 0x7bff : 0x7f7f;

// The next number up, or down, from finite `x`; -0 counts as 0.
template <class Narrow>
COMMKERN_HD Narrow neighbour(Narrow x, bool up) {
  const uint16_t magnitude = x.bits & 0x7fffu;
  if (magnitude == 0) return Narrow{static_cast<uint16_t>(up ? 0x0001 : 0x8001)};
  const bool away = ((x.bits & 0x8000u) == 0) == up;
  return Narrow{static_cast<uint16_t>(away ? x.bits + 1 : x.bits - 1)};
}

// The smallest number >= x (up), or the largest <= x; past the largest finite number of
// either sign, that.
template <class Narrow, class C>
COMMKERN_HD Narrow narrow_toward(C x, bool up) {
  constexpr uint16_t kLargest = kLargestBits<Narrow>;
  const C largest = convert<C>(Narrow{kLargest});
  if (x >= largest) return Narrow{kLargest};
  if (x <= -largest) return Narrow{static_cast<uint16_t>(kLargest | 0x8000u)};
  const Narrow nearest = convert<Narrow>(x);
  const C value = convert<C>(nearest);
  return (up ? value < x : value > x) ? neighbour(nearest, up) : nearest;
}

// ---- e8m0: byte b is 2^(b - 127), 255 is NaN ----

inline constexpr uint8_t kE8M0Nan = 255;

COMMKERN_HD uint8_t clip_e8m0(int exponent) {
  const int byte = exponent + 127;
  return static_cast<uint8_t>(byte < 0 ? 0 : (byte > 254 ? 254 : byte));
}

// floor(log2 x) of a finite x >= 0; below -1022 it reads -1023.
template <class C>
COMMKERN_HD int floor_log2(C x) {
  return static_cast<int>(bits_as<uint64_t>(static_cast<double>(x)) >> 52) - 1023;
}

// The smallest power of two >= x > 0, in [2^-127, 2^127].
template <class C>
COMMKERN_HD uint8_t e8m0_at_least(C x) {
  const uint64_t bits = bits_as<uint64_t>(static_cast<double>(x));
  return clip_e8m0(static_cast<int>((bits + ((uint64_t{1} << 52) - 1)) >> 52) - 1023);
}

// OCP's rule: the exponent of the largest magnitude less the format's largest exponent.
template <class C>
COMMKERN_HD uint8_t e8m0_of_absmax(C absmax, int max_exponent) {
  return clip_e8m0(floor_log2(absmax) - max_exponent);
}

template <class C>
COMMKERN_HD C e8m0_value(uint8_t byte) {
  if (byte == kE8M0Nan) return bits_as<C>(FloatBits<C>::kNan);
  if (byte == 0) return C(0x1p-127);
  return power_of_two<C>(byte - 127);
}

}  // namespace commkern
