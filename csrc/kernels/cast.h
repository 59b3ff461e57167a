// Casts: elements travel as `wire_dtype`, sums are taken in the compute type.
// With wire_dtype == dtype this is the identity.
//
// Body of one span: span.length elements of wire_dtype, dense.
// C is the compute type of `dtype` (fp64 for fp64 data, else fp32). Conversions round
// to nearest, ties to even; overflow gives Inf, NaN becomes the canonical quiet NaN
// with the sign kept (fp16 0x7e00, bf16 0x7fc0), denormals are kept.
#pragma once

#include "core/types.h"

namespace commkern {

// a = x, or C(x) + residual; w = wire(a); residual = float(a - C(w)), or the old
// residual where that is not finite.
struct CastArgs {
  SpanTable spans;
  ConstBytes input;  // `dtype` elements
  DType dtype = DType::kFloat32;
  MutableBytes payload;
  DType wire_dtype = DType::kFloat32;
  Residual residual;
};

// y = T(C(w) * scale); uncast_add: y = T(C(y) + C(w) * scale).
// nonfinite[row] (one byte a span, may be null) becomes 1 where a y is not finite.
struct UncastArgs {
  SpanTable spans;
  ConstBytes payload;
  DType wire_dtype = DType::kFloat32;
  MutableBytes output;  // `dtype` elements
  DType dtype = DType::kFloat32;
  double scale = 1.0;
  MutableBytes nonfinite;
};

// The owner's step: acc = C(part 0), then acc += C(part r) in rank order;
// w = wire(acc * wire_scale); the residual version that this step writes gains
// float((acc * wire_scale - C(w)) / wire_scale) where w and the sum are finite.
// wire_scale is a power of two at most 1: it keeps an fp16 sum in range (uncast then
// multiplies by 1 / wire_scale).
struct RecastSumArgs {
  SpanTable spans;
  Parts parts;
  DType dtype = DType::kFloat32;  // of the data: chooses the compute type
  MutableBytes payload;
  DType wire_dtype = DType::kFloat32;
  Residual residual;
  double wire_scale = 1.0;
};

constexpr int64_t cast_body_nbytes(int64_t length, DType wire_dtype) {
  return length * dtype_nbytes(wire_dtype);
}

template <class Visitor>
void visit_fields(CastArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("wire_dtype", a.wire_dtype);
  field("residual", a.residual);
}

template <class Visitor>
void visit_fields(UncastArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("payload", a.payload);
  field("wire_dtype", a.wire_dtype);
  field("output", a.output);
  field("dtype", a.dtype);
  field("scale", a.scale);
  field("nonfinite", a.nonfinite);
}

template <class Visitor>
void visit_fields(RecastSumArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("parts", a.parts);
  field("dtype", a.dtype);
  field("payload", a.payload);
  field("wire_dtype", a.wire_dtype);
  field("residual", a.residual);
  field("wire_scale", a.wire_scale);
}

void check(const CastArgs& args);
void check(const UncastArgs& args);
void check(const RecastSumArgs& args);

}  // namespace commkern
