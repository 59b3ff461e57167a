// Scalars of the number formats, for host and device: every conversion rounds once, to
// nearest with ties to even, denormals included, whatever the hardware offers.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define COMMKERN_HD static __host__ __device__ __forceinline__
#else
#define COMMKERN_HD static inline __attribute__((always_inline))
#endif

// True in code that a GPU runs, and where tests put themselves in its place.
#if !defined(COMMKERN_DEVICE_CODE)
#if defined(__CUDA_ARCH__)
#define COMMKERN_DEVICE_CODE true
#else
#define COMMKERN_DEVICE_CODE false
#endif
#endif

namespace commkern {

// Storage of 16-bit elements; arithmetic happens in fp32.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <class T>
struct FormatOf {
  using Compute = float;
  using Bits = uint32_t;
};
template <>
struct FormatOf<double> {
  using Compute = double;
  using Bits = uint64_t;
};
// The type that arithmetic on T happens in, and the unsigned integer of that size.
template <class T>
using ComputeOf = typename FormatOf<T>::Compute;
template <class T>
using BitsOf = typename FormatOf<T>::Bits;

template <class To, class From>
COMMKERN_HD To bits_as(From value) {
  return __builtin_bit_cast(To, value);
}

template <class C>
struct FloatBits;
template <>
struct FloatBits<float> {
  static constexpr uint32_t kSign = 0x80000000u, kInf = 0x7f800000u, kNan = 0x7fc00000u;
};
template <>
struct FloatBits<double> {
  static constexpr uint64_t kSign = 0x8000000000000000u, kInf = 0x7ff0000000000000u,
                            kNan = 0x7ff8000000000000u;
};

// The bits with the sign cleared: ordered as magnitudes, NaN above Inf.
template <class C>
COMMKERN_HD BitsOf<C> magnitude_bits(C x) {
  return bits_as<BitsOf<C>>(x) & ~FloatBits<C>::kSign;
}

template <class C>
COMMKERN_HD bool is_finite(C x) {
  return magnitude_bits(x) < FloatBits<C>::kInf;
}

COMMKERN_HD float half_to_float(Half h) {
  const uint32_t magnitude = h.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t shifted = magnitude << 13;
  const uint32_t normal = shifted + (112u << 23);
  const float denormal = bits_as<float>(shifted + (113u << 23)) - 0x1p-14f;
  const uint32_t special =
      shifted | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0);
  uint32_t out = magnitude < 0x400u ? bits_as<uint32_t>(denormal) : normal;
  out = magnitude >= 0x7c00u ? special : out;
  return bits_as<float>(out | sign);
}

COMMKERN_HD Half float_to_half(float x) {
  const uint32_t magnitude = magnitude_bits(x);
  const uint32_t sign = (bits_as<uint32_t>(x) >> 16) & 0x8000u;
  const uint32_t normal =
      (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The unit in the last place of 0.5 is the smallest fp16 denormal.
  const float shifted = bits_as<float>(magnitude) + 0.5f;
  const uint32_t denormal = bits_as<uint32_t>(shifted) - 0x3f000000u;
  uint32_t out = magnitude < 0x38800000u ? denormal : normal;
  out = magnitude >= 0x477ff000u ? 0x7c00u : out;
  out = magnitude > 0x7f800000u ? 0x7e00u : out;
  return Half{static_cast<uint16_t>(out | sign)};
}

COMMKERN_HD float bfloat16_to_float(BFloat16 b) {
  return bits_as<float>(static_cast<uint32_t>(b.bits) << 16);
}

COMMKERN_HD BFloat16 float_to_bfloat16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
  const bool is_nan = magnitude_bits(x) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(is_nan ? nan : rounded)};
}

// What x86 and Arm make of a NaN: quiet, with its sign and upper payload bits.
COMMKERN_HD float narrow_nan(double x) {
  const uint64_t bits = bits_as<uint64_t>(x);
  const uint32_t sign = static_cast<uint32_t>(bits >> 32) & 0x80000000u;
  const uint32_t payload = static_cast<uint32_t>(bits >> 29) & 0x003fffffu;
  return bits_as<float>(sign | FloatBits<float>::kNan | payload);
}

COMMKERN_HD double widen_nan(float x) {
  const uint64_t bits = bits_as<uint32_t>(x);
  const uint64_t sign = (bits & 0x80000000u) << 32;
  const uint64_t payload = (bits & 0x003fffffu) << 29;
  return bits_as<double>(sign | FloatBits<double>::kNan | payload);
}

// A GPU's own conversions make every NaN the same one.
COMMKERN_HD float to_float(double x) {
  if (COMMKERN_DEVICE_CODE && x != x) return narrow_nan(x);
  return static_cast<float>(x);
}

COMMKERN_HD double to_double(float x) {
  if (COMMKERN_DEVICE_CODE && x != x) return widen_nan(x);
  return static_cast<double>(x);
}

// Round to odd, so that a second rounding to 16 bits gives what one would have given.
// The error of an Inf is NaN: it stays as it is.
COMMKERN_HD float narrow_to_odd(double x) {
  const float nearest = to_float(x);
  const double error = x - static_cast<double>(nearest);
  const uint32_t bits = bits_as<uint32_t>(nearest);
  const bool away = (error > 0) == (x > 0);
  const bool adjust = error != 0 && error == error && (bits & 1u) == 0;
  return bits_as<float>(adjust ? (away ? bits + 1 : bits - 1) : bits);
}

template <class To, class From>
COMMKERN_HD To convert(From x) {
  if constexpr (is_same<To, From>) {
    return x;
  } else if constexpr (is_same<From, Half>) {
    return convert<To>(half_to_float(x));
  } else if constexpr (is_same<From, BFloat16>) {
    return convert<To>(bfloat16_to_float(x));
  } else if constexpr (is_same<To, Half> || is_same<To, BFloat16>) {
    float narrow;
    if constexpr (is_same<From, double>) {
      narrow = narrow_to_odd(x);
    } else {
      narrow = x;
    }
    if constexpr (is_same<To, Half>) {
      return float_to_half(narrow);
    } else {
      return float_to_bfloat16(narrow);
    }
  } else if constexpr (is_same<From, double> && is_same<To, float>) {
    return to_float(x);
  } else if constexpr (is_same<From, float> && is_same<To, double>) {
    return to_double(x);
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace commkern
