// Device code of the casts (kernels/cast.h holds the contract).
#pragma once

#include "cuda/elements.cuh"
#include "cuda/tuning.h"
#include "kernels/cast.h"

namespace commkern::cuda {

// The parts' pointers travel with the launch; `args.parts.rows` is the host's.
struct RecastSumParams {
  RecastSumArgs args;
  const uint8_t* parts[kMaxParts];
};
static_assert(sizeof(RecastSumParams) <= 4096);

// ---- device helpers ----

template <class T, class W>
COMMKERN_DEVICE W cast_element(T x) {
  if constexpr (is_same<T, W>) {
    return x;  // a NaN keeps its bits
  } else {
    return convert<W>(convert<ComputeOf<T>>(x));
  }
}

template <class T, class W>
COMMKERN_DEVICE void cast_run(const CastArgs& args, const Span& span, int64_t first,
                              int n) {
  using C = ComputeOf<T>;
  constexpr int kCount = kCastTuning.per_thread;
  const auto input =
      load_run<T, kCount>(args.input.data + (span.offset + first) * sizeof(T), n);
  const ResidualRun residual = residual_of(args.residual, span, first);
  Run<W, kCount> wire;
  if (residual.new_values == nullptr) {
    for (int k = 0; k < kCount; ++k) wire.at[k] = cast_element<T, W>(input.at[k]);
  } else {
    auto values = load_run<float, kCount>(residual.old_values, n);
    for (int k = 0; k < kCount; ++k) {
      const C a = convert<C>(input.at[k]) + static_cast<C>(values.at[k]);
      const W w = convert<W>(a);
      const bool finite = is_finite(convert<ComputeOf<W>>(w));
      wire.at[k] = w;
      if (finite) values.at[k] = static_cast<float>(a - convert<C>(w));
    }
    store_run(residual.new_values, values, n);
  }
  store_run(args.payload.data + span.body + first * sizeof(W), wire, n);
}

// Whether all results are finite.
template <class T, class W>
COMMKERN_DEVICE bool uncast_run(const UncastArgs& args, bool add, const Span& span,
                                int64_t first, int n) {
  using C = ComputeOf<T>;
  constexpr int kCount = kUncastTuning.per_thread;
  const C factor = static_cast<C>(args.scale);
  uint8_t* output = args.output.data + (span.offset + first) * sizeof(T);
  const auto wire =
      load_run<W, kCount>(args.payload.data + span.body + first * sizeof(W), n);
  Run<T, kCount> results{};
  if (add) results = load_run<T, kCount>(output, n);
  bool finite = true;
  for (int k = 0; k < kCount; ++k) {
    C value = convert<C>(wire.at[k]) * factor;
    if (add) value = convert<C>(results.at[k]) + value;
    results.at[k] = convert<T>(value);
    // Behind n stand zeros: they are finite where `factor` is.
    finite = finite && is_finite(convert<C>(results.at[k]));
  }
  store_run(output, results, n);
  return finite;
}

template <class C, class W>
COMMKERN_DEVICE void recast_sum_run(const RecastSumParams& params, const Span& span,
                                    int64_t first, int n) {
  constexpr int kCount = kRecastSumTuning.per_thread;
  const RecastSumArgs& args = params.args;
  const int64_t at = span.body + first * static_cast<int64_t>(sizeof(W));
  Run<C, kCount> sums;
  for (int64_t rank = 0; rank < args.parts.count; ++rank) {
    const auto part = load_run<W, kCount>(params.parts[rank] + at, n);
    for (int k = 0; k < kCount; ++k) {
      const C value = convert<C>(part.at[k]);
      sums.at[k] = rank == 0 ? value : sums.at[k] + value;
    }
  }
  const C factor = static_cast<C>(args.wire_scale);
  const C unscale = C(1) / factor;  // exact, as is every product with it
  Run<W, kCount> wire;
  for (int k = 0; k < kCount; ++k) {
    sums.at[k] = sums.at[k] * factor;
    wire.at[k] = convert<W>(sums.at[k]);
  }
  store_run(args.payload.data + at, wire, n);
  uint8_t* residual = residual_of(args.residual, span, first).new_values;
  if (residual == nullptr) return;
  auto values = load_run<float, kCount>(residual, n);
  for (int k = 0; k < kCount; ++k) {
    if (!is_finite(convert<ComputeOf<W>>(wire.at[k]))) continue;
    const C error = (sums.at[k] - convert<C>(wire.at[k])) * unscale;
    const float after = values.at[k] + static_cast<float>(error);
    if (is_finite(after)) values.at[k] = after;
  }
  store_run(residual, values, n);
}

// ---- kernels ----

template <class T, class W>
__global__ void __launch_bounds__(kCastTuning.threads)
    cast_kernel(const __grid_constant__ CastArgs args) {
  for_runs<kCastTuning.threads, kCastTuning.per_thread>(
      args.spans, [&](int64_t, const Span& span, int64_t first, int n) {
        cast_run<T, W>(args, span, first, n);
      });
}

template <class T, class W>
__global__ void __launch_bounds__(kUncastTuning.threads)
    uncast_kernel(const __grid_constant__ UncastArgs args, bool add) {
  for_runs<kUncastTuning.threads, kUncastTuning.per_thread>(
      args.spans, [&](int64_t row, const Span& span, int64_t first, int n) {
        const bool finite = uncast_run<T, W>(args, add, span, first, n);
        // Whichever thread writes writes the same.
        if (!finite && args.nonfinite.data != nullptr) args.nonfinite.data[row] = 1;
      });
}

template <class C, class W>
__global__ void __launch_bounds__(kRecastSumTuning.threads)
    recast_sum_kernel(const __grid_constant__ RecastSumParams params) {
  for_runs<kRecastSumTuning.threads, kRecastSumTuning.per_thread>(
      params.args.spans, [&](int64_t, const Span& span, int64_t first, int n) {
        recast_sum_run<C, W>(params, span, first, n);
      });
}

}  // namespace commkern::cuda
