// Device code that decodes block-quantised payloads (kernels/quantize.h holds the
// contract).
#pragma once

#include "core/bitpack.h"
#include "cuda/elements.cuh"
#include "cuda/tuning.h"
#include "kernels/quantize.h"

namespace commkern::cuda {

// ---- device helpers ----

// `a` >= 0, `b` > 0. Most lengths fit 32 bits, where division is several times cheaper.
COMMKERN_DEVICE int64_t divide(int64_t a, int32_t b) {
  if (a <= UINT32_MAX) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The packed codes of `n` elements, the first in the lowest bits.
template <int kBits>
COMMKERN_DEVICE uint64_t load_codes(const uint8_t* from, int n) {
  if (n < kPackGroup) return load_word(from, packed_nbytes(n, kBits));
  const uint64_t low = load<uint32_t>(from);
  if constexpr (kBits == 4) return low;
  return low | static_cast<uint64_t>(load<uint32_t>(from + 4)) << 32;
}

// Whether the scale of the block is finite. A run begins at a multiple of 8, so that it
// lies within one block and its codes begin on a byte.
template <class T, int kBits>
COMMKERN_DEVICE bool dequantize_run(const DequantizeArgs& args, bool add,
                                    const Span& span, int64_t first, int n) {
  using C = ComputeOf<T>;
  constexpr int kCount = kDequantizeTuning.per_thread;
  static_assert(kCount == kPackGroup);
  const int64_t blocks = divide(span.length + args.block_size - 1, args.block_size);
  const uint8_t* scales = args.payload.data + span.body;
  const uint8_t* codes = scales + blocks * sizeof(C);
  const C scale = load<C>(scales + divide(first, args.block_size) * sizeof(C));
  const uint64_t word = load_codes<kBits>(codes + first / kPackGroup * kBits, n);
  const C factor = static_cast<C>(args.scale);
  uint8_t* output = args.output.data + (span.offset + first) * sizeof(T);
  Run<T, kCount> results{};
  if (add) results = load_run<T, kCount>(output, n);
  for (int k = 0; k < kCount; ++k) {
    const auto code = static_cast<uint32_t>(word >> (k * kBits));
    C value = static_cast<C>(signed_code(code, kBits)) * scale * factor;
    if (add) value = convert<C>(results.at[k]) + value;
    results.at[k] = convert<T>(value);
  }
  store_run(output, results, n);
  return is_finite(scale);
}

// ---- kernels ----

template <class T, int kBits>
__global__ void __launch_bounds__(kDequantizeTuning.threads)
    dequantize_kernel(const __grid_constant__ DequantizeArgs args, bool add) {
  for_runs<kDequantizeTuning.threads, kDequantizeTuning.per_thread>(
      args.spans, [&](int64_t row, const Span& span, int64_t first, int n) {
        const bool finite = dequantize_run<T, kBits>(args, add, span, first, n);
        // Whichever thread writes writes the same.
        if (!finite && args.nonfinite.data != nullptr) args.nonfinite.data[row] = 1;
      });
}

}  // namespace commkern::cuda
