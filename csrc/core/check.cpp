#include "core/check.h"

namespace commkern {
namespace {

// A span of this many elements of any dtype stays below kMaxNbytes.
constexpr int64_t kMaxElements = kMaxNbytes / 8;

void check_field(const char* name, int64_t row, int64_t value, int64_t most) {
  if (value < 0 || value > most) {
    fail("spans[", row, "].", name, ": expected 0 ... ", most, ", got ", value);
  }
}

}  // namespace

void check_dtype(const char* name, DType dtype) {
  const auto code = static_cast<int32_t>(dtype);
  if (code < 0 || code > static_cast<int32_t>(DType::kBFloat16)) {
    fail(name,
         ": expected one of 0 (float32), 1 (float64), 2 (float16), 3 (bfloat16), ",
         "got ", code);
  }
}

void check_rounding(Rounding rounding) {
  const auto code = static_cast<int32_t>(rounding);
  if (code < 0 || code > static_cast<int32_t>(Rounding::kStochastic)) {
    fail("rounding: expected one of 0 (nearest), 1 (stochastic), got ", code);
  }
}

void check_block_size(int32_t block_size) {
  if (block_size < 16 || block_size > 8192 || block_size % 8 != 0) {
    fail("block_size: expected a multiple of 8 in 16 ... 8192, got ", block_size);
  }
}

void check_rotation(int32_t rotation) {
  if (!is_rotation(rotation)) {
    fail("rotation: expected a power of two in 32 ... 4096, got ", rotation);
  }
}

void check_spans(const SpanTable& spans) {
  if (spans.count < 0 || (spans.count > 0 && spans.rows == nullptr)) {
    fail("spans: expected rows, got a null table of ", spans.count, " rows");
  }
  for (int64_t row = 0; row < spans.count; ++row) {
    const Span& span = spans.rows[row];
    check_field("offset", row, span.offset, kMaxElements);
    check_field("length", row, span.length, kMaxElements);
    check_field("begin", row, span.begin, INT64_MAX);
    check_field("body", row, span.body, kMaxNbytes);
    check_field("earlier", row, span.earlier, kMaxNbytes);
    check_field("residual", row, span.residual, kMaxElements);
  }
}

void check_begins(const SpanTable& spans, int32_t unit, const char* field) {
  for (int64_t row = 0; row < spans.count; ++row) {
    const int64_t begin = spans.rows[row].begin;
    if (begin % unit != 0) {
      fail("spans[", row, "].begin: expected a multiple of ", field, " ", unit,
           ", got ", begin);
    }
  }
}

void check_range(const char* name, const void* data, int64_t held, int64_t row,
                 int64_t begin, int64_t nbytes) {
  if (held < 0 || held > kMaxNbytes) {
    fail(name, ": expected a size of 0 ... ", kMaxNbytes, " bytes, got ", held);
  }
  if (nbytes == 0 && begin <= held) return;
  if (data == nullptr) {
    fail(name, ": expected a buffer of at least ", begin + nbytes, " bytes (spans[",
         row, "]), got none");
  }
  if (begin > held || nbytes > held - begin) {
    fail(name, ": expected at least ", begin + nbytes, " bytes (spans[", row,
         "]), got ", held);
  }
}

void check_rows(const char* name, const MutableBytes& buffer, const SpanTable& spans,
                int64_t entry_nbytes) {
  if (spans.count == 0) return;
  check_range(name, buffer.data, buffer.nbytes, spans.count - 1,
              (spans.count - 1) * entry_nbytes, entry_nbytes);
}

void check_residual(const Residual& residual, const SpanTable& spans) {
  const bool has0 = residual.version[0].data != nullptr;
  const bool has1 = residual.version[1].data != nullptr;
  if (has0 != has1) {
    fail("residual: expected both versions or none, got ",
         has0 ? "only version 0" : "only version 1");
  }
  if (!has0) {
    if (residual.committed.data != nullptr) {
      fail("residual: expected two versions beside committed, got none");
    }
    return;
  }
  constexpr int64_t kSize = sizeof(float);
  for (int64_t row = 0; row < spans.count; ++row) {
    const Span& span = spans.rows[row];
    for (const Buffer<float>& version : residual.version) {
      check_range("residual", version.data, version.nbytes, row, span.residual * kSize,
                  span.length * kSize);
    }
    if (residual.committed.data != nullptr) {
      check_range("residual committed", residual.committed.data,
                  residual.committed.nbytes, row, span.parameter, 1);
    }
  }
}

}  // namespace commkern
