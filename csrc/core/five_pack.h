// Codes -1, 0, 1 five to a byte: a block of n has w = ceil(n / 5) bytes, and byte j
// holds codes j, j + w, ..., j + 4w as digits of base 3, the first the smallest.
#pragma once

#include "core/numerics.h"

namespace commkern {

COMMKERN_HD int64_t five_packed_nbytes(int64_t count) { return (count + 4) / 5; }

// Digit 3, of a byte past 242, is no code: 0.
COMMKERN_HD int8_t ternary_code(uint32_t digit) {
  return static_cast<int8_t>(digit == 2 ? -1 : (digit == 1 ? 1 : 0));
}

// The code of plane 0 ... 4 in a byte, the planes being the digits.
COMMKERN_HD int8_t five_packed_code(uint32_t byte, int32_t plane) {
  for (int32_t k = 0; k < plane; ++k) byte /= 3;
  return ternary_code(plane < 4 ? byte % 3 : byte);
}

}  // namespace commkern
