// Block quantisation: elements become codes of a few bits in units of their block's
// scale. core/format.h holds the formats; every operation is in the compute type C
// and rounded once.
//
//   a = x, or x + residual with error feedback; with rotation, the transform of that
//       (kernels/hadamard.h)
//   r = 1 / s where s >= 2^-100, else 1 / (s * 2^100), with a * 2^100 in the place of a
//       (fp64: the same rule); exact, without a lift, for e8m0 and ocp
//   p = a * r; asymmetric (a - offset) * r; of a halved block with a / 2 for a
//   u = (byte + 0.5) / 256
// and the code is
//   symmetric    rint(p), stochastic floor(p + u), clamped to [-L, L]
//   asymmetric   the same, clamped to [0, L]
//   sign         1 where a < 0; stochastic 1 where p + (2 u - 1) < 0
//   ternary      floor(p + u), clamped to [-1, 1]
//   threshold    1 where a >= s, -1 where a <= -s, else 0 (p rounds)
//   natural      |p|, at most 1, to one of the two powers of two around it: the byte is
//                added to its first eight bits of mantissa, half a unit behind them,
//                and a carry raises the exponent; below the least power of two, that
//                where |p| / least + u >= 1, else 0
//   floats       p to nearest, ties to even, saturating; -0 becomes 0
//   nf4, dynamic8  the nearest value, the lower one in a tie
// Decoded: v = value(code) * s, asymmetric value * s + offset, twice that where halved.
// residual = float(a - v), unrotated, or the old residual where that is not finite; and
// the old residual for a block (with span scales, a span) that is not finite.
//
// Random bytes: Philox-4x32-10, key = seed, counter = (draw, span.parameter_id, step,
// stream), draw = block * ceil(B / 16) + i / 16 modulo 2^32, where block counts from
// the start of the parameter and i is the element's index in its block; the element
// takes byte i % 16 of the draw's four little-endian words.
//
// span.begin is a multiple of block_size and rotation. A span ends at such a multiple
// or at its parameter's end. Sources: QSGD (Alistarh et al., 2017) and its successors;
// each compressor names its own.
#pragma once

#include "core/format.h"

namespace commkern {

struct QuantizeArgs {
  SpanTable spans;
  ConstBytes input;  // `dtype` elements
  DType dtype = DType::kFloat32;
  MutableBytes payload;
  Residual residual;
  Format format;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t stream = 0;
};

// y = T(v * scale); dequantize_add: y = T(y + v * scale).
// nonfinite[row] (one byte a span, may be null) becomes 1 where a scale is not finite,
// or a y that can overflow: of 16 bits, or behind a rotation.
// CUDA refuses rotations.
struct DequantizeArgs {
  SpanTable spans;
  ConstBytes payload;
  MutableBytes output;  // `dtype` elements
  DType dtype = DType::kFloat32;
  Format format;
  double scale = 1.0;
  MutableBytes nonfinite;
};

// The owner's step of a two-shot all-reduce, one pass: sum the decoded parts in rank
// order (acc = part 0, then acc += part r), quantise the sum, and add the error
// float(acc - v) to the residual version that this step writes (the one that `quantize`
// just wrote), where the result is finite. Blocks whose sum is not finite leave the
// residual alone. Rotated parts are summed as they are.
// Every part has the spans at the same byte offsets.
struct RequantizeSumArgs {
  SpanTable spans;
  Parts parts;
  DType dtype = DType::kFloat32;  // of the data: chooses the compute type
  MutableBytes payload;
  Residual residual;
  Format format;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t stream = 0;
};

template <class Visitor>
void visit_fields(QuantizeArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("residual", a.residual);
  visit_format(a.format, field);
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
  visit_format(a.format, field);
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
  visit_format(a.format, field);
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
