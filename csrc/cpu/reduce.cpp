#include "kernels/reduce.h"

#include "cpu/simd.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

// Whether all that it wrote is finite.
template <class T>
bool sum_run(const SumArgs& args, int64_t first, int64_t end, bool streams) {
  using C = ComputeOf<T>;
  const C factor = static_cast<C>(args.scale);
  BitsOf<C> most = 0;
  int64_t i = first;
  if constexpr (kHasVectors<T>) {
    Ints lanes{};
    for (; i + kLanes <= end; i += kLanes) {
      Floats acc = load_floats<T>(args.parts.rows[0].data, i);
      for (int64_t rank = 1; rank < args.parts.count; ++rank) {
        acc += load_floats<T>(args.parts.rows[rank].data, i);
      }
      const Elements<T> y = narrow<T>(acc * factor);
      lanes = larger(lanes, magnitude_of(widen<T>(y)));
      put_elements<T>(args.output.data, i, y, streams);
    }
    most = largest_lane(lanes);
  }
  for (; i < end; ++i) {
    C acc = load_compute<T>(args.parts.rows[0].data, i);
    for (int64_t rank = 1; rank < args.parts.count; ++rank) {
      acc += load_compute<T>(args.parts.rows[rank].data, i);
    }
    const T y = convert<T>(acc * factor);
    const BitsOf<C> bits = magnitude_bits(convert<C>(y));
    most = bits > most ? bits : most;
    store(args.output.data, i, y);
  }
  return is_finite(bits_as<C>(most));
}

// The output's lines are in the cache where it is one of the parts.
bool in_place(const SumArgs& args) {
  for (int64_t rank = 0; rank < args.parts.count; ++rank) {
    if (args.parts.rows[rank].data == args.output.data) return true;
  }
  return false;
}

// An element's bits, in its own width.
template <class T>
struct RawOf {
  using type = BitsOf<T>;
};
template <>
struct RawOf<Half> {
  using type = uint16_t;
};
template <>
struct RawOf<BFloat16> {
  using type = uint16_t;
};
template <class T>
using Raw = typename RawOf<T>::type;

template <class T>
constexpr Raw<T> kMagnitudeMask = static_cast<Raw<T>>(~Raw<T>{0}) >> 1;

template <class T>
Raw<T> largest_magnitude(const uint8_t* data, int64_t n) {
  Raw<T> most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Raw<T> bits = load<Raw<T>>(data, i) & kMagnitudeMask<T>;
    most = bits > most ? bits : most;
  }
  return most;
}

template <class T>
bool holds_nonfinite(const uint8_t* data, int64_t n) {
  const T most = bits_as<T>(largest_magnitude<T>(data, n));
  return !is_finite(convert<ComputeOf<T>>(most));
}

template <class T>
bool holds_nonzero(const uint8_t* data, int64_t n) {
  return largest_magnitude<T>(data, n) != 0;
}

// Looks at one stretch after another until the row's flag is up.
template <class Holds>
void flag_spans(const FlagArgs& args, int64_t size, Holds holds) {
  constexpr int64_t kStretch = 4096;
  const auto body = [&](int64_t row, const Span& span, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kStretch) {
      if (__atomic_load_n(args.flags.data + row, __ATOMIC_RELAXED) == 1) return;
      const uint8_t* data = args.input.data + (span.offset + i) * size;
      if (holds(data, smaller(kStretch, end - i))) raise_flag(args.flags, row);
    }
  };
  for_elements(args.spans, body);
}

// Magnitudes as integers order like the numbers, so threads may meet in any order.
template <class Bits>
void raise_to(uint8_t* output, Bits candidate) {
  auto* word = reinterpret_cast<Bits*>(output);
  Bits seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < candidate &&
         !__atomic_compare_exchange_n(word, &seen, candidate, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

template <class T>
void saturate_run(uint8_t* data, T limit, int64_t n) {
  const Raw<T> most = bits_as<Raw<T>>(limit) & kMagnitudeMask<T>;
  const Raw<T> inf =
      bits_as<Raw<T>>(convert<T>(bits_as<float>(FloatBits<float>::kInf)));
  for (int64_t i = 0; i < n; ++i) {
    const Raw<T> bits = load<Raw<T>>(data, i);
    const Raw<T> magnitude = bits & kMagnitudeMask<T>;
    const Raw<T> sign = bits & static_cast<Raw<T>>(~kMagnitudeMask<T>);
    Raw<T> out = magnitude > most ? static_cast<Raw<T>>(most | sign) : bits;
    out = magnitude > inf ? Raw<T>{0} : out;
    store(data, i, out);
  }
}

}  // namespace

void sum(const SumArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    const bool large = streams_past_cache<T>(args.spans) && !in_place(args);
    const auto body = [&](int64_t row, const Span& span, int64_t begin, int64_t end) {
      const int64_t first = span.offset + begin;
      const bool streams = large && can_stream(args.output.data + first * sizeof(T));
      const bool finite = sum_run<T>(args, first, span.offset + end, streams);
      if (!finite && args.nonfinite) raise_flag(args.nonfinite, row);
    };
    for_elements(args.spans, body);
  });
}

void absmax(const AbsmaxArgs& args, void*) {
  if (args.spans.count == 0) return;
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    using C = ComputeOf<T>;
    const auto largest = [&](const Span& span, int64_t begin, int64_t end) {
      const uint8_t* data = args.input.data + (span.offset + begin) * sizeof(T);
      return convert<C>(bits_as<T>(largest_magnitude<T>(data, end - begin)));
    };
    std::memset(args.output.data, 0, args.spans.count * sizeof(C));
    if (reinterpret_cast<uintptr_t>(args.output.data) % sizeof(C) == 0) {
      for_elements(args.spans,
                   [&](int64_t row, const Span& span, int64_t begin, int64_t end) {
                     raise_to(args.output.data + row * sizeof(C),
                              bits_as<BitsOf<T>>(largest(span, begin, end)));
                   });
    } else {  // no atomic access there: one thread does a whole row
      for_units(args.spans, kWholeSpan,
                [&](int64_t row, const Span& span, int64_t, int64_t) {
                  store(args.output.data, row, largest(span, 0, span.length));
                });
    }
  });
}

void nonfinite_check(const FlagArgs& args, void*) {
  with_dtype(args.dtype,
             [&]<class T>(Tag<T>) { flag_spans(args, sizeof(T), holds_nonfinite<T>); });
}

void nonzero_check(const FlagArgs& args, void*) {
  with_dtype(args.dtype,
             [&]<class T>(Tag<T>) { flag_spans(args, sizeof(T), holds_nonzero<T>); });
}

void saturate(const SaturateArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    // Converted in the body: only there the caller's CPU flags are set aside.
    const auto body = [&](int64_t, const Span& span, int64_t begin, int64_t end) {
      uint8_t* data = args.data.data + (span.offset + begin) * sizeof(T);
      saturate_run<T>(data, convert<T>(args.limit), end - begin);
    };
    for_elements(args.spans, body);
  });
}

COMMKERN_END_ISA
