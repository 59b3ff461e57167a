#include "cpu/hadamard.h"

#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

constexpr int64_t kMostRotation = 4096;
constexpr int64_t kLeastUnit = 512;

// The elements in the compute type: in `values` unless they lie ready.
template <class T>
COMMKERN_INLINE const void* read_values(const uint8_t* input, ComputeOf<T>* values,
                                        int64_t n) {
  if constexpr (is_same<T, ComputeOf<T>>) return input;
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    for (; i + kLanes <= n; i += kLanes) {
      store_floats<float>(values, i, load_floats<T>(input, i));
    }
  }
  for (; i < n; ++i) values[i] = load_compute<T>(input, i);
  return values;
}

template <class T>
COMMKERN_INLINE void write_values(const ComputeOf<T>* values, uint8_t* output,
                                  int64_t n, bool streams) {
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    for (; i + kLanes <= n; i += kLanes) {
      put_elements<T>(output, i, narrow<T>(load_floats<float>(values, i)), streams);
    }
  }
  for (; i < n; ++i) store(output, i, convert<T>(values[i]));
}

int64_t unit_of(const HadamardArgs& args) {
  return args.rotation > kLeastUnit ? args.rotation : kLeastUnit;
}

template <class T>
void turn_span(const HadamardArgs& args, const Span& span, int64_t begin, int64_t end,
               bool streams) {
  alignas(64) ComputeOf<T> values[kMostRotation];
  Rotation rotation(args.seed, span.parameter_id, args.rotation);
  const int64_t unit = unit_of(args);
  for (int64_t at = begin; at < end; at += unit) {
    const int64_t n = smaller(unit, end - at);
    const int64_t place = (span.offset + at) * static_cast<int64_t>(sizeof(T));
    const void* source = read_values<T>(args.input.data + place, values, n);
    if (args.inverse != 0) {
      rotation.unrotate(source, values, n, span.begin + at);
    } else {
      rotation.rotate(source, values, n, span.begin + at);
    }
    uint8_t* output = args.output.data + place;
    write_values<T>(values, output, n, streams && can_stream(output));
  }
}

}  // namespace

void hadamard(const HadamardArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    const bool streams =
        streams_past_cache<T>(args.spans) && args.input.data != args.output.data;
    const int64_t unit = unit_of(args);
    for_units(args.spans, unit,
              [&](int64_t, const Span& span, int64_t first, int64_t last) {
                const int64_t end = smaller(last * unit, span.length);
                turn_span<T>(args, span, first * unit, end, streams);
              });
  });
}

COMMKERN_END_ISA
