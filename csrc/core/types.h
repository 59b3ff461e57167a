// Plain data shared by every layer. No std containers: kernel objects include this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commkern {

// Codes are part of the wire format (docs/wire-format.md); never renumber.
enum class DType : int32_t { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };
enum class Rounding : int32_t { kNearest = 0, kStochastic = 1 };

// The names of an enum's values, in order: what Python and plans call them.
template <class Enum>
struct NamesOf;
template <>
struct NamesOf<DType> {
  static constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16"};
};
template <>
struct NamesOf<Rounding> {
  static constexpr const char* kNames[] = {"nearest", "stochastic"};
};

// One contiguous run of one parameter's elements. Mirrored by commkern.spans.SPAN.
struct Span {
  int64_t offset;         // first element in the data buffer
  int64_t length;         // elements
  int64_t begin;          // index of that first element within its parameter
  int64_t body;           // byte offset of the span's coded form in a payload
  int64_t earlier;        // the same in the stage before, for coders of several stages
  int64_t residual;       // first element in either version of the residual
  uint32_t parameter_id;  // CRC-32C of the parameter's name, keys the random draws
  uint32_t parameter;     // row of the parameter in per-parameter tables
};
static_assert(sizeof(Span) == 56);

struct SpanTable {
  const Span* rows = nullptr;
  int64_t count = 0;
};

// A pointer with the bytes behind it, so that one check serves binding and plan.
template <class T>
struct Buffer {
  T* data = nullptr;
  int64_t nbytes = 0;
  explicit operator bool() const { return data != nullptr; }
};
using ConstBytes = Buffer<const uint8_t>;
using MutableBytes = Buffer<uint8_t>;

// One coded payload per rank, in rank order.
struct Parts {
  const ConstBytes* rows = nullptr;
  int64_t count = 0;
};

// Two versions of the error-feedback residual. A kernel reads version
// committed[parameter] (0 where `committed` is null) and writes the other one.
// Both may be the same memory (in place). Null versions: no error feedback.
struct Residual {
  Buffer<float> version[2];
  ConstBytes committed;
  explicit operator bool() const { return version[0].data != nullptr; }
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t dtype_nbytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 8;
    case DType::kFloat32: return 4;
    default: return 2;
  }
}

// Arithmetic is fp64 for fp64 data and fp32 for everything else.
constexpr int64_t compute_nbytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : 4;
}

}  // namespace commkern
