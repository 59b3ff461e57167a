#include "kernels/quantize.h"

#include "core/bitpack.h"
#include "cpu/random.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

constexpr int32_t levels_of(int bits) { return (1 << (bits - 1)) - 1; }

// ---- what is quantised: a block's element i, or lanes from i, in the compute type
// ----

template <class T>
struct PlainSource {
  const uint8_t* input;
  COMMKERN_MEMBER ComputeOf<T> at(int64_t i) const { return load_compute<T>(input, i); }
  COMMKERN_MEMBER Floats lanes(int64_t i) const { return load_floats<T>(input, i); }
};

template <class T>
struct FeedbackSource {
  const uint8_t* input;
  const uint8_t* residual;
  COMMKERN_MEMBER ComputeOf<T> at(int64_t i) const {
    return load_compute<T>(input, i) +
           static_cast<ComputeOf<T>>(load<float>(residual, i));
  }
  COMMKERN_MEMBER Floats lanes(int64_t i) const {
    return load_floats<T>(input, i) + load_floats<float>(residual, i);
  }
};

template <class C>
struct BufferSource {
  const C* values;
  COMMKERN_MEMBER C at(int64_t i) const { return values[i]; }
  COMMKERN_MEMBER Floats lanes(int64_t i) const {
    return load_floats<float>(values, i);
  }
};

// ---- where the error goes ----

struct NoSink {
  static constexpr bool kIgnores = true;
  template <class E>
  COMMKERN_MEMBER void put(int64_t, E) const {}
  COMMKERN_MEMBER void keep(int64_t) const {}
};

struct WriteSink {
  static constexpr bool kIgnores = false;
  ResidualSpan residual;
  bool streams;  // past the cache; the address allows it

  template <class C>
  COMMKERN_MEMBER void put(int64_t i, C error) const {
    store(residual.new_values, i, static_cast<float>(error));
  }
  COMMKERN_MEMBER void put(int64_t i, Floats error) const {
    put_elements<float>(residual.new_values, i, error, streams);
  }
  // The block is not finite: the new residual is the old one.
  COMMKERN_MEMBER void keep(int64_t n) const {
    std::memmove(residual.new_values, residual.old_values, n * sizeof(float));
  }
};

struct AddSink {
  static constexpr bool kIgnores = false;
  uint8_t* residual;

  template <class C>
  COMMKERN_MEMBER void put(int64_t i, C error) const {
    store(residual, i, load<float>(residual, i) + static_cast<float>(error));
  }
  COMMKERN_MEMBER void put(int64_t i, Floats error) const {
    store_floats<float>(residual, i, load_floats<float>(residual, i) + error);
  }
  COMMKERN_MEMBER void keep(int64_t) const {}
};

// ---- one block ----

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

// Where a block's coded form goes and which draws round it.
struct BlockOut {
  uint8_t* scale;
  uint8_t* codes;
  uint64_t first_draw;
};

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

