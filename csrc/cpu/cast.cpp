#include "kernels/cast.h"

#include "cpu/simd.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

// fn(Tag<T>{}, Tag<W>{}) for the element types of data and wire.
template <class Fn>
COMMKERN_INLINE void with_dtypes(DType dtype, DType wire_dtype, Fn fn) {
  with_dtype(dtype, [&](auto data) {
    with_dtype(wire_dtype, [&](auto wire) { fn(data, wire); });
  });
}

template <class T, class W>
constexpr bool kBothHaveVectors = kHasVectors<T> && kHasVectors<W>;

template <class T, class W>
void cast_run(const uint8_t* input, uint8_t* payload, int64_t n) {
  using C = ComputeOf<T>;
  if constexpr (is_same<T, W>) {
    std::memcpy(payload, input, n * sizeof(T));
    return;
  }
  int64_t i = 0;
  if constexpr (kBothHaveVectors<T, W>) {
    for (; i + kLanes <= n; i += kLanes) {
      store_floats<W>(payload, i, load_floats<T>(input, i));
    }
  }
  for (; i < n; ++i) {
    store(payload, i, convert<W>(convert<C>(load<T>(input, i))));
  }
}

template <class T, class W>
void cast_feedback_run(const uint8_t* input, uint8_t* payload, ResidualSpan residual,
                       int64_t n, bool streams) {
  using C = ComputeOf<T>;
  int64_t i = 0;
  if constexpr (kBothHaveVectors<T, W>) {
    for (; i + kLanes <= n; i += kLanes) {
      const Floats old_values = load_floats<float>(residual.old_values, i);
      const Floats a = load_floats<T>(input, i) + old_values;
      const Elements<W> w = narrow<W>(a);
      const Floats decoded = widen<W>(w);
      store_elements<W>(payload, i, w);
      put_elements<float>(residual.new_values, i,
                          choose(finite_mask(decoded), a - decoded, old_values),
                          streams);
    }
  }
  for (; i < n; ++i) {
    const float old_value = load<float>(residual.old_values, i);
    const C a = load_compute<T>(input, i) + static_cast<C>(old_value);
    const W w = convert<W>(a);
    const C decoded = convert<C>(w);
    const bool finite = is_finite(convert<ComputeOf<W>>(w));
    store(payload, i, w);
    store(residual.new_values, i, finite ? static_cast<float>(a - decoded) : old_value);
  }
}

template <class T, class W, bool kAdd>
void uncast_typed(const UncastArgs& args) {
  const bool streams = !kAdd && streams_past_cache<T>(args.spans);
  const auto body = [&](int64_t row, const Span& span, int64_t begin, int64_t end) {
    const auto factor = static_cast<ComputeOf<T>>(args.scale);
    const uint8_t* payload = args.payload.data + span.body + begin * sizeof(W);
    uint8_t* output = args.output.data + (span.offset + begin) * sizeof(T);
    const bool finite = put_scaled<T, W, kAdd>(payload, end - begin, factor, output,
                                               streams && can_stream(output));
    if (!finite && args.nonfinite) raise_flag(args.nonfinite, row);
  };
  for_elements(args.spans, body);
}

template <class W>
COMMKERN_INLINE Floats sum_lanes(const Parts& parts, int64_t at, int64_t i) {
  Floats acc = load_floats<W>(parts.rows[0].data + at, i);
  for (int64_t rank = 1; rank < parts.count; ++rank) {
    acc += load_floats<W>(parts.rows[rank].data + at, i);
  }
  return acc;
}

template <class C, class W>
COMMKERN_INLINE C sum_at(const Parts& parts, int64_t at, int64_t i) {
  C acc = convert<C>(load<W>(parts.rows[0].data + at, i));
  for (int64_t rank = 1; rank < parts.count; ++rank) {
    acc += convert<C>(load<W>(parts.rows[rank].data + at, i));
  }
  return acc;
}

template <class C, class W>
void recast_sum_run(const RecastSumArgs& args, int64_t at, uint8_t* residual,
                    int64_t n) {
  uint8_t* payload = args.payload.data + at;
  const C factor = static_cast<C>(args.wire_scale);
  const C unscale = C(1) / factor;  // exact, as is every product with it
  int64_t i = 0;
  if constexpr (kBothHaveVectors<C, W>) {
    for (; i + kLanes <= n; i += kLanes) {
      const Floats scaled = sum_lanes<W>(args.parts, at, i) * factor;
      const Elements<W> w = narrow<W>(scaled);
      store_elements<W>(payload, i, w);
      if (residual == nullptr) continue;
      const Floats decoded = widen<W>(w);
      const Floats before = load_floats<float>(residual, i);
      const Floats after = before + (scaled - decoded) * unscale;
      store_floats<float>(residual, i, choose(finite_mask(after), after, before));
    }
  }
  for (; i < n; ++i) {
    const C scaled = sum_at<C, W>(args.parts, at, i) * factor;
    const W w = convert<W>(scaled);
    store(payload, i, w);
    if (residual == nullptr) continue;
    const float error = static_cast<float>((scaled - convert<C>(w)) * unscale);
    const float before = load<float>(residual, i);
    store(residual, i, is_finite(before + error) ? before + error : before);
  }
}

}  // namespace

void cast(const CastArgs& args, void*) {
  const bool streams = streams_residual(args.residual, args.spans);
  with_dtypes(args.dtype, args.wire_dtype, [&]<class T, class W>(Tag<T>, Tag<W>) {
    const auto body = [&](int64_t, const Span& span, int64_t begin, int64_t end) {
      const uint8_t* input = args.input.data + (span.offset + begin) * sizeof(T);
      uint8_t* payload = args.payload.data + span.body + begin * sizeof(W);
      const ResidualSpan all = residual_of(args.residual, span);
      if (!all) return cast_run<T, W>(input, payload, end - begin);
      const ResidualSpan residual = all.from(begin);
      cast_feedback_run<T, W>(input, payload, residual, end - begin,
                              streams && can_stream(residual.new_values));
    };
    for_elements(args.spans, body);
  });
}

void uncast(const UncastArgs& args, void*) {
  with_dtypes(args.dtype, args.wire_dtype, [&]<class T, class W>(Tag<T>, Tag<W>) {
    uncast_typed<T, W, false>(args);
  });
}

void uncast_add(const UncastArgs& args, void*) {
  with_dtypes(args.dtype, args.wire_dtype, [&]<class T, class W>(Tag<T>, Tag<W>) {
    uncast_typed<T, W, true>(args);
  });
}

void recast_sum(const RecastSumArgs& args, void*) {
  with_dtypes(args.dtype, args.wire_dtype, [&]<class T, class W>(Tag<T>, Tag<W>) {
    const auto body = [&](int64_t, const Span& span, int64_t begin, int64_t end) {
      const ResidualSpan residual = residual_of(args.residual, span);
      uint8_t* values = residual ? residual.from(begin).new_values : nullptr;
      recast_sum_run<ComputeOf<T>, W>(args, span.body + begin * sizeof(W), values,
                                      end - begin);
    };
    for_elements(args.spans, body);
  });
}

COMMKERN_END_ISA
