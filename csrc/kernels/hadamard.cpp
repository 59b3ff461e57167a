#include "kernels/hadamard.h"

#include "core/check.h"

namespace commkern {

void check(const HadamardArgs& args) {
  check_dtype("dtype", args.dtype);
  check_rotation(args.rotation);
  if (args.inverse < 0 || args.inverse > 1) {
    fail("inverse: expected 0 or 1, got ", args.inverse);
  }
  check_spans(args.spans);
  check_begins(args.spans, args.rotation, "rotation");
  check_elements("input", args.input, args.spans, args.dtype);
  check_elements("output", args.output, args.spans, args.dtype);
}

}  // namespace commkern
