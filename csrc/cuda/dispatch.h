// Host code that turns run-time dtypes into template arguments, and work into tiles.
#pragma once

#include "core/numerics.h"
#include "core/types.h"
#include "cuda/tuning.h"

namespace commkern::cuda {

template <class T>
struct Tag {
  using type = T;
};

// fn(Tag<T>{}) for the element type of `dtype`.
template <class Fn>
void with_dtype(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(Tag<float>{});
    case DType::kFloat64: return fn(Tag<double>{});
    case DType::kFloat16: return fn(Tag<Half>{});
    case DType::kBFloat16: return fn(Tag<BFloat16>{});
  }
}

// fn(Tag<T>{}, Tag<W>{}) for the element types of data and wire.
template <class Fn>
void with_dtypes(DType dtype, DType wire_dtype, Fn fn) {
  with_dtype(dtype, [&](auto data) {
    with_dtype(wire_dtype, [&](auto wire) { fn(data, wire); });
  });
}

// At least the tiles of for_runs over these spans: their lengths lie on the device, but
// a payload that holds `elements` bounds their sum. 0 where there is nothing to do.
inline int64_t most_tiles(const Tuning& tuning, const SpanTable& spans,
                          int64_t elements) {
  if (spans.count == 0 || elements == 0) return 0;
  return elements / (int64_t{tuning.threads} * tuning.per_thread) + spans.count;
}

}  // namespace commkern::cuda
