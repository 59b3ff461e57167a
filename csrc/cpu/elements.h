// Elements in memory of any alignment, and the choice of code by dtype.
#pragma once

#include <cstring>

#include "cpu/isa.h"

COMMKERN_BEGIN_ISA

template <class T>
struct Tag {
  using type = T;
};

// fn(Tag<T>{}) for the element type of `dtype`.
template <class Fn>
COMMKERN_INLINE void with_dtype(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(Tag<float>{});
    case DType::kFloat64: return fn(Tag<double>{});
    case DType::kFloat16: return fn(Tag<Half>{});
    case DType::kBFloat16: return fn(Tag<BFloat16>{});
  }
}

template <class T>
COMMKERN_INLINE T load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(base) + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
COMMKERN_INLINE void store(void* base, int64_t index, T value) {
  std::memcpy(static_cast<uint8_t*>(base) + index * sizeof(T), &value, sizeof(T));
}

template <class T>
COMMKERN_INLINE ComputeOf<T> load_compute(const void* base, int64_t index) {
  return convert<ComputeOf<T>>(load<T>(base, index));
}

COMMKERN_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A span's residual: the version to read and the one to write.
struct ResidualSpan {
  const uint8_t* old_values = nullptr;
  uint8_t* new_values = nullptr;

  COMMKERN_MEMBER explicit operator bool() const { return new_values != nullptr; }
  COMMKERN_MEMBER ResidualSpan from(int64_t element) const {
    const int64_t at = element * static_cast<int64_t>(sizeof(float));
    return {old_values + at, new_values + at};
  }
};

COMMKERN_INLINE ResidualSpan residual_of(const Residual& residual, const Span& span) {
  if (residual.version[0].data == nullptr) return {};
  const uint8_t* committed = residual.committed.data;
  const int current = committed != nullptr && committed[span.parameter] != 0 ? 1 : 0;
  const auto base = [&](int version) {
    return reinterpret_cast<uint8_t*>(residual.version[version].data);
  };
  return ResidualSpan{base(current), base(1 - current)}.from(span.residual);
}

COMMKERN_END_ISA
