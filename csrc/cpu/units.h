// Work over a span table, split among threads by units of elements within each span.
#pragma once

#include "core/thread_pool.h"
#include "cpu/simd.h"

COMMKERN_BEGIN_ISA

// Fewer elements than this a thread are not worth waking it.
inline constexpr int64_t kElementsPerThread = 64 * 1024;

// The unit that makes one of every span, whatever its length.
inline constexpr int64_t kWholeSpan = int64_t{1} << 60;

template <class Body>
struct UnitLoop {
  const SpanTable& spans;
  int64_t unit;
  const Body& body;

  static void run(void* self, int64_t begin, int64_t end) {
    const UnitLoop& loop = *static_cast<const UnitLoop*>(self);
    int64_t before = 0;  // units of the rows so far
    for (int64_t row = 0; row < loop.spans.count && before < end; ++row) {
      const Span& span = loop.spans.rows[row];
      const int64_t units = ceil_div(span.length, loop.unit);
      const int64_t first = begin > before ? begin - before : 0;
      const int64_t last = smaller(end - before, units);
      if (first < last) loop.body(row, span, first, last);
      before += units;
    }
    stream_fence();  // before another thread learns that this share is done
  }
};

// body(row, span, first, last): the units [first, last) of that span, in any thread.
// The last unit of a span may be short.
template <class Body>
COMMKERN_INLINE void for_units(const SpanTable& spans, int64_t unit, const Body& body) {
  int64_t count = 0;
  for (int64_t row = 0; row < spans.count; ++row) {
    count += ceil_div(spans.rows[row].length, unit);
  }
  UnitLoop<Body> loop{spans, unit, body};
  parallel_for(count, ceil_div(kElementsPerThread, unit), UnitLoop<Body>::run, &loop);
}

// The same for kernels without blocks: body(row, span, begin, end) in elements.
template <class Body>
COMMKERN_INLINE void for_elements(const SpanTable& spans, const Body& body) {
  constexpr int64_t kUnit = 4096;
  const auto unit_body = [&](int64_t row, const Span& span, int64_t first,
                             int64_t last) {
    body(row, span, first * kUnit, smaller(last * kUnit, span.length));
  };
  for_units(spans, kUnit, unit_body);
}

COMMKERN_INLINE void raise_flag(const MutableBytes& flags, int64_t row) {
  __atomic_store_n(flags.data + row, uint8_t{1}, __ATOMIC_RELAXED);
}

COMMKERN_END_ISA
