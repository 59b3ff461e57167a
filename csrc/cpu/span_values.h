// The values of a span in the compute type: of the input, or of the sum of the parts.
#pragma once

#include "cpu/coder.h"

COMMKERN_BEGIN_ISA

// Most elements that are worked on at once: a unit, which is a whole block or rotation.
constexpr int64_t kMaxUnit = 8192;
// Blocks are worked on a few at a time, so that one's divisions pass while another's
// codes are made; more at once makes the traffic to memory uneven (measured).
constexpr int64_t kBatchElements = 512;
constexpr int64_t kMaxBlocks = kMaxUnit / 16;

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
    return decoding_scale(format, stored,
                          decode_scale<C>(format.scales, offset, head));
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

// A run of decoding, from block `first` on; returns whether all scales are finite.
template <class C>
COMMKERN_INLINE bool decode_blocks(const StoredScales<C>& stored, Decode<C> decode,
                                   int64_t first, int64_t count, C factor,
                                   uint8_t* output, bool streams) {
  BlockScale<C> scales[kMaxBlocks];
  const int64_t block_size = stored.format.block_size;
  bool finite = true;
  for (int64_t k = 0; k * block_size < count; ++k) {
    scales[k] = stored.at(first + k);
    finite = finite && is_finite(scales[k].scale);
  }
  decode({stored.body + stored.layout.codes_at(first), stored.layout.block_nbytes,
          count, block_size, scales, factor, output, streams});
  return finite;
}

// x, or x + residual, in the compute type.
template <class T>
struct InputValues {
  using C = ComputeOf<T>;
  const uint8_t* input;     // of the span
  const uint8_t* residual;  // the version to read, or null

  // The elements [first, first + n) of the span: in `scratch` unless they lie ready.
  COMMKERN_MEMBER const uint8_t* get(int64_t first, int64_t n, C* scratch) const {
    const uint8_t* x = input + first * static_cast<int64_t>(sizeof(T));
    if (residual != nullptr) {
      add(x, residual + first * static_cast<int64_t>(sizeof(float)), n, scratch);
    } else if constexpr (is_same<T, C>) {
      return x;
    } else {
      widen(x, n, scratch);
    }
    return reinterpret_cast<const uint8_t*>(scratch);
  }

 private:
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
};

COMMKERN_END_ISA
