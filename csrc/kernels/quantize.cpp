#include "kernels/quantize.h"

#include "core/check.h"

namespace commkern {
namespace {

// What the three argument structs have in common.
template <class Args>
auto check_format(const Args& args) {
  check_dtype("dtype", args.dtype);
  check_bits(args.bits);
  check_block_size(args.block_size);
  check_spans(args.spans);
  check_begins(args.spans, args.block_size);
  return [&args](int64_t length) {
    return quantize_body_nbytes(length, args.bits, args.block_size, args.dtype);
  };
}

}  // namespace

void check(const QuantizeArgs& args) {
  const auto body_nbytes = check_format(args);
  check_rounding(args.rounding);
  check_elements("input", args.input, args.spans, args.dtype);
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_residual(args.residual, args.spans);
}

void check(const DequantizeArgs& args) {
  const auto body_nbytes = check_format(args);
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_elements("output", args.output, args.spans, args.dtype);
  if (args.nonfinite) check_rows("nonfinite", args.nonfinite, args.spans, 1);
}

void check(const RequantizeSumArgs& args) {
  const auto body_nbytes = check_format(args);
  check_rounding(args.rounding);
  check_parts(args.parts, [&](const char* name, const ConstBytes& part) {
    check_bodies(name, part, args.spans, body_nbytes);
  });
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_residual(args.residual, args.spans);
}

}  // namespace commkern
