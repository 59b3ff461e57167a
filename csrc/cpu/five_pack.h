// Ternary codes of a block to and from five a byte, as core/five_pack.h says.
#pragma once

#include "core/five_pack.h"
#include "cpu/simd.h"

COMMKERN_BEGIN_ISA

using Digits = uint8_t __attribute__((vector_size(4 * kLanes)));
inline constexpr int64_t kDigits = sizeof(Digits);

// Bytes behind a block's codes that packing takes for codes, and more that packing may
// read and unpacking write.
inline constexpr int64_t kFivePad = 8;
inline constexpr int64_t kFiveSlack = kDigits + kFivePad;

#if defined(__AVX512BW__)
COMMKERN_INLINE __mmask64 first_bytes(int64_t n) { return ~uint64_t{0} >> (64 - n); }
COMMKERN_INLINE Digits load_first(const uint8_t* in, int64_t n) {
  return bits_as<Digits>(_mm512_maskz_loadu_epi8(first_bytes(n), in));
}
COMMKERN_INLINE void store_first(uint8_t* out, Digits x, int64_t n) {
  _mm512_mask_storeu_epi8(out, first_bytes(n), bits_as<__m512i>(x));
}
#else
COMMKERN_INLINE Digits load_first(const uint8_t* in, int64_t n) {
  Digits x{};
  std::memcpy(&x, in, n);
  return x;
}
COMMKERN_INLINE void store_first(uint8_t* out, Digits x, int64_t n) {
  std::memcpy(out, &x, n);
}
#endif

// Of codes[0] on in every plane.
COMMKERN_INLINE Digits pack_digits(const uint8_t* codes, int64_t width) {
  Digits bytes{};
  for (int64_t plane = 4; plane >= 0; --plane) {
    const Digits code = load<Digits>(codes + plane * width, 0);
    const Digits digit = code < 2 ? code : Digits{} + 2;  // -1 is 255
    bytes = bytes + bytes + bytes + digit;
  }
  return bytes;
}

// Whole vectors, plane after plane: what one writes past its plane is the next one's.
COMMKERN_INLINE void unpack_digits(Digits rest, uint8_t* codes, int64_t width) {
  constexpr uint8_t kUnits[] = {1, 3, 9, 27, 81};
  const Digits no_code = bits_as<Digits>(rest >= 243);
  Digits planes[5];
  for (int plane = 4; plane >= 0; --plane) {
    const uint8_t unit = kUnits[plane];
    const Digits one = bits_as<Digits>(rest >= unit);
    const Digits two = bits_as<Digits>(rest >= static_cast<uint8_t>(2 * unit));
    rest -= (one & unit) + (two & unit);
    planes[plane] = two | (one & 1);
    if (plane == 4) {
      planes[plane] &= ~no_code;
      rest -= no_code & unit;
    }
  }
  for (int plane = 0; plane < 5; ++plane)
    store(codes + plane * width, 0, planes[plane]);
}

// The last vector overlaps the one before it.
template <class Fn>
COMMKERN_INLINE void for_digits(int64_t width, Fn fn) {
  for (int64_t j = 0; j + kDigits <= width; j += kDigits) fn(j);
  if (width % kDigits != 0) fn(width - kDigits);
}

// Before pack_five(), at any time that is not right before.
COMMKERN_INLINE void pad_five(uint8_t* codes, int64_t n) {
  std::memset(codes + n, 0, kFivePad);
}

COMMKERN_INLINE void pack_five(const uint8_t* codes, int64_t n, uint8_t* out) {
  const int64_t width = five_packed_nbytes(n);
  if (width < kDigits) return store_first(out, pack_digits(codes, width), width);
  for_digits(width,
             [&](int64_t j) { store(out + j, 0, pack_digits(codes + j, width)); });
}

// `codes` has room for n codes and kFiveSlack bytes.
COMMKERN_INLINE void unpack_five(const uint8_t* in, int64_t n, uint8_t* codes) {
  const int64_t width = five_packed_nbytes(n);
  if (width < kDigits) return unpack_digits(load_first(in, width), codes, width);
  for_digits(width, [&](int64_t j) {
    unpack_digits(load<Digits>(in + j, 0), codes + j, width);
  });
}

COMMKERN_END_ISA
