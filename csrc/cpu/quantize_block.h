// One block of a symmetric quantiser: its scale, its codes, and its values from codes.
//
// A `Source` gives what is quantised: at(i) an element, lanes(i) a vector from i on, in
// the compute type. A `Sink` takes the errors: put(i, error), or keep(n) for the old
// residual of a block that is not finite.
#pragma once

#include "core/bitpack.h"
#include "cpu/random.h"

COMMKERN_BEGIN_ISA

constexpr int32_t levels_of(int bits) { return (1 << (bits - 1)) - 1; }

// Where a block's coded form goes and which draws round it.
struct BlockOut {
  uint8_t* scale;
  uint8_t* codes;
  uint64_t first_draw;
};

template <class C, class Source>
COMMKERN_INLINE C block_absmax(const Source& source, int64_t n) {
  BitsOf<C> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<C>) {
    Ints lanes{};
    for (; i + kLanes <= n; i += kLanes) {
      lanes = larger(lanes, magnitude_of(source.lanes(i)));
    }
    most = largest_lane(lanes);
  }
  for (; i < n; ++i) {
    const BitsOf<C> bits = magnitude_bits(source.at(i));
    most = bits > most ? bits : most;
  }
  return bits_as<C>(most);
}

template <class C, bool kStochastic>
COMMKERN_INLINE int32_t code_of(C a, const BlockScale<C>& s, int32_t levels,
                                const uint8_t* bytes, int64_t i) {
  C position = a * s.lift * s.reciprocal;
  if constexpr (kStochastic) {
    position = __builtin_floor(position + rounding_offset<C>(bytes[i % 16]));
  } else {
    position = __builtin_rint(position);
  }
  const C limit = static_cast<C>(levels);
  position = position > limit ? limit : position;
  position = position < -limit ? -limit : position;
  return static_cast<int32_t>(position);
}

// Codes go out in groups of eight; blocks start on such a group.
template <class C, int kBits, bool kStochastic, class Source, class Sink>
COMMKERN_INLINE void quantize_scalar(const Source& source, const Sink& sink,
                                     const BlockScale<C>& s, int64_t begin, int64_t n,
                                     const BlockOut& out, Draws& draws) {
  uint8_t group[kPackGroup];
  for (int64_t i = begin; i < n; ++i) {
    const uint8_t* bytes =
        kStochastic ? draws.bytes_of(out.first_draw + i / 16) : nullptr;
    const C a = source.at(i);
    const int32_t code = code_of<C, kStochastic>(a, s, levels_of(kBits), bytes, i);
    sink.put(i, a - static_cast<C>(code) * s.scale);
    const int64_t j = i % kPackGroup;
    group[j] = static_cast<uint8_t>(code);
    if (j == kPackGroup - 1 || i == n - 1) {
      const int count = static_cast<int>(j) + 1;
      store_word(pack_word(group, count, kBits), out.codes + i / kPackGroup * kBits,
                 packed_nbytes(count, kBits));
    }
  }
}

// The same for vectors of an ordinary block, elements [begin, end). No code needs the
// clamp: |a * r| <= L (1 + 2^-22), as three roundings went into it. `bytes` are those
// of element `begin` and on.
template <int kBits, bool kStochastic, class Source, class Sink>
COMMKERN_INLINE void quantize_lanes(const Source& source, const Sink& sink,
                                    const BlockScale<float>& s, int64_t begin,
                                    int64_t end, uint8_t* codes, const uint8_t* bytes) {
  const Floats scale = broadcast(s.scale);
  const Floats reciprocal = broadcast(s.reciprocal);
  for (int64_t i = begin; i < end; i += kLanes) {
    const Floats a = source.lanes(i);
    Ints code;
    if constexpr (kStochastic) {
      code = round_down(a * reciprocal + rounding_offsets(bytes + i - begin));
    } else {
      code = round_nearest(a * reciprocal);
    }
    sink.put(i, a - to_floats(code) * scale);
    store_codes<kBits>(codes + i * kBits / 8, code);
  }
}

