#include "kernels/fixed_point.h"

#include "core/check.h"

namespace commkern {
namespace {

void check_fixed_bits(int32_t bits) {
  if (bits != 8 && bits != 16 && bits != 32) {
    fail("bits: expected one of 8, 16, 32, got ", bits);
  }
}

void check_digits(int32_t digits, int32_t bits) {
  if (digits < 1 || digits >= bits) {
    fail("digits: expected 1 ... ", bits - 1, ", got ", digits);
  }
}

void check_largest(int32_t largest, int32_t bits) {
  const int64_t most = (int64_t{1} << (bits - 1)) - 1;
  if (largest < 1 || largest > most) {
    fail("largest: expected 1 ... ", most, ", got ", largest);
  }
}

template <class Args>
void check_blocks(const Args& args) {
  check_dtype("dtype", args.dtype);
  check_block_size(args.block_size);
  check_spans(args.spans);
  check_begins(args.spans, args.block_size);
}

template <class Args>
auto size_of_exponents(const Args& args) {
  return [&args](int64_t length) {
    return exponents_nbytes(length, args.block_size, args.dtype);
  };
}

template <class Args>
auto size_of_codes(const Args& args) {
  return [&args](int64_t length) { return fixed_codes_nbytes(length, args.bits); };
}

// `buffer` covers the agreed exponents of every span.
template <class Args>
void check_agreed(const char* name, const ConstBytes& buffer, const Args& args) {
  for (int64_t row = 0; row < args.spans.count; ++row) {
    const Span& span = args.spans.rows[row];
    check_range(name, buffer.data, buffer.nbytes, row, span.earlier,
                exponents_nbytes(span.length, args.block_size, args.dtype));
  }
}

}  // namespace

void check(const BlockExponentsArgs& args) {
  check_blocks(args);
  check_elements("input", args.input, args.spans, args.dtype);
  check_bodies("payload", args.payload, args.spans, size_of_exponents(args));
  check_residual(args.residual, args.spans);
}

void check(const MaxExponentsArgs& args) {
  check_blocks(args);
  check_parts(args.parts, [&](const char* name, const ConstBytes& part) {
    check_bodies(name, part, args.spans, size_of_exponents(args));
  });
  check_bodies("payload", args.payload, args.spans, size_of_exponents(args));
}

void check(const FixedQuantizeArgs& args) {
  check_fixed_bits(args.bits);
  check_digits(args.digits, args.bits);
  check_largest(args.largest, args.bits);
  check_rounding(args.rounding);
  check_blocks(args);
  check_elements("input", args.input, args.spans, args.dtype);
  check_agreed("exponents", args.exponents, args);
  check_bodies("payload", args.payload, args.spans, size_of_codes(args));
  check_residual(args.residual, args.spans);
}

void check(const FixedSumArgs& args) {
  check_fixed_bits(args.bits);
  check_spans(args.spans);
  check_parts(args.parts, [&](const char* name, const ConstBytes& part) {
    check_bodies(name, part, args.spans, size_of_codes(args));
  });
  check_bodies("payload", args.payload, args.spans, size_of_codes(args));
}

void check(const FixedDequantizeArgs& args) {
  check_fixed_bits(args.bits);
  check_digits(args.digits, args.bits);
  check_blocks(args);
  check_agreed("payload", args.payload, args);
  check_bodies("payload", args.payload, args.spans, size_of_codes(args));
  check_elements("output", args.output, args.spans, args.dtype);
  if (args.nonfinite) check_rows("nonfinite", args.nonfinite, args.spans, 1);
}

}  // namespace commkern
