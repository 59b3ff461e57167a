// Block fixed point: integers that all ranks scale alike, so that their sum is exact
// and the same in every order. Ranks first agree on an exponent for each block (the
// maximum of theirs), then sum codes.
//
// C is the compute type of `dtype` (fp64 for fp64 data, else fp32), n = span.length, B
// = block_size. Coded form of one span:
//   exponents  ceil(n / B) biased exponents of C, one byte each (two for fp64)
//   codes      n two's-complement integers of 8, 16 or 32 bits
// both little-endian and reduced one after the other: the exponents of stage 0 lie at
// span.body of that stage's payload; in stage 1 the codes lie at span.body, and the
// exponents that stage 0 agreed on at span.earlier.
//
// Per block, a = x, or x + residual with error feedback; every operation rounded once:
//   E    = exponent bits of max |a| (as integers over the bits with the sign cleared):
//          0 for zeros and denormals, K = 255 (fp64: 2047) where there is NaN or Inf
//   s    = 2^(E + 1 - bias - digits), at least the smallest denormal (bias: 127, 1023)
//   p    = a * (1 / s); where s < 2^-100: (a * 2^100) * (1 / (s * 2^100))
//   p    clamped to +-largest; where E is the exponent of the largest finite number of
//        `dtype` also to +-(2^digits - 1), so that no rounding up leads to Inf; a NaN
//        counts as the upper end
//   nearest     code = rint(p), ties to even
//   stochastic  f = floor(p); code = f + ((p - f) + u >= 1 ? 1 : 0)
//   residual = float(a - code * s), or the old residual where that is not finite
// As |a| < 2^digits * s, only codes above 2^digits - 1 can meet the clamp. A block with
// E >= K gets codes 0, keeps its residual, and decodes to NaN.
//
// u = (byte + 0.5) / 256, bytes as in quantize.h: draw = block * ceil(B / 16) + i / 16.
// span.begin is a multiple of block_size. Source: SwitchML (Sapio et al., NSDI 2021).
#pragma once

#include "core/types.h"

namespace commkern {

// Stage 0: the exponents of every block of `input`.
struct BlockExponentsArgs {
  SpanTable spans;
  ConstBytes input;  // `dtype` elements
  DType dtype = DType::kFloat32;
  MutableBytes payload;
  Residual residual;  // read only
  int32_t block_size = 256;
};

// The owner's step of stage 0: the largest exponent of each block over the parts.
struct MaxExponentsArgs {
  SpanTable spans;
  Parts parts;
  DType dtype = DType::kFloat32;
  MutableBytes payload;
  int32_t block_size = 256;
};

// Stage 1: codes with the agreed exponents. The sum over ranks fits if largest is at
// most (2^(bits-1) - 1) / ranks.
struct FixedQuantizeArgs {
  SpanTable spans;
  ConstBytes input;  // `dtype` elements
  DType dtype = DType::kFloat32;
  ConstBytes exponents;  // at span.earlier
  MutableBytes payload;
  Residual residual;
  int32_t bits = 16;
  int32_t block_size = 256;
  int32_t digits = 15;      // 1 ... bits - 1
  int32_t largest = 32767;  // 1 ... 2^(bits-1) - 1
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t stream = 0;
};

// The owner's step of stage 1: codes added as integers, modulo 2^bits.
struct FixedSumArgs {
  SpanTable spans;
  Parts parts;
  MutableBytes payload;
  int32_t bits = 16;
};

// y = T((C(code) * scale) * s); fixed_dequantize_add: y = T(C(y) + (C(code) * scale) *
// s). nonfinite[row] (one byte a span, may be null) becomes 1 where a y is not finite.
struct FixedDequantizeArgs {
  SpanTable spans;
  ConstBytes payload;   // exponents at span.earlier, codes at span.body
  MutableBytes output;  // `dtype` elements
  DType dtype = DType::kFloat32;
  int32_t bits = 16;
  int32_t block_size = 256;
  int32_t digits = 15;
  double scale = 1.0;
  MutableBytes nonfinite;
};

constexpr int64_t exponent_nbytes(DType dtype) {
  return dtype == DType::kFloat64 ? 2 : 1;
}
constexpr int64_t exponents_nbytes(int64_t length, int32_t block_size, DType dtype) {
  return ceil_div(length, block_size) * exponent_nbytes(dtype);
}
constexpr int64_t fixed_codes_nbytes(int64_t length, int32_t bits) {
  return length * (bits / 8);
}

template <class Visitor>
void visit_fields(BlockExponentsArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("residual", a.residual);
  field("block_size", a.block_size);
}

template <class Visitor>
void visit_fields(MaxExponentsArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("parts", a.parts);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("block_size", a.block_size);
}

template <class Visitor>
void visit_fields(FixedQuantizeArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("exponents", a.exponents);
  field("payload", a.payload);
  field("residual", a.residual);
  field("bits", a.bits);
  field("block_size", a.block_size);
  field("digits", a.digits);
  field("largest", a.largest);
  field("rounding", a.rounding);
  field("seed", a.seed);
  field("step", a.step);
  field("stream", a.stream);
}

template <class Visitor>
void visit_fields(FixedSumArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("parts", a.parts);
  field("payload", a.payload);
  field("bits", a.bits);
}

template <class Visitor>
void visit_fields(FixedDequantizeArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("payload", a.payload);
  field("output", a.output);
  field("dtype", a.dtype);
  field("bits", a.bits);
  field("block_size", a.block_size);
  field("digits", a.digits);
  field("scale", a.scale);
  field("nonfinite", a.nonfinite);
}

void check(const BlockExponentsArgs& args);
void check(const MaxExponentsArgs& args);
void check(const FixedQuantizeArgs& args);
void check(const FixedSumArgs& args);
void check(const FixedDequantizeArgs& args);

}  // namespace commkern
