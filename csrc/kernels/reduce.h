// Sums over ranks of dense data, and per-span facts about dense data.
#pragma once

#include "core/types.h"

namespace commkern {

// output = T(scale * acc) with acc = C(part 0), then acc += C(part r) in rank order.
// Parts and output are indexed by span.offset. scale = 1 / ranks gives the average.
// nonfinite[row] (one byte a span, may be null) becomes 1 where a value written is not
// finite.
struct SumArgs {
  SpanTable spans;
  Parts parts;  // `dtype` elements each
  MutableBytes output;
  DType dtype = DType::kFloat32;
  double scale = 1.0;
  MutableBytes nonfinite;
};

// output[row] = max |x| over the span, as the compute type; integer max over the bits
// with the sign cleared, so any NaN gives a NaN and an empty span gives 0.
struct AbsmaxArgs {
  SpanTable spans;
  ConstBytes input;
  DType dtype = DType::kFloat32;
  MutableBytes output;  // fp32 (fp64 for fp64 data), one a row
};

// flags[row] (one byte a span) becomes 1 where the span holds what is looked for, and
// is left alone elsewhere. nonfinite_check: a NaN or an Inf. nonzero_check: anything
// but +0 and -0 (stops at the first).
struct FlagArgs {
  SpanTable spans;
  ConstBytes input;
  DType dtype = DType::kFloat32;
  MutableBytes flags;
};

// In place: NaN becomes 0, anything above `limit` (>= 0) in magnitude +-T(limit).
struct SaturateArgs {
  SpanTable spans;
  MutableBytes data;
  DType dtype = DType::kFloat32;
  double limit = 0.0;
};

template <class Visitor>
void visit_fields(SumArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("parts", a.parts);
  field("output", a.output);
  field("dtype", a.dtype);
  field("scale", a.scale);
  field("nonfinite", a.nonfinite);
}

template <class Visitor>
void visit_fields(AbsmaxArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("output", a.output);
}

template <class Visitor>
void visit_fields(FlagArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("dtype", a.dtype);
  field("flags", a.flags);
}

template <class Visitor>
void visit_fields(SaturateArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("data", a.data);
  field("dtype", a.dtype);
  field("limit", a.limit);
}

void check(const SumArgs& args);
void check(const AbsmaxArgs& args);
void check(const FlagArgs& args);
void check(const SaturateArgs& args);

}  // namespace commkern