// The same for whole vectors of an ordinary block, up to the element it returns, which
// begins a group. No code needs the clamp: |a * r| <= L (1 + 2^-22), as three roundings
// went into it.
template <int kBits, bool kStochastic, class Source, class Sink>
COMMKERN_INLINE int64_t quantize_vectors(const Source& source, const Sink& sink,
                                         const BlockScale<float>& s, int64_t n,
                                         const BlockOut& out, Draws& draws) {
  const Floats scale = broadcast(s.scale);
  const Floats reciprocal = broadcast(s.reciprocal);
  constexpr int kWhole = kLanes > kPackGroup ? kLanes : kPackGroup;
  const int64_t end = n / kWhole * kWhole;
  for (int64_t i = 0; i < end; i += kLanes) {
    const Floats a = source.lanes(i);
    Ints codes;
    if constexpr (kStochastic) {
      const uint8_t* bytes = draws.bytes_of(out.first_draw + i / 16) + i % 16;
      const Floats byte = to_floats(widen_bytes(bytes));
      codes = round_down(a * reciprocal + (byte + 0.5f) * 0x1p-8f);
    } else {
      codes = round_nearest(a * reciprocal);
    }
    sink.put(i, a - to_floats(codes) * scale);
    store_codes<kBits>(out.codes + i * kBits / 8, codes);
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
COMMKERN_INLINE void quantize_block(const Source& source, const Sink& sink, int64_t n,
                                    const BlockOut& out, Draws& draws) {
  const C absmax = block_absmax<C>(source, n);
  if (!is_finite(absmax)) {
    store(out.scale, 0, bits_as<C>(FloatBits<C>::kNan));
    std::memset(out.codes, 0, packed_nbytes(n, kBits));
    sink.keep(n);
    return;
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

// ---- the blocks of a span ----

struct BlockRange {
  int64_t first, last;
};

// Where a span's blocks lie in its coded form.
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

template <class Args>
COMMKERN_INLINE PhiloxStream stream_of(const Args& args, const Span& span) {
  return {args.seed, span.parameter_id, args.step, args.stream};
}

// Draws are counted from the start of the parameter.
COMMKERN_INLINE uint64_t first_draw_of(const Span& span, int64_t block,
                                       int64_t block_size) {
  return static_cast<uint64_t>(span.begin / block_size + block) *
         ceil_div(block_size, 16);
}

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};
template <class Fn>
COMMKERN_INLINE void with_bits(int32_t bits, Fn fn) {
  if (bits == 8) return fn(Int<8>{});
  return fn(Int<4>{});
}
template <class Fn>
COMMKERN_INLINE void with_rounding(Rounding rounding, Fn fn) {
  if (rounding == Rounding::kStochastic) return fn(Int<1>{});
  return fn(Int<0>{});
}

template <class T, int kBits, bool kStochastic>
void quantize_span(const QuantizeArgs& args, const Span& span, BlockRange blocks,
                   bool streams) {
  using C = ComputeOf<T>;
  const BodyLayout layout(args, span);
  const uint8_t* input = args.input.data + span.offset * sizeof(T);
  uint8_t* body = args.payload.data + span.body;
  const ResidualSpan residual = residual_of(args.residual, span);
  Draws draws(stream_of(args, span));
  for (int64_t block = blocks.first; block < blocks.last; ++block) {
    const int64_t begin = block * layout.block_size;
    const int64_t n = smaller(layout.block_size, span.length - begin);
    const BlockOut out{body + layout.scale_at(block), body + layout.codes_at(block),
                       first_draw_of(span, block, layout.block_size)};
    const uint8_t* x = input + begin * sizeof(T);
    if (residual) {
      const ResidualSpan here = residual.from(begin);
      const bool streams_here = streams && can_stream(here.new_values);
      quantize_block<C, kBits, kStochastic>(FeedbackSource<T>{x, here.old_values},
                                            WriteSink{here, streams_here}, n, out,
                                            draws);
    } else {
      quantize_block<C, kBits, kStochastic>(PlainSource<T>{x}, NoSink{}, n, out, draws);
    }
  }
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

template <class T, int kBits, bool kAdd>
COMMKERN_INLINE void dequantize_block(const uint8_t* codes, ComputeOf<T> scale,
                                      ComputeOf<T> factor, uint8_t* output, int64_t n,
                                      bool streams) {
  using C = ComputeOf<T>;
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    for (; i + kLanes <= n; i += kLanes) {
      Floats y = decode_lanes<kBits>(codes, i, scale) * factor;
      if constexpr (kAdd) y = load_floats<T>(output, i) + y;
      put_elements<T>(output, i, narrow<T>(y), streams);
    }
  }
  for (; i < n; ++i) {
    C y = decode<C, kBits>(codes, i, scale) * factor;
    if constexpr (kAdd) y = load_compute<T>(output, i) + y;
    store(output, i, convert<T>(y));
  }
}

template <class T, int kBits, bool kAdd>
void dequantize_span(const DequantizeArgs& args, const Span& span, int64_t row,
                     BlockRange blocks, bool streams) {
  using C = ComputeOf<T>;
  const BodyLayout layout(args, span);
  const uint8_t* body = args.payload.data + span.body;
  uint8_t* output = args.output.data + span.offset * sizeof(T);
  const C factor = static_cast<C>(args.scale);
  bool finite = true;
  for (int64_t block = blocks.first; block < blocks.last; ++block) {
    const int64_t begin = block * layout.block_size;
    const int64_t n = smaller(layout.block_size, span.length - begin);
    const C scale = load<C>(body + layout.scale_at(block), 0);
    finite = finite && is_finite(scale);
    uint8_t* y = output + begin * sizeof(T);
    dequantize_block<T, kBits, kAdd>(body + layout.codes_at(block), scale, factor, y, n,
                                     streams && can_stream(y));
  }
  if (!finite && args.nonfinite) raise_flag(args.nonfinite, row);
}

template <bool kAdd>
void dequantize_any(const DequantizeArgs& args) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    const bool streams = !kAdd && streams_past_cache<T>(args.spans);
    with_bits(args.bits, [&](auto bits) {
      for_units(args.spans, args.block_size,
                [&](int64_t row, const Span& span, int64_t first, int64_t last) {
                  dequantize_span<T, bits.value, kAdd>(args, span, row, {first, last},
                                                       streams);
                });
    });
  });
}

