#include "kernels/quantize.h"

#include "cpu/quantize_block.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

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
    const float kept = static_cast<float>(error);  // fp64 errors may not fit
    store(residual.new_values, i,
          is_finite(kept) ? kept : load<float>(residual.old_values, i));
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
    const float before = load<float>(residual, i);
    const float after = before + static_cast<float>(error);
    store(residual, i, is_finite(after) ? after : before);
  }
  COMMKERN_MEMBER void put(int64_t i, Floats error) const {
    const Floats before = load_floats<float>(residual, i);
    const Floats after = before + error;
    store_floats<float>(residual, i, choose(finite_mask(after), after, before));
  }
  COMMKERN_MEMBER void keep(int64_t) const {}
};

// ---- the blocks of a span ----

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

// Blocks are worked on a few at a time, so that one's divisions pass while another's
// codes are made; more at once makes the traffic to memory uneven (measured).
constexpr int64_t kMaxBatch = 8;
constexpr int64_t kBatchElements = 512;

// `Blocks` gives, for a block's number: first_look and second_look (Sources of equal
// values) and sink.
template <class C, int kBits, bool kStochastic, class Args, class Blocks>
COMMKERN_INLINE void quantize_blocks(const Args& args, const Span& span,
                                     BlockRange range, const Blocks& blocks) {
  const BodyLayout layout(args, span);
  const int64_t block_size = layout.block_size;
  const int64_t fitting = kBatchElements / block_size;
  const int64_t batch = smaller(fitting < 1 ? 1 : fitting, kMaxBatch);
  uint8_t* body = args.payload.data + span.body;
  Draws draws(stream_of(args, span));
  C absmax[kMaxBatch];
  const auto length = [&](int64_t block) {
    return smaller(block_size, span.length - block * block_size);
  };
  for (int64_t first = range.first; first < range.last; first += batch) {
    const int64_t last = smaller(first + batch, range.last);
    for (int64_t block = first; block < last; ++block) {
      const int64_t n = length(block);
      absmax[block - first] = block_absmax<C>(blocks.first_look(block, n), n);
    }
    for (int64_t block = first; block < last; ++block) {
      const BlockOut out{body + layout.scale_at(block), body + layout.codes_at(block),
                         first_draw_of(span, block, block_size)};
      quantize_block<C, kBits, kStochastic>(blocks.second_look(block),
                                            blocks.sink(block), absmax[block - first],
                                            length(block), out, draws);
    }
  }
}

template <class T>
struct PlainBlocks {
  const uint8_t* input;  // of the span
  int64_t block_size;

  COMMKERN_MEMBER PlainSource<T> second_look(int64_t block) const {
    return {input + block * block_size * static_cast<int64_t>(sizeof(T))};
  }
  COMMKERN_MEMBER PlainSource<T> first_look(int64_t block, int64_t) const {
    return second_look(block);
  }
  COMMKERN_MEMBER NoSink sink(int64_t) const { return {}; }
};

template <class T>
struct FeedbackBlocks {
  PlainBlocks<T> plain;
  ResidualSpan residual;
  bool streams;

  COMMKERN_MEMBER ResidualSpan of(int64_t block) const {
    return residual.from(block * plain.block_size);
  }
  COMMKERN_MEMBER FeedbackSource<T> second_look(int64_t block) const {
    return {plain.second_look(block).input, of(block).old_values};
  }
  COMMKERN_MEMBER FeedbackSource<T> first_look(int64_t block, int64_t) const {
    return second_look(block);
  }
  COMMKERN_MEMBER WriteSink sink(int64_t block) const {
    const ResidualSpan here = of(block);
    return {here, streams && can_stream(here.new_values)};
  }
};

template <class T, int kBits, bool kStochastic>
void quantize_span(const QuantizeArgs& args, const Span& span, BlockRange range,
                   bool streams) {
  using C = ComputeOf<T>;
  const PlainBlocks<T> plain{args.input.data + span.offset * sizeof(T),
                             args.block_size};
  const ResidualSpan residual = residual_of(args.residual, span);
  if (residual) {
    const FeedbackBlocks<T> blocks{plain, residual, streams};
    quantize_blocks<C, kBits, kStochastic>(args, span, range, blocks);
  } else {
    quantize_blocks<C, kBits, kStochastic>(args, span, range, plain);
  }
}

// ---- decoding ----

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

// The sums of the blocks in work, each in a slot of `acc`.
template <class C, int kBits, class MakeSink>
struct SumBlocks {
  const RequantizeSumArgs& args;
  const Span& span;
  BodyLayout layout;
  MakeSink make_sink;
  C* acc;
  int64_t slots;

  COMMKERN_MEMBER C* slot(int64_t block) const {
    return acc + block % slots * layout.block_size;
  }
  COMMKERN_MEMBER BufferSource<C> second_look(int64_t block) const {
    return {slot(block)};
  }
  COMMKERN_MEMBER BufferSource<C> first_look(int64_t block, int64_t n) const {
    sum_block<C, kBits>(args.parts, span.body + layout.scale_at(block),
                        span.body + layout.codes_at(block), slot(block), n);
    return second_look(block);
  }
  COMMKERN_MEMBER auto sink(int64_t block) const {
    return make_sink(block * layout.block_size);
  }
};

template <class C, int kBits, bool kStochastic>
void requantize_span(const RequantizeSumArgs& args, const Span& span,
                     BlockRange range) {
  constexpr int64_t kLargestBlock = 8192;
  alignas(64) C acc[kLargestBlock];
  const int64_t slots = smaller(kLargestBlock / args.block_size, kMaxBatch);
  const BodyLayout layout(args, span);
  const ResidualSpan residual = residual_of(args.residual, span);
  const auto run = [&](auto make_sink) {
    const SumBlocks<C, kBits, decltype(make_sink)> blocks{args,      span, layout,
                                                          make_sink, acc,  slots};
    quantize_blocks<C, kBits, kStochastic>(args, span, range, blocks);
  };
  if (residual) {
    run([&](int64_t begin) { return AddSink{residual.from(begin).new_values}; });
  } else {
    run([](int64_t) { return NoSink{}; });
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
