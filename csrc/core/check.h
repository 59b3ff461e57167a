// Checks of kernel arguments. Each throws std::invalid_argument with both values in the
// text; none reads through a pointer other than the span table's.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "core/types.h"

namespace commkern {

// Sizes above this are mistakes; below it the arithmetic on them cannot overflow.
inline constexpr int64_t kMaxNbytes = int64_t{1} << 60;

// std::invalid_argument whose text is the parts one after another.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

void check_dtype(const char* name, DType dtype);
void check_rounding(Rounding rounding);
void check_block_size(int32_t block_size);  // multiple of 8 in 16 ... 8192
// A size of transform: a power of two in 32 ... 4096.
constexpr bool is_rotation(int32_t size) {
  return size >= 32 && size <= 4096 && (size & (size - 1)) == 0;
}
void check_rotation(int32_t rotation);

// The rows' own fields: none negative, lengths that a buffer could hold.
void check_spans(const SpanTable& spans);
// Every span begins at a multiple of `unit`, the value of `field`, in its parameter.
void check_begins(const SpanTable& spans, int32_t unit,
                  const char* field = "block_size");

// `buffer` covers the elements [offset, offset + length) of every span.
template <class T>
void check_elements(const char* name, const Buffer<T>& buffer, const SpanTable& spans,
                    DType dtype);
// `buffer` covers the coded form of every span; body_nbytes(length) gives its size.
template <class T, class BodyNbytes>
void check_bodies(const char* name, const Buffer<T>& buffer, const SpanTable& spans,
                  BodyNbytes body_nbytes);
// One entry of `entry_nbytes` a span.
void check_rows(const char* name, const MutableBytes& buffer, const SpanTable& spans,
                int64_t entry_nbytes);
// At least one part; `check_part(text, part)` looks at each.
template <class CheckPart>
void check_parts(const Parts& parts, CheckPart check_part);

// Both versions cover every span, `committed` every parameter; or all are null.
void check_residual(const Residual& residual, const SpanTable& spans);

// The span at `row` needs bytes [begin, begin + nbytes) of a buffer.
void check_range(const char* name, const void* data, int64_t held, int64_t row,
                 int64_t begin, int64_t nbytes);

template <class T>
void check_elements(const char* name, const Buffer<T>& buffer, const SpanTable& spans,
                    DType dtype) {
  const int64_t size = dtype_nbytes(dtype);
  for (int64_t row = 0; row < spans.count; ++row) {
    const Span& span = spans.rows[row];
    check_range(name, buffer.data, buffer.nbytes, row, span.offset * size,
                span.length * size);
  }
}

template <class T, class BodyNbytes>
void check_bodies(const char* name, const Buffer<T>& buffer, const SpanTable& spans,
                  BodyNbytes body_nbytes) {
  for (int64_t row = 0; row < spans.count; ++row) {
    const Span& span = spans.rows[row];
    check_range(name, buffer.data, buffer.nbytes, row, span.body,
                body_nbytes(span.length));
  }
}

template <class CheckPart>
void check_parts(const Parts& parts, CheckPart check_part) {
  if (parts.count < 1 || parts.rows == nullptr) {
    fail("parts: expected at least 1 part, got ", parts.count);
  }
  for (int64_t rank = 0; rank < parts.count; ++rank) {
    check_part(("parts[" + std::to_string(rank) + "]").c_str(), parts.rows[rank]);
  }
}

}  // namespace commkern