// All whole vectors, from one batch of random bytes to the next; returns the element it
// came to, which begins a group.
template <int kBits, bool kStochastic, class Source, class Sink>
COMMKERN_INLINE int64_t quantize_vectors(const Source& source, const Sink& sink,
                                         const BlockScale<float>& s, int64_t n,
                                         const BlockOut& out, Draws& draws) {
  constexpr int kWhole = kLanes > kPackGroup ? kLanes : kPackGroup;
  const int64_t end = n / kWhole * kWhole;
  if constexpr (!kStochastic) {
    quantize_lanes<kBits, false>(source, sink, s, 0, end, out.codes, nullptr);
    return end;
  }
  for (int64_t i = 0; i < end;) {
    const uint64_t draw = out.first_draw + i / 16;
    const uint8_t* bytes = draws.bytes_of(draw);
    const int64_t next = smaller(i + 16 * draws.left_from(draw), end);
    quantize_lanes<kBits, true>(source, sink, s, i, next, out.codes, bytes);
    i = next;
  }
  return end;
}

// All codes are 0, and so the error is the value itself.
template <class C, int kBits, class Source, class Sink>
COMMKERN_INLINE void quantize_zeros(const Source& source, const Sink& sink, int64_t n,
                                    const BlockOut& out) {
  std::memset(out.codes, 0, packed_nbytes(n, kBits));
  if constexpr (Sink::kIgnores) return;
  for (int64_t i = 0; i < n; ++i) sink.put(i, source.at(i));
}

template <class C, int kBits, bool kStochastic, class Source, class Sink>
COMMKERN_INLINE void quantize_block(const Source& source, const Sink& sink, C absmax,
                                    int64_t n, const BlockOut& out, Draws& draws) {
  if (!is_finite(absmax)) {
    store(out.scale, 0, bits_as<C>(FloatBits<C>::kNan));
    std::memset(out.codes, 0, packed_nbytes(n, kBits));
    return sink.keep(n);
  }
  const BlockScale<C> s = block_scale(absmax, levels_of(kBits));
  store(out.scale, 0, s.scale);
  if (s.scale == 0) return quantize_zeros<C, kBits>(source, sink, n, out);
  int64_t begin = 0;
  if constexpr (kHasVectors<C>) {
    if (s.lift == 1) {
      begin = quantize_vectors<kBits, kStochastic>(source, sink, s, n, out, draws);
    }
  }
  quantize_scalar<C, kBits, kStochastic>(source, sink, s, begin, n, out, draws);
}

// ---- decoding ----

template <class C, int kBits>
COMMKERN_INLINE C decode(const uint8_t* codes, int64_t i, C scale) {
  const int64_t bit = i * kBits;
  const uint32_t code = static_cast<uint32_t>(codes[bit / 8]) >> (bit % 8);
  return static_cast<C>(signed_code(code, kBits)) * scale;
}

template <int kBits>
COMMKERN_INLINE Floats decode_lanes(const uint8_t* codes, int64_t i, float scale) {
  return to_floats(load_codes<kBits>(codes + i * kBits / 8)) * broadcast(scale);
}

// ---- where the blocks of a span lie ----

struct BlockRange {
  int64_t first, last;
};

struct BodyLayout {
  int64_t block_size;
  int64_t block_nbytes;  // of the codes
  int64_t scale_nbytes;
  int64_t codes_offset;

  template <class Args>
  BodyLayout(const Args& args, const Span& span)
      : block_size(args.block_size),
        block_nbytes(packed_nbytes(args.block_size, args.bits)),
        scale_nbytes(compute_nbytes(args.dtype)),
        codes_offset(ceil_div(span.length, block_size) * scale_nbytes) {}

  int64_t scale_at(int64_t block) const { return block * scale_nbytes; }
  int64_t codes_at(int64_t block) const { return codes_offset + block * block_nbytes; }
};

COMMKERN_END_ISA
