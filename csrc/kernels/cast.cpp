#include "kernels/cast.h"

#include <cmath>

#include "core/check.h"

namespace commkern {
namespace {

template <class Args>
auto check_format(const Args& args) {
  check_dtype("dtype", args.dtype);
  check_dtype("wire_dtype", args.wire_dtype);
  check_spans(args.spans);
  return [&args](int64_t length) { return cast_body_nbytes(length, args.wire_dtype); };
}

// The smallest wire_scale whose reciprocal is a number of every compute type.
constexpr double kMinWireScale = 0x1p-126;

void check_wire_scale(double scale) {
  int exponent = 0;
  const bool power_of_two = std::frexp(scale, &exponent) == 0.5;
  if (!power_of_two || scale > 1.0 || scale < kMinWireScale) {
    fail("wire_scale: expected a power of two in 2^-126 ... 1, got ", scale);
  }
}

}  // namespace

void check(const CastArgs& args) {
  const auto body_nbytes = check_format(args);
  check_elements("input", args.input, args.spans, args.dtype);
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_residual(args.residual, args.spans);
}

void check(const UncastArgs& args) {
  const auto body_nbytes = check_format(args);
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_elements("output", args.output, args.spans, args.dtype);
  if (args.nonfinite) check_rows("nonfinite", args.nonfinite, args.spans, 1);
}

void check(const RecastSumArgs& args) {
  const auto body_nbytes = check_format(args);
  check_wire_scale(args.wire_scale);
  check_parts(args.parts, [&](const char* name, const ConstBytes& part) {
    check_bodies(name, part, args.spans, body_nbytes);
  });
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_residual(args.residual, args.spans);
}

}  // namespace commkern
