#include "kernels/reduce.h"

#include "core/check.h"

namespace commkern {

void check(const SumArgs& args) {
  check_dtype("dtype", args.dtype);
  check_spans(args.spans);
  check_parts(args.parts, [&](const char* name, const ConstBytes& part) {
    check_elements(name, part, args.spans, args.dtype);
  });
  check_elements("output", args.output, args.spans, args.dtype);
  if (args.nonfinite) check_rows("nonfinite", args.nonfinite, args.spans, 1);
}

void check(const AbsmaxArgs& args) {
  check_dtype("dtype", args.dtype);
  check_spans(args.spans);
  check_elements("input", args.input, args.spans, args.dtype);
  check_rows("output", args.output, args.spans, compute_nbytes(args.dtype));
}

void check(const FlagArgs& args) {
  check_dtype("dtype", args.dtype);
  check_spans(args.spans);
  check_elements("input", args.input, args.spans, args.dtype);
  check_rows("flags", args.flags, args.spans, 1);
}

void check(const SaturateArgs& args) {
  check_dtype("dtype", args.dtype);
  check_spans(args.spans);
  check_elements("data", args.data, args.spans, args.dtype);
  if (!(args.limit >= 0.0)) fail("limit: expected a number >= 0, got ", args.limit);
}

}  // namespace commkern
