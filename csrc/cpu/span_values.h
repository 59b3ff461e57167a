// The values of a span in the compute type: of the input, or of the sum of the parts.
#pragma once

#include "cpu/coder.h"
#include "cpu/codes_float.h"
#include "cpu/hadamard.h"

COMMKERN_BEGIN_ISA

// Blocks are worked on a few at a time, so that one's divisions pass while another's
// codes are made; more at once makes the traffic to memory uneven (measured).
constexpr int64_t kBatchElements = 512;

// Whole units that are worked on at once, in elements.
COMMKERN_INLINE int64_t batch_of(const Format& f) {
  const int64_t unit = unit_of(f);
  return unit < kBatchElements ? kBatchElements / unit * unit : unit;
}

// The scales in the body of a span.
template <class C>
struct StoredScales {
  const Format& format;
  const BodyLayout& layout;
  const uint8_t* body;
  C head;

  COMMKERN_MEMBER StoredScales(const Format& f, const BodyLayout& layout,
                               const uint8_t* body)
      : format(f), layout(layout), body(body), head(1) {
    if (has_head(f)) head = load<C>(body, 0);
  }

  COMMKERN_MEMBER BlockScale<C> at(int64_t block) const {
    if (format.scales == Scales::kSpan) {
      return decoding_scale(format, head,
                            has_offsets(format) ? load<C>(body, 1) : C(0));
    }
    const C stored =
        decode_scale<C>(format.scales, bits_at(layout.scale_at(block)), head);
    if (!has_offsets(format)) return decoding_scale(format, stored, C(0));
    const uint64_t offset = bits_at(layout.offset_at(block));
    return decoding_scale(format, stored, decode_scale<C>(format.scales, offset, head));
  }

 private:
  COMMKERN_MEMBER uint64_t bits_at(int64_t at) const {
    switch (layout.scale_nbytes) {
      case 1: return body[at];
      case 2: return load<uint16_t>(body + at, 0);
      default: return load<BitsOf<C>>(body + at, 0);
    }
  }
};

// The whole vectors of e4m3 scales; returns how many scales that is.
template <class C>
COMMKERN_INLINE int64_t read_e4m3_scales(const uint8_t* bytes, int64_t count, C head,
                                         BlockScales<C>& scales) {
  int64_t k = 0;
  if constexpr (kHasVectors<C>) {
    for (; k + kLanes <= count; k += kLanes) {
      const Floats value = Minifloat<Float8E4M3>::decode_lanes(widen_bytes(bytes + k));
      store_floats<float>(scales.scale, k, value * head);
    }
  }
  return k;
}

// Reads what decoding needs of `count` scales from block `first` on; returns whether
// all are finite.
template <class C>
COMMKERN_INLINE bool read_scales(const StoredScales<C>& stored, int64_t first,
                                 int64_t count, BlockScales<C>& scales) {
  const Format& f = stored.format;
  const uint8_t* bytes = stored.body + stored.layout.scale_at(first);
  BitsOf<C> most = 0;
  const auto note = [&](C scale) {
    const BitsOf<C> bits = magnitude_bits(scale);
    most = bits > most ? bits : most;
  };
  int64_t k = 0;
  if (f.scales == Scales::kCompute && !has_offsets(f)) {
    for (; k < count; ++k) note(scales.scale[k] = load<C>(bytes, k));
  } else if (has_power_scales(f)) {
    for (; k < count; ++k) note(scales.scale[k] = e8m0_value<C>(bytes[k]));
  } else if (f.scales == Scales::kE4M3) {
    k = read_e4m3_scales(bytes, count, stored.head, scales);
    for (int64_t i = 0; i < k; ++i) note(scales.scale[i]);
  }
  for (; k < count; ++k) {
    const BlockScale<C> s = stored.at(first + k);
    scales.scale[k] = s.scale;
    scales.offset[k] = s.offset;
    scales.halved[k] = s.halved;
    note(s.scale);
  }
  return is_finite(bits_as<C>(most));
}

// A run of decoding, from block `first` on; returns whether all scales are finite.
template <class C>
COMMKERN_INLINE bool decode_blocks(const StoredScales<C>& stored, Decode<C> decode,
                                   int64_t first, int64_t count, C factor,
                                   uint8_t* output, bool streams) {
  BlockScales<C> scales;
  const int64_t block_size = stored.format.block_size;
  const bool finite = read_scales(stored, first, ceil_div(count, block_size), scales);
  decode({stored.body + stored.layout.codes_at(first), stored.layout.block_nbytes,
          count, block_size, scales, factor, output, streams});
  return finite;
}

// The rotation of a format, which turns all parameters alike: a payload decodes from
// its bytes alone, and these hold neither seed nor name.
class SpanRotation {
 public:
  COMMKERN_MEMBER SpanRotation(const Format& format, const Span& span)
      : rotation_(0, 0, format.rotation), begin_(span.begin), size_(format.rotation) {}

  COMMKERN_MEMBER explicit operator bool() const { return size_ != 0; }

  // Of the elements [first, first + n) of the span, which whole pieces make up.
  template <class C>
  __attribute__((noinline)) void rotate(const void* source, C* values, int64_t first,
                                        int64_t n) {
    rotation_.rotate(source, values, n, begin_ + first);
  }
  template <class C>
  __attribute__((noinline)) void unrotate(C* values, int64_t first, int64_t n) {
    rotation_.unrotate(values, values, n, begin_ + first);
  }

