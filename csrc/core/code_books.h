// Code books whose values follow no number format, for host and device. A stored code
// is the index in the sorted book, XORed with the index of 0: stored 0 means 0.
//
// Encoding takes the nearest value as real numbers, ties to the lower index: the number
// of exact midpoints below p. Midpoints of fp32 values are exact in fp64.
#pragma once

#include "core/numerics.h"

namespace commkern {

// ---- NF4 (Dettmers et al., "QLoRA", 2023): quantiles of the normal distribution ----

inline constexpr int32_t kNormalFloat4Zero = 7;

COMMKERN_HD constexpr float normal_float4_value(int32_t index) {
  switch (index) {
    case 0: return -1.0f;
    case 1: return -0.6961928009986877f;
    case 2: return -0.5250730514526367f;
    case 3: return -0.39491748809814453f;
    case 4: return -0.28444138169288635f;
    case 5: return -0.18477343022823334f;
    case 6: return -0.09105003625154495f;
    case 7: return 0.0f;
    case 8: return 0.07958029955625534f;
    case 9: return 0.16093020141124725f;
    case 10: return 0.24611230194568634f;
    case 11: return 0.33791524171829224f;
    case 12: return 0.44070982933044434f;
    case 13: return 0.5626170039176941f;
    case 14: return 0.7229568362236023f;
    default: return 1.0f;
  }
}

// ---- the signed dynamic map of 8 bits (Dettmers, "8-bit approximations for
// parallelism in deep learning", 2015; create_dynamic_map of bitsandbytes) ----
//
// Decade i = 0 ... 6 has 2^i magnitudes spread evenly over (0.1, 1) * 10^(i - 6).
// bitsandbytes makes them in fp32 with host-dependent last bits; here each is the exact
// value rounded once. Index 127 is 0, 127 + k the k-th positive value, 127 - k its
// negative, but for k = 128, the value 1, which has none.

inline constexpr int32_t kDynamic8Zero = 127;

COMMKERN_HD constexpr float dynamic8_magnitude(int32_t k) {
  if (k == 0) return 0.0f;
  if (k == 128) return 1.0f;
  int32_t items = 1;            // 2^i
  int32_t unit = 20 * 1000000;  // 20 * 10^(6 - i) * 2^i, exact in fp32
  while (2 * items <= k) {
    items *= 2;
    unit /= 5;
  }
  return static_cast<float>(2 * items + 18 * (k - items) + 9) /
         static_cast<float>(unit);
}

COMMKERN_HD constexpr float dynamic8_value(int32_t index) {
  return index < kDynamic8Zero ? -dynamic8_magnitude(kDynamic8Zero - index)
                               : dynamic8_magnitude(index - kDynamic8Zero);
}

// ---- any book ----

struct NormalFloat4Book {
  static constexpr int kBits = 4;
  static constexpr int32_t kZero = kNormalFloat4Zero;
  COMMKERN_HD constexpr float value(int32_t index) {
    return normal_float4_value(index);
  }
};
struct Dynamic8Book {
  static constexpr int kBits = 8;
  static constexpr int32_t kZero = kDynamic8Zero;
  COMMKERN_HD constexpr float value(int32_t index) { return dynamic8_value(index); }
};

// Halfway between the values of `index` and `index` + 1, exact.
template <class Book>
COMMKERN_HD constexpr double book_midpoint(int32_t index) {
  return (static_cast<double>(Book::value(index)) +
          static_cast<double>(Book::value(index + 1))) *
         0.5;
}

template <class Book, class C>
COMMKERN_HD constexpr int32_t book_index(C p) {
  int32_t index = 0;
  for (int32_t step = 1 << (Book::kBits - 1); step > 0; step /= 2) {
    const int32_t next = index + step;
    index = book_midpoint<Book>(next - 1) < static_cast<double>(p) ? next : index;
  }
  return index;
}

template <class Book, class C>
COMMKERN_HD constexpr int32_t book_code(C p) {
  return book_index<Book>(p) ^ Book::kZero;
}
template <class Book>
COMMKERN_HD constexpr float book_decoded(int32_t code) {
  return Book::value(code ^ Book::kZero);
}

}  // namespace commkern
