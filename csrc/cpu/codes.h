// The codes of the quantiser family: what a value becomes once it is a position p, in
// units of its block's scale, and back. A code is a struct with
//   kBits, kSigned    how store_group and load_group hold it
//   kOffset           positions count from the block's offset
//   kFivePacked       its bytes go to memory five to a byte (five_pack.h)
//   encode            one position, any finite one, with the byte of its draw
//   encode_lanes      kLanes of them with kLanes bytes (not read where nearest)
//   kOfValue<kStochastic>   encoding looks at the value and its scale instead:
//                     encode_value, encode_value_lanes
//   decode, decode_lanes    the value of a code in units of the scale
// Those here have integers or powers of two for values; the others are in
// codes_float.h and codes_book.h.
#pragma once

#include "core/minifloat.h"
#include "core/philox.h"
#include "cpu/simd.h"

COMMKERN_BEGIN_ISA

struct CodeDefaults {
  static constexpr bool kOffset = false;
  static constexpr bool kFivePacked = false;
  template <bool kStochastic>
  static constexpr bool kOfValue = false;
};

// p rounded to an integer, as a C.
template <bool kStochastic, class C>
COMMKERN_INLINE C rounded(C p, uint32_t byte) {
  if constexpr (kStochastic) return __builtin_floor(p + rounding_offset<C>(byte));
  return __builtin_rint(p);
}

template <bool kStochastic>
COMMKERN_INLINE Ints rounded_lanes(Floats p, const uint8_t* bytes) {
  if constexpr (kStochastic) return round_down(p + rounding_offsets(bytes));
  return round_nearest(p);
}

template <class C>
COMMKERN_INLINE C clamped(C x, C low, C high) {
  return x < low ? low : (x > high ? high : x);
}

// `sign` where p is negative and the code >= 0 is not 0, else 0.
COMMKERN_INLINE Ints sign_of(Floats p, Ints code, int32_t sign) {
  return ((bits_as<Ints>(p) & -code) >> 31) & sign;
}

struct IntegerValues : CodeDefaults {
  template <class C>
  COMMKERN_MEMBER static C decode(int32_t code) {
    return static_cast<C>(code);
  }
  COMMKERN_MEMBER static Floats decode_lanes(Ints code) { return to_floats(code); }
};

template <int kWidth>
struct Symmetric : IntegerValues {
  static constexpr int kBits = kWidth;
  static constexpr bool kSigned = true;
  static constexpr int32_t kLargest = (1 << (kBits - 1)) - 1;

  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t byte) {
    const C limit = static_cast<C>(kLargest);
    return static_cast<int32_t>(clamped(rounded<kStochastic>(p, byte), -limit, limit));
  }
  // No code needs the clamp: |p| <= kLargest * (1 + 2^-20), as few roundings made it.
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t* bytes) {
    return rounded_lanes<kStochastic>(p, bytes);
  }
};

template <int kWidth>
struct Asymmetric : IntegerValues {
  static constexpr int kBits = kWidth;
  static constexpr bool kSigned = false;
  static constexpr bool kOffset = true;
  static constexpr int32_t kLargest = (1 << kBits) - 1;

  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t byte) {
    const C limit = static_cast<C>(kLargest);
    return static_cast<int32_t>(clamped(rounded<kStochastic>(p, byte), C(0), limit));
  }
  // The clamp comes first, which gives the same; as integers, in which numbers >= 0
  // keep their order and those below are negative.
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t* bytes) {
    const Ints limit = bits_as<Ints>(broadcast(static_cast<float>(kLargest)));
    const Ints within = smaller(larger(bits_as<Ints>(p), Ints{}), limit);
    return rounded_lanes<kStochastic>(bits_as<Floats>(within), bytes);
  }
};

// 0 is +1, 1 is -1. Nearest takes the sign of the value: a tiny one may have position
// 0.
struct Sign : CodeDefaults {
  static constexpr int kBits = 1;
  static constexpr bool kSigned = false;
  template <bool kStochastic>
  static constexpr bool kOfValue = !kStochastic;

  template <class C>
  COMMKERN_MEMBER static int32_t encode_value(C a, C) {
    return a < 0 ? 1 : 0;
  }
  COMMKERN_MEMBER static Ints encode_value_lanes(Floats a, Floats) {
    return (a < 0.0f) & 1;
  }
  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t byte) {
    static_assert(kStochastic);
    return p + (C(2) * rounding_offset<C>(byte) - C(1)) < 0 ? 1 : 0;
  }
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t* bytes) {
    static_assert(kStochastic);
    return (p + (rounding_offsets(bytes) * 2.0f - 1.0f) < 0.0f) & 1;
  }
  template <class C>
  COMMKERN_MEMBER static C decode(int32_t code) {
    return static_cast<C>(1 - 2 * code);
  }
  COMMKERN_MEMBER static Floats decode_lanes(Ints code) {
    return bits_as<Floats>(bits_as<Ints>(broadcast(1.0f)) | code << 31);
  }
};

