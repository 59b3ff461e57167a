#include "kernels/quantize.h"

#include "core/check.h"

namespace commkern {
namespace {

// What the three argument structs have in common.
template <class Args>
auto check_common(const Args& args, Rounding rounding) {
  check_dtype("dtype", args.dtype);
  check_format(args.format, rounding);
  check_spans(args.spans);
  const Format& f = args.format;
  check_begins(args.spans, unit_of(f),
               f.rotation > f.block_size ? "rotation" : "block_size");
  return [&args](int64_t length) {
    return BodyLayout(args.format, args.dtype, length).nbytes;
  };
}

// How a code was rounded makes no difference to its value.
Rounding any_rounding(const Format& f) {
  const bool random = f.code == Code::kTernary || f.code == Code::kNatural ||
                      (f.code == Code::kSign && f.statistic == Statistic::kAbsmax);
  return random ? Rounding::kStochastic : Rounding::kNearest;
}

}  // namespace

void check(const QuantizeArgs& args) {
  const auto body_nbytes = check_common(args, args.rounding);
  check_elements("input", args.input, args.spans, args.dtype);
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_residual(args.residual, args.spans);
}

void check(const DequantizeArgs& args) {
  const auto body_nbytes = check_common(args, any_rounding(args.format));
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_elements("output", args.output, args.spans, args.dtype);
  if (args.nonfinite) check_rows("nonfinite", args.nonfinite, args.spans, 1);
}

void check(const RequantizeSumArgs& args) {
  const auto body_nbytes = check_common(args, args.rounding);
  check_parts(args.parts, [&](const char* name, const ConstBytes& part) {
    check_bodies(name, part, args.spans, body_nbytes);
  });
  check_bodies("payload", args.payload, args.spans, body_nbytes);
  check_residual(args.residual, args.spans);
}

}  // namespace commkern
