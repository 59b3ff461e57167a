// What variants of error feedback do beside the coding: each visits the residual once
// more, in a step of its own, so that the kernels that code stay as they are.
//
// r' is the residual version that the running step writes, here behind the kernel that
// wrote it; the committed version is only read, and only by `accumulate`. Every
// operation is rounded once; an element whose result is not finite stays as it was.
#pragma once

#include "core/types.h"

namespace commkern {

// residual_subtract: r' = float(C(r') - C(x)). After a coding of u = x + r, which left
// r' = u - C(u), that makes r' = r - C(u).
struct ResidualSubtractArgs {
  SpanTable spans;
  ConstBytes input;  // `dtype` elements
  DType dtype = DType::kFloat32;
  Residual residual;
};

// residual_scale: r' = r' * float(factor).
struct ResidualScaleArgs {
  SpanTable spans;
  Residual residual;
  double factor = 1.0;
};

// accumulate: for a running sum w that is kept in two versions like a residual,
// s = C(w) + x, y = T(s), w' = float(s), or w where that is not finite.
// nonfinite[row] (one byte a span, may be null) becomes 1 where a y is not finite.
struct AccumulateArgs {
  SpanTable spans;
  ConstBytes input;     // elements of the compute type, may be `output`
  MutableBytes output;  // `dtype` elements
  DType dtype = DType::kFloat32;
  Residual residual;
  MutableBytes nonfinite;
};

template <class Visitor>
void visit_fields(ResidualSubtractArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("residual", a.residual);
}

template <class Visitor>
void visit_fields(ResidualScaleArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("residual", a.residual);
  field("factor", a.factor);
}

template <class Visitor>
void visit_fields(AccumulateArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("output", a.output);
  field("dtype", a.dtype);
  field("residual", a.residual);
  field("nonfinite", a.nonfinite);
}

void check(const ResidualSubtractArgs& args);
void check(const ResidualScaleArgs& args);
void check(const AccumulateArgs& args);

}  // namespace commkern
