// Small floats as codes (core/minifloat.h), a vector at a time.
#pragma once

#include "cpu/codes.h"

COMMKERN_BEGIN_ISA

template <class Format>
struct Minifloat : CodeDefaults {
  static constexpr int kBits = Format::kBits;
  static constexpr bool kSigned = false;

  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t) {
    static_assert(!kStochastic);
    return static_cast<int32_t>(minifloat_code<Format>(p));
  }
  // As minifloat_code(), but that the power of two comes with an even number of units
  // which takes the smallest exponent off; bits above the code are not cleared.
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t*) {
    static_assert(!kStochastic);
    constexpr int kShift = 23 - Format::kMantissaBits;
    constexpr int32_t kSmallest = 127 + Format::kMinExponent;
    constexpr int32_t kMagic =
        (kShift << 23) + (1 << 23) - (kSmallest << Format::kMantissaBits);
    const Ints magnitude = clipped_magnitude(p, Format::kLargestNumber);
    const Ints exponent = larger(magnitude & broadcast_bits(FloatBits<float>::kInf),
                                 Ints{} + (kSmallest << 23));
    const Floats magic = bits_as<Floats>(exponent + kMagic);
    const Ints code =
        bits_as<Ints>(bits_as<Floats>(magnitude) + magic) + (exponent >> kShift);
    // Half the smallest denormal rounds to 0.
    const float least =
        power_of_two<float>(Format::kMinExponent - Format::kMantissaBits - 1);
    return code | ((p < -least) & static_cast<int32_t>(Format::kSignCode));
  }

  template <class C>
  COMMKERN_MEMBER static C decode(int32_t code) {
    return static_cast<C>(minifloat_value<Format>(static_cast<uint32_t>(code)));
  }
  COMMKERN_MEMBER static Floats decode_lanes(Ints code) {
    constexpr int kShift = 23 - Format::kMantissaBits;
    constexpr int32_t kOffset = (127 - Format::kBias) << 23;
    const Ints magnitude = code & static_cast<int32_t>(Format::kSignCode - 1);
    const Ints shifted = (magnitude << kShift) + kOffset;
    const Floats denormal = bits_as<Floats>(shifted + (1 << 23)) -
                            broadcast(power_of_two<float>(Format::kMinExponent));
    Ints out =
        magnitude < (1 << Format::kMantissaBits) ? bits_as<Ints>(denormal) : shifted;
    if constexpr (Format::kHasSpecials) {
      constexpr int32_t kLargest = Format::kLargestCode;
      const Ints nan = broadcast_bits(FloatBits<float>::kNan);
      const Ints inf = broadcast_bits(FloatBits<float>::kInf);
      if constexpr (Format::kExponentBits == 5) out = magnitude > kLargest ? inf : out;
      constexpr int32_t kLast = kLargest + (Format::kExponentBits == 5 ? 1 : 0);
      out = magnitude > kLast ? nan : out;
    }
    return bits_as<Floats>(out | (code >> (kBits - 1)) << 31);
  }
};

COMMKERN_END_ISA