 private:
  Rotation rotation_;
  int64_t begin_;
  int32_t size_;
};

// values = a - values.
template <class C>
COMMKERN_INLINE void subtract_from(const uint8_t* a, C* values, int64_t n) {
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    for (; i + kLanes <= n; i += kLanes) {
      store_floats<float>(values, i,
                          load_floats<float>(a, i) - load_floats<float>(values, i));
    }
  }
  for (; i < n; ++i) values[i] = load<C>(a, i) - values[i];
}

// x in the compute type, to which the loops add the residual; where they do not, of
// fp64 and rotated, x + residual.
template <class T>
struct InputValues {
  using C = ComputeOf<T>;
  static constexpr bool kLeavesResidual = kHasVectors<C>;

  const uint8_t* input;     // of the span
  const uint8_t* residual;  // the version to read, or null
  SpanRotation& rotation;

  // The elements [first, first + n) of the span: in `scratch` unless they lie ready.
  COMMKERN_MEMBER const uint8_t* get(int64_t first, int64_t n, C* scratch) const {
    if (!rotation) {
      return kLeavesResidual ? widened(first, n, scratch) : summed(first, n, scratch);
    }
    rotation.rotate(summed(first, n, scratch), scratch, first, n);
    return reinterpret_cast<const uint8_t*>(scratch);
  }

  // The residual of elements from `first` on that `get` leaves to be added, or null.
  COMMKERN_MEMBER const uint8_t* added(int64_t first) const {
    return rotation || !kLeavesResidual ? nullptr : residual_at(first);
  }

  // The errors of the decoded `values`, in their place.
  COMMKERN_MEMBER void put_errors(int64_t first, int64_t n, C* scratch,
                                  C* values) const {
    if (rotation) rotation.unrotate(values, first, n);
    subtract_from(summed(first, n, scratch), values, n);
  }

 private:
  COMMKERN_MEMBER const uint8_t* input_at(int64_t first) const {
    return input + first * static_cast<int64_t>(sizeof(T));
  }
  COMMKERN_MEMBER const uint8_t* residual_at(int64_t first) const {
    if (residual == nullptr) return nullptr;
    return residual + first * static_cast<int64_t>(sizeof(float));
  }
  COMMKERN_MEMBER const uint8_t* widened(int64_t first, int64_t n, C* scratch) const {
    if constexpr (is_same<T, C>) return input_at(first);
    widen(input_at(first), n, scratch);
    return reinterpret_cast<const uint8_t*>(scratch);
  }
  COMMKERN_MEMBER const uint8_t* summed(int64_t first, int64_t n, C* scratch) const {
    if (residual == nullptr) return widened(first, n, scratch);
    add(input_at(first), residual_at(first), n, scratch);
    return reinterpret_cast<const uint8_t*>(scratch);
  }

  static COMMKERN_MEMBER void widen(const uint8_t* x, int64_t n, C* out) {
    int64_t i = 0;
    if constexpr (kHasVectors<T>) {
      for (; i + kLanes <= n; i += kLanes) {
        store_floats<float>(out, i, load_floats<T>(x, i));
      }
    }
    for (; i < n; ++i) out[i] = load_compute<T>(x, i);
  }
  static COMMKERN_MEMBER void add(const uint8_t* x, const uint8_t* r, int64_t n,
                                  C* out) {
    int64_t i = 0;
    if constexpr (kHasVectors<T>) {
      for (; i + kLanes <= n; i += kLanes) {
        store_floats<float>(out, i, load_floats<T>(x, i) + load_floats<float>(r, i));
      }
    }
    for (; i < n; ++i) {
      out[i] = load_compute<T>(x, i) + static_cast<C>(load<float>(r, i));
    }
  }
};

// The sum of the decoded parts, in rank order.
template <class C>
struct SumValues {
  const Parts& parts;
  const Format& format;
  int64_t body;  // of the span, in every part
  BodyLayout layout;
  const Coder<C>& coder;
  SpanRotation& rotation;  // of the parts, which are summed as they are

  // `first` begins a block.
  COMMKERN_MEMBER const uint8_t* get(int64_t first, int64_t n, C* scratch) const {
    auto* sums = reinterpret_cast<uint8_t*>(scratch);
    const int64_t block = first / format.block_size;
    for (int64_t rank = 0; rank < parts.count; ++rank) {
      const StoredScales<C> stored(format, layout, parts.rows[rank].data + body);
      decode_blocks<C>(stored, coder.decode[rank > 0], block, n, C(1), sums, false);
    }
    return sums;
  }

  COMMKERN_MEMBER const uint8_t* added(int64_t) const { return nullptr; }

  // The errors of the decoded `values`, in their place; `scratch` holds the sums.
  COMMKERN_MEMBER void put_errors(int64_t first, int64_t n, C* scratch,
                                  C* values) const {
    subtract_from(reinterpret_cast<const uint8_t*>(scratch), values, n);
    if (rotation) rotation.unrotate(values, first, n);
  }
};

COMMKERN_END_ISA
