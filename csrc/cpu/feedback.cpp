#include "kernels/feedback.h"

#include "cpu/simd.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

template <class T>
void subtract_run(const uint8_t* input, uint8_t* residual, int64_t n) {
  using C = ComputeOf<T>;
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    for (; i + kLanes <= n; i += kLanes) {
      const Floats before = load_floats<float>(residual, i);
      const Floats after = before - load_floats<T>(input, i);
      store_floats<float>(residual, i, choose(finite_mask(after), after, before));
    }
  }
  for (; i < n; ++i) {
    const float before = load<float>(residual, i);
    const C difference = static_cast<C>(before) - load_compute<T>(input, i);
    const float after = static_cast<float>(difference);
    store(residual, i, is_finite(after) ? after : before);
  }
}

void scale_run(uint8_t* residual, float factor, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats before = load_floats<float>(residual, i);
    const Floats after = before * factor;
    store_floats<float>(residual, i, choose(finite_mask(after), after, before));
  }
  for (; i < n; ++i) {
    const float before = load<float>(residual, i);
    const float after = before * factor;
    store(residual, i, is_finite(after) ? after : before);
  }
}

// Returns whether every y is finite.
template <class T>
bool accumulate_run(const uint8_t* input, uint8_t* output, ResidualSpan sum,
                    int64_t n) {
  using C = ComputeOf<T>;
  BitsOf<T> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    Ints lanes{};
    for (; i + kLanes <= n; i += kLanes) {
      const Floats before = load_floats<float>(sum.old_values, i);
      const Floats after = before + load_floats<float>(input, i);
      const Elements<T> y = narrow<T>(after);
      lanes = larger(lanes, magnitude_of(widen<T>(y)));
      store_elements<T>(output, i, y);
      store_floats<float>(sum.new_values, i, choose(finite_mask(after), after, before));
    }
    most = largest_lane(lanes);
  }
  for (; i < n; ++i) {
    const float before = load<float>(sum.old_values, i);
    const C after = static_cast<C>(before) + load<C>(input, i);
    const float kept = static_cast<float>(after);
    const T y = convert<T>(after);
    const BitsOf<T> bits = magnitude_bits(convert<C>(y));
    most = bits > most ? bits : most;
    store(output, i, y);
    store(sum.new_values, i, is_finite(kept) ? kept : before);
  }
  return is_finite(bits_as<C>(most));
}

}  // namespace

void residual_subtract(const ResidualSubtractArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    const auto body = [&](int64_t, const Span& span, int64_t begin, int64_t end) {
      const ResidualSpan residual = residual_of(args.residual, span).from(begin);
      subtract_run<T>(args.input.data + (span.offset + begin) * sizeof(T),
                      residual.new_values, end - begin);
    };
    for_elements(args.spans, body);
  });
}

void residual_scale(const ResidualScaleArgs& args, void*) {
  const auto body = [&](int64_t, const Span& span, int64_t begin, int64_t end) {
    // Converted in the body: only there the caller's CPU flags are set aside.
    const auto factor = static_cast<float>(args.factor);
    scale_run(residual_of(args.residual, span).from(begin).new_values, factor,
              end - begin);
  };
  for_elements(args.spans, body);
}

void accumulate(const AccumulateArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    const auto body = [&](int64_t row, const Span& span, int64_t begin, int64_t end) {
      const int64_t first = span.offset + begin;
      const bool finite =
          accumulate_run<T>(args.input.data + first * sizeof(ComputeOf<T>),
                            args.output.data + first * sizeof(T),
                            residual_of(args.residual, span).from(begin), end - begin);
      if (!finite && args.nonfinite) raise_flag(args.nonfinite, row);
    };
    for_elements(args.spans, body);
  });
}

COMMKERN_END_ISA