// floor(p + u), of a u between 0 and 1, clamped to -1 ... 1.
struct Ternary : IntegerValues {
  static constexpr int kBits = 8;
  static constexpr bool kSigned = true;
  static constexpr bool kFivePacked = true;

  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t byte) {
    static_assert(kStochastic);
    const C moved = p + rounding_offset<C>(byte);
    return moved < 0 ? -1 : (moved >= 1 ? 1 : 0);
  }
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t* bytes) {
    static_assert(kStochastic);
    const Floats moved = p + rounding_offsets(bytes);
    return (moved < 0.0f) - (moved >= 1.0f);  // true is -1
  }
};

struct Threshold : IntegerValues {
  static constexpr int kBits = 2;
  static constexpr bool kSigned = true;
  template <bool kStochastic>
  static constexpr bool kOfValue = true;

  template <class C>
  COMMKERN_MEMBER static int32_t encode_value(C a, C scale) {
    return a >= scale ? 1 : (a <= -scale ? -1 : 0);
  }
  COMMKERN_MEMBER static Ints encode_value_lanes(Floats a, Floats scale) {
    return (a <= -scale) - (a >= scale);
  }
};

// Powers of two: a sign bit on top and a level k = 0 ... kTop; 0 is 0, k is 2^(k -
// kTop).
template <int kWidth>
struct Natural : CodeDefaults {
  static constexpr int kBits = kWidth;
  static constexpr bool kSigned = false;
  static constexpr int32_t kTop = (1 << (kBits - 1)) - 1;
  static constexpr int32_t kSignCode = 1 << (kBits - 1);

  // Random bits added below the exponent carry into it as often as they should.
  template <bool kStochastic, class C>
  COMMKERN_MEMBER static int32_t encode(C p, uint32_t byte) {
    static_assert(kStochastic);
    using Bits = BitsOf<C>;
    constexpr int kM = kMantissaBitsOf<C>;
    const Bits one = bits_as<Bits>(C(1));
    const Bits smallest = bits_as<Bits>(power_of_two<C>(1 - kTop));
    const Bits all = magnitude_bits(p);
    const Bits y = all > one ? one : all;
    const Bits moved = y + (Bits{2 * byte + 1} << (kM - 9));
    int32_t level = static_cast<int32_t>(moved >> kM) - kBiasOf<C> + kTop;
    if (y < smallest) {
      const C lifted = bits_as<C>(y) * power_of_two<C>(kTop - 1);
      level = lifted + rounding_offset<C>(byte) >= 1 ? 1 : 0;
    }
    return p < 0 && level > 0 ? level | kSignCode : level;
  }
  template <bool kStochastic>
  COMMKERN_MEMBER static Ints encode_lanes(Floats p, const uint8_t* bytes) {
    static_assert(kStochastic);
    const Ints y = clipped_magnitude(p, 1.0f);
    const Ints moved = y + ((widen_bytes(bytes) << 15) | (1 << 14));
    const Ints normal = (moved >> 23) + (kTop - 127);
    Ints level = normal;
    if constexpr (kTop < 127) {  // 2^(1 - kTop) is not the smallest normal number
      const Floats lifted = bits_as<Floats>(y) * power_of_two<float>(kTop - 1);
      const Ints lowest = (lifted + rounding_offsets(bytes) >= 1.0f) & 1;
      const Ints smallest = bits_as<Ints>(broadcast(power_of_two<float>(1 - kTop)));
      level = y < smallest ? lowest : normal;
    }
    return level | sign_of(p, level, kSignCode);
  }
  template <class C>
  COMMKERN_MEMBER static C decode(int32_t code) {
    const int32_t level = code & kTop;
    if (level == 0) return 0;
    const C value = power_of_two<C>(level - kTop);
    return code == level ? value : -value;
  }
  COMMKERN_MEMBER static Floats decode_lanes(Ints code) {
    const Ints level = code & kTop;
    const Ints magnitude = (level + (127 - kTop)) << 23;
    return bits_as<Floats>((magnitude | (code >> (kBits - 1)) << 31) & (level > 0));
  }
};

COMMKERN_END_ISA
