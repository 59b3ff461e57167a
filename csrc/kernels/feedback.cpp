#include "kernels/feedback.h"

#include <cmath>

#include "core/check.h"

namespace commkern {
namespace {

// These kernels have nothing to do without one.
void check_present(const Residual& residual, const SpanTable& spans) {
  check_residual(residual, spans);
  if (!residual && spans.count > 0) fail("residual: expected two versions, got none");
}

}  // namespace

void check(const ResidualSubtractArgs& args) {
  check_dtype("dtype", args.dtype);
  check_spans(args.spans);
  check_elements("input", args.input, args.spans, args.dtype);
  check_present(args.residual, args.spans);
}

void check(const ResidualScaleArgs& args) {
  check_spans(args.spans);
  check_present(args.residual, args.spans);
  if (!std::isfinite(args.factor)) {
    fail("factor: expected a finite number, got ", args.factor);
  }
}

void check(const AccumulateArgs& args) {
  check_dtype("dtype", args.dtype);
  check_spans(args.spans);
  const bool wide = args.dtype == DType::kFloat64;
  check_elements("input", args.input, args.spans,
                 wide ? DType::kFloat64 : DType::kFloat32);
  check_elements("output", args.output, args.spans, args.dtype);
  check_present(args.residual, args.spans);
  if (args.nonfinite) check_rows("nonfinite", args.nonfinite, args.spans, 1);
}

}  // namespace commkern
