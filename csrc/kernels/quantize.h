// Block quantisation: symmetric, absmax-scaled, dense codes of `bits` bits.
//
// Body of one span (payload + span.body), n = span.length, B = block_size:
//   scales  ceil(n / B) values of the compute type (fp32; fp64 for fp64 data)
//   codes   n two's-complement codes of `bits` bits, consecutive, little-endian bit
//           order (code j fills bits [j*bits, (j+1)*bits)); the last byte is padded
//           with zero bits. B is a multiple of 8, so every block starts on a byte.
//
// Per block, C the compute type, L = 2^(bits-1) - 1, every operation rounded once:
//   a      = x, or x + residual with error feedback
//   absmax = max |a| (as integers over the bits with the sign cleared)
//   s      = absmax / L; if L * s overflows, the next smaller number
//   r      = 1 / s                              where s >= 2^-100, else
//            1 / (s * 2^100), with a * 2^100 in the place of a (fp64: the same rule)
//   nearest     code = rint(a * r)              ties to even
//   stochastic  code = floor(a * r + u)         u = (byte + 0.5) / 256
//   code clamped to [-L, L]; s == 0 gives codes 0
//   residual = float(a - code * s), or the old residual where that is not finite (fp64)
// A code is an integer: code 0 decodes to +0. A block that holds NaN or Inf (in a) gets
// scale NaN (0x7fc00000, or 0x7ff8000000000000) and codes 0, and its new residual is
// its old residual.
//
// Random bytes: Philox-4x32-10, key = seed, counter = (draw, span.parameter_id, step,
// stream), draw = block * ceil(B / 16) + i / 16 modulo 2^32, where block counts from
// the start of the parameter and i is the element's index in its block; the element
// takes byte i % 16 of the draw's four little-endian words.
//
// span.begin is a multiple of block_size. A span ends at a block's end or at its
// parameter's end. Source: the block-wise scheme of QSGD and its successors.
#pragma once

#include "core/types.h"

namespace commkern {

struct QuantizeArgs {
  SpanTable spans;
  ConstBytes input;  // `dtype` elements
  DType dtype = DType::kFloat32;
  MutableBytes payload;
  Residual residual;
  int32_t bits = 8;
  int32_t block_size = 128;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t stream = 0;
};

// y = T(C(code * s) * scale); dequantize_add: y = T(y + C(code * s) * scale).
// nonfinite[row] (one byte a span, may be null) becomes 1 where a scale is not finite.
struct DequantizeArgs {
  SpanTable spans;
  ConstBytes payload;
  MutableBytes output;  // `dtype` elements
  DType dtype = DType::kFloat32;
  int32_t bits = 8;
  int32_t block_size = 128;
  double scale = 1.0;
  MutableBytes nonfinite;
};

// The owner's step of a two-shot all-reduce, one pass: sum the decoded parts in rank
// order (acc = part 0, then acc += part r), quantise the sum, and add the error
// float(acc - code * s) to the residual version that this step writes (the one that
// `quantize` just wrote), where the result is finite. Blocks whose sum is not finite
// leave the residual alone.
// Every part has the spans at the same byte offsets.
struct RequantizeSumArgs {
  SpanTable spans;
  Parts parts;
  DType dtype = DType::kFloat32;  // of the data: chooses the compute type
  MutableBytes payload;
  Residual residual;
  int32_t bits = 8;
  int32_t block_size = 128;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t stream = 0;
};

constexpr int64_t quantize_body_nbytes(int64_t length, int32_t bits, int32_t block_size,
                                       DType dtype) {
  return ceil_div(length, block_size) * compute_nbytes(dtype) +
         ceil_div(length * bits, 8);
}

template <class Visitor>
void visit_fields(QuantizeArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("residual", a.residual);
  field("bits", a.bits);
  field("block_size", a.block_size);
  field("rounding", a.rounding);
  field("seed", a.seed);
  field("step", a.step);
  field("stream", a.stream);
}

template <class Visitor>
void visit_fields(DequantizeArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("payload", a.payload);
  field("output", a.output);
  field("dtype", a.dtype);
  field("bits", a.bits);
  field("block_size", a.block_size);
  field("scale", a.scale);
  field("nonfinite", a.nonfinite);
}

template <class Visitor>
void visit_fields(RequantizeSumArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("parts", a.parts);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("residual", a.residual);
  field("bits", a.bits);
  field("block_size", a.block_size);
  field("rounding", a.rounding);
  field("seed", a.seed);
  field("step", a.step);
  field("stream", a.stream);
}

// Throw std::invalid_argument, both values in the text, before any byte is touched.
void check(const QuantizeArgs& args);
void check(const DequantizeArgs& args);
void check(const RequantizeSumArgs& args);

}  // namespace commkern
