// What the device kernels share: elements in memory, residuals, the walk over a span
// table. Compiles unchanged under nvcc, the tests' emulator and NVRTC (which wants
// -default-device, and stand-ins for <cstddef> and <cstdint>).
#pragma once

#include "core/numerics.h"
#include "core/types.h"

#define COMMKERN_DEVICE static __device__ __forceinline__

namespace commkern::cuda {

template <class T, int kCount>
constexpr size_t run_alignment = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;

// Consecutive elements that the hardware moves at once where their address allows.
template <class T, int kCount>
struct alignas(run_alignment<T, kCount>) Run {
  T at[kCount];
};

template <class T>
COMMKERN_DEVICE bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % alignof(T) == 0;
}

// A misaligned access would spoil the whole CUDA context, so that none may happen.
template <class T>
COMMKERN_DEVICE T load(const uint8_t* from) {
  if (is_aligned<T>(from)) return *reinterpret_cast<const T*>(from);
  T value;
  auto* bytes = reinterpret_cast<uint8_t*>(&value);
  for (size_t k = 0; k < sizeof(T); ++k) bytes[k] = from[k];
  return value;
}

template <class T>
COMMKERN_DEVICE void store(uint8_t* to, T value) {
  if (is_aligned<T>(to)) {
    *reinterpret_cast<T*>(to) = value;
    return;
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  for (size_t k = 0; k < sizeof(T); ++k) to[k] = bytes[k];
}

// The first `n` elements; those behind are zero bits.
template <class T, int kCount>
COMMKERN_DEVICE Run<T, kCount> load_run(const uint8_t* from, int n) {
  using Whole = Run<T, kCount>;
  if (n == kCount && is_aligned<Whole>(from)) {
    return *reinterpret_cast<const Whole*>(from);
  }
  Whole run{};
  for (int k = 0; k < kCount; ++k) {
    if (k < n) run.at[k] = load<T>(from + k * sizeof(T));
  }
  return run;
}

template <class T, int kCount>
COMMKERN_DEVICE void store_run(uint8_t* to, const Run<T, kCount>& run, int n) {
  using Whole = Run<T, kCount>;
  if (n == kCount && is_aligned<Whole>(to)) {
    *reinterpret_cast<Whole*>(to) = run;
    return;
  }
  for (int k = 0; k < kCount; ++k) {
    if (k < n) store<T>(to + k * sizeof(T), run.at[k]);
  }
}

// The version of a residual to read and the one to write, from a span's element
// `first` on; null without error feedback.
struct ResidualRun {
  const uint8_t* old_values;
  uint8_t* new_values;
};

COMMKERN_DEVICE ResidualRun residual_of(const Residual& residual, const Span& span,
                                        int64_t first) {
  if (residual.version[0].data == nullptr) return {nullptr, nullptr};
  const uint8_t* committed = residual.committed.data;
  const bool second = committed != nullptr && committed[span.parameter] != 0;
  float* old_values = residual.version[second ? 1 : 0].data;
  float* new_values = residual.version[second ? 0 : 1].data;
  const int64_t at = span.residual + first;
  return {reinterpret_cast<const uint8_t*>(old_values + at),
          reinterpret_cast<uint8_t*>(new_values + at)};
}

// body(row, span, first, n): the 1 ... kPerThread elements from `first` on of that
// span. Blocks take tiles in turn over all rows, so that many short spans keep as many
// of them busy as a long one does.
template <int kThreads, int kPerThread, class Body>
COMMKERN_DEVICE void for_runs(const SpanTable& spans, const Body& body) {
  constexpr int64_t kTile = int64_t{kThreads} * kPerThread;
  const int64_t in_tile = int64_t{threadIdx.x} * kPerThread;
  int64_t tile = blockIdx.x;  // counted from the start of the row at hand
  for (int64_t row = 0; row < spans.count; ++row) {
    const Span span = spans.rows[row];
    const int64_t tiles = (span.length + kTile - 1) / kTile;
    for (; tile < tiles; tile += gridDim.x) {
      const int64_t first = tile * kTile + in_tile;
      const int64_t left = span.length - first;
      if (left <= 0) continue;
      body(row, span, first, static_cast<int>(left < kPerThread ? left : kPerThread));
    }
    tile -= tiles;
  }
}

}  // namespace commkern::cuda