// ---- the owner's step ----

template <class C, int kBits>
COMMKERN_INLINE void sum_block(const Parts& parts, int64_t scale_at, int64_t codes_at,
                               C* acc, int64_t n) {
  for (int64_t rank = 0; rank < parts.count; ++rank) {
    const uint8_t* part = parts.rows[rank].data;
    const C scale = load<C>(part + scale_at, 0);
    const uint8_t* codes = part + codes_at;
    int64_t i = 0;
    if constexpr (kHasVectors<C>) {
      for (; i + kLanes <= n; i += kLanes) {
        const Floats value = decode_lanes<kBits>(codes, i, scale);
        const Floats sum = rank == 0 ? value : load_floats<float>(acc, i) + value;
        store_floats<float>(acc, i, sum);
      }
    }
    for (; i < n; ++i) {
      const C value = decode<C, kBits>(codes, i, scale);
      acc[i] = rank == 0 ? value : acc[i] + value;
    }
  }
}

constexpr int64_t kMaxBlock = 8192;

template <class C, int kBits, bool kStochastic>
void requantize_span(const RequantizeSumArgs& args, const Span& span,
                     BlockRange blocks) {
  const BodyLayout layout(args, span);
  uint8_t* body = args.payload.data + span.body;
  const ResidualSpan residual = residual_of(args.residual, span);
  Draws draws(stream_of(args, span));
  alignas(64) C acc[kMaxBlock];
  const BufferSource<C> source{acc};
  for (int64_t block = blocks.first; block < blocks.last; ++block) {
    const int64_t begin = block * layout.block_size;
    const int64_t n = smaller(layout.block_size, span.length - begin);
    const int64_t scale_at = layout.scale_at(block);
    const int64_t codes_at = layout.codes_at(block);
    const BlockOut out{body + scale_at, body + codes_at,
                       first_draw_of(span, block, layout.block_size)};
    sum_block<C, kBits>(args.parts, span.body + scale_at, span.body + codes_at, acc, n);
    if (residual) {
      const AddSink sink{residual.from(begin).new_values};
      quantize_block<C, kBits, kStochastic>(source, sink, n, out, draws);
    } else {
      quantize_block<C, kBits, kStochastic>(source, NoSink{}, n, out, draws);
    }
  }
}

}  // namespace

// ---- entries ----

void quantize(const QuantizeArgs& args, void*) {
  const bool streams = streams_residual(args.residual, args.spans);
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    with_bits(args.bits, [&](auto bits) {
      with_rounding(args.rounding, [&](auto stochastic) {
        for_units(args.spans, args.block_size,
                  [&](int64_t, const Span& span, int64_t first, int64_t last) {
                    quantize_span<T, bits.value, stochastic.value>(
                        args, span, {first, last}, streams);
                  });
      });
    });
  });
}

void dequantize(const DequantizeArgs& args, void*) { dequantize_any<false>(args); }

void dequantize_add(const DequantizeArgs& args, void*) { dequantize_any<true>(args); }

void requantize_sum(const RequantizeSumArgs& args, void*) {
  const auto run = [&]<class C>(Tag<C>) {
    with_bits(args.bits, [&](auto bits) {
      with_rounding(args.rounding, [&](auto stochastic) {
        for_units(args.spans, args.block_size,
                  [&](int64_t, const Span& span, int64_t first, int64_t last) {
                    requantize_span<C, bits.value, stochastic.value>(args, span,
                                                                     {first, last});
                  });
      });
    });
  };
  if (args.dtype == DType::kFloat64) return run(Tag<double>{});
  run(Tag<float>{});
}

COMMKERN_END_ISA
