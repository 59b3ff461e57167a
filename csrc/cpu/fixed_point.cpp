#include "kernels/fixed_point.h"

#include "core/fixed_point.h"
#include "cpu/random.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};

template <class Fn>
COMMKERN_INLINE void with_bits(int32_t bits, Fn fn) {
  if (bits == 8) return fn(Int<8>{});
  if (bits == 16) return fn(Int<16>{});
  fn(Int<32>{});
}

template <class Fn>
COMMKERN_INLINE void with_flag(bool flag, Fn fn) {
  if (flag) return fn(Int<1>{});
  fn(Int<0>{});
}

// ---- what is coded: a block's element i, or lanes from i, in the compute type ----

template <class T, bool kFeedback>
struct Block {
  const uint8_t* input;
  ResidualSpan residual;
  int64_t length;

  COMMKERN_MEMBER ComputeOf<T> at(int64_t i) const {
    const ComputeOf<T> x = load_compute<T>(input, i);
    if constexpr (!kFeedback) return x;
    return x + static_cast<ComputeOf<T>>(load<float>(residual.old_values, i));
  }
  COMMKERN_MEMBER Floats lanes(int64_t i) const {
    const Floats x = load_floats<T>(input, i);
    if constexpr (!kFeedback) return x;
    return x + load_floats<float>(residual.old_values, i);
  }
};

template <class T, bool kFeedback, class Args>
COMMKERN_INLINE Block<T, kFeedback> block_of(const Args& args, const Span& span,
                                             int64_t block) {
  const int64_t begin = block * args.block_size;
  const uint8_t* input = args.input.data + (span.offset + begin) * sizeof(T);
  const int64_t length = smaller(args.block_size, span.length - begin);
  if constexpr (!kFeedback) return {input, {}, length};
  return {input, residual_of(args.residual, span).from(begin), length};
}

template <class T, bool kFeedback>
COMMKERN_INLINE int32_t exponent_of(const Block<T, kFeedback>& block) {
  using C = ComputeOf<T>;
  BitsOf<C> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    Ints lanes{};
    for (; i + kLanes <= block.length; i += kLanes) {
      lanes = larger(lanes, magnitude_of(block.lanes(i)));
    }
    most = largest_lane(lanes);
  }
  for (; i < block.length; ++i) {
    const BitsOf<C> bits = magnitude_bits(block.at(i));
    most = bits > most ? bits : most;
  }
  return static_cast<int32_t>(most >> ExponentOf<C>::kFractionBits);
}

// ---- codes ----

template <int kBits>
struct CodeOf {
  using Signed = int32_t;
  using Unsigned = uint32_t;
};
template <>
struct CodeOf<16> {
  using Signed = int16_t;
  using Unsigned = uint16_t;
};
template <>
struct CodeOf<8> {
  using Signed = int8_t;
  using Unsigned = uint8_t;
};
template <int kBits>
using Code = typename CodeOf<kBits>::Signed;
using Shorts = int16_t __attribute__((vector_size(2 * kLanes)));

// kWhole codes from element i on.
template <int kBits>
COMMKERN_INLINE void store_whole(uint8_t* codes, int64_t i,
                                 const Ints (&group)[kParts]) {
  uint8_t* out = codes + i * (kBits / 8);
  if constexpr (kBits == 8) return store_group<8>(out, group);
  for (int part = 0; part < kParts; ++part) {
    if constexpr (kBits == 16) {
      store(out, part, narrow_words(bits_as<Words>(group[part]) & 0xffffu));
    } else {
      store(out, part, group[part]);
    }
  }
}

template <int kBits>
COMMKERN_INLINE void load_whole(const uint8_t* codes, int64_t i,
                                Ints (&group)[kParts]) {
  const uint8_t* in = codes + i * (kBits / 8);
  if constexpr (kBits == 8) return load_group<8, true>(in, group);
  for (int part = 0; part < kParts; ++part) {
    if constexpr (kBits == 16) {
      group[part] = __builtin_convertvector(load<Shorts>(in, part), Ints);
    } else {
      group[part] = load<Ints>(in, part);
    }
  }
}

// To the nearest integer, for any |x| < 2^31; round_nearest() serves below 2^22.
COMMKERN_INLINE Ints round_any(Floats x) {
  const Ints magnitude = magnitude_of(x);
  const Ints sign = bits_as<Ints>(x) ^ magnitude;
  const Floats magic = bits_as<Floats>(bits_as<Ints>(Floats{} + 0x1p23f) | sign);
  const Ints small = magnitude < bits_as<Ints>(Floats{} + 0x1p23f);
  return __builtin_convertvector(choose(small, (x + magic) - magic, x), Ints);
}

template <int kBits, bool kStochastic>
COMMKERN_INLINE Ints code_lanes(Floats a, const FixedScale<float>& s,
                                const uint8_t* bytes) {
  Floats p = a * s.reciprocal;
  const Floats high = broadcast(s.limit), low = -high;
  p = p < high ? p : high;
  p = p > low ? p : low;
  if constexpr (kStochastic) {
    const Ints below = round_down(p);
    const Floats rest = p - to_floats(below) + rounding_offsets(bytes);
    return below - (rest >= 1.0f);  // a comparison gives 0 or -1
  } else if constexpr (kBits == 32) {
    return round_any(p);
  } else {
    return round_nearest(p);
  }
}

template <class C, bool kStochastic>
COMMKERN_INLINE int32_t code_of(C a, const FixedScale<C>& s, const uint8_t* bytes,
                                int64_t i) {
  C p = a * s.lift * s.reciprocal;
  p = p < s.limit ? p : s.limit;
  p = p > -s.limit ? p : -s.limit;
  if constexpr (kStochastic) {
    const C below = __builtin_floor(p);
    const C rest = p - below + rounding_offset<C>(bytes[i % 16]);
    return static_cast<int32_t>(below) + (rest >= C(1));
  } else {
    return static_cast<int32_t>(__builtin_rint(p));
  }
}

// What one call and span have in common.
template <class T>
struct Coding {
  const FixedQuantizeArgs& args;
  const Span& span;
  bool streams;  // the residual goes past the cache
  Draws draws;

  COMMKERN_MEMBER uint64_t first_draw(int64_t block) const {
    const int64_t size = args.block_size;
    return static_cast<uint64_t>(span.begin / size + block) * ceil_div(size, 16);
  }
};

template <bool kFeedback, class T, class C>
COMMKERN_INLINE void keep_error(const Block<T, kFeedback>& block, int64_t i, C error) {
  if constexpr (kFeedback) {
    const float kept = static_cast<float>(error);  // fp64 errors may not fit
    store(block.residual.new_values, i,
          is_finite(kept) ? kept : load<float>(block.residual.old_values, i));
  }
}

// Elements [begin, end) in whole groups; `bytes` are those of element `begin` and on.
template <class T, int kBits, bool kStochastic, bool kFeedback>
COMMKERN_INLINE void quantize_lanes(const Block<T, kFeedback>& block,
                                    const FixedScale<float>& s, int64_t begin,
                                    int64_t end, uint8_t* codes, const uint8_t* bytes,
                                    bool streams) {
  for (int64_t i = begin; i < end; i += kWhole) {
    Ints group[kParts];
    for (int part = 0; part < kParts; ++part) {
      const int64_t at = i + part * kLanes;
      const Floats a = block.lanes(at);
      const uint8_t* mine = kStochastic ? bytes + (at - begin) : nullptr;
      const Ints code = code_lanes<kBits, kStochastic>(a, s, mine);
      group[part] = code;
      if constexpr (kFeedback) {
        const Floats error = a - to_floats(code) * s.scale;
        const Floats before = load_floats<float>(block.residual.old_values, at);
        put_elements<float>(block.residual.new_values, at,
                            choose(finite_mask(error), error, before), streams);
      }
    }
    store_whole<kBits>(codes, i, group);
  }
}

// All whole groups; returns the element it came to.
template <class T, int kBits, bool kStochastic, bool kFeedback>
COMMKERN_INLINE int64_t quantize_vectors(const Block<T, kFeedback>& block,
                                         const FixedScale<float>& s, uint8_t* codes,
                                         uint64_t first_draw, bool streams,
                                         Draws& draws) {
  const int64_t end = block.length / kWhole * kWhole;
  if constexpr (!kStochastic) {
    quantize_lanes<T, kBits, false, kFeedback>(block, s, 0, end, codes, nullptr,
                                               streams);
    return end;
  }
  for (int64_t i = 0; i < end;) {
    const uint64_t draw = first_draw + i / 16;
    const uint8_t* bytes = draws.bytes_of(draw);
    const int64_t next = smaller(i + 16 * draws.left_from(draw), end);
    quantize_lanes<T, kBits, true, kFeedback>(block, s, i, next, codes, bytes, streams);
    i = next;
  }
  return end;
}

template <class T, int kBits, bool kStochastic, bool kFeedback>
COMMKERN_INLINE void quantize_block(Coding<T>& coding, int64_t number,
                                    const FixedScale<ComputeOf<T>>& s) {
  using C = ComputeOf<T>;
  const auto block = block_of<T, kFeedback>(coding.args, coding.span, number);
  uint8_t* codes = coding.args.payload.data + coding.span.body +
                   number * coding.args.block_size * (kBits / 8);
  if (!s.finite) {
    std::memset(codes, 0, block.length * (kBits / 8));
    if constexpr (kFeedback) {
      std::memmove(block.residual.new_values, block.residual.old_values,
                   block.length * sizeof(float));
    }
    return;
  }
  const uint64_t first_draw = coding.first_draw(number);
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    if (s.lift == 1) {
      const bool streams = coding.streams && can_stream(block.residual.new_values);
      i = quantize_vectors<T, kBits, kStochastic, kFeedback>(
          block, s, codes, first_draw, streams, coding.draws);
    }
  }
  for (; i < block.length; ++i) {
    const uint8_t* bytes =
        kStochastic ? coding.draws.bytes_of(first_draw + i / 16) : nullptr;
    const C a = block.at(i);
    const int32_t code = code_of<C, kStochastic>(a, s, bytes, i);
    store(codes, i, static_cast<Code<kBits>>(code));
    keep_error<kFeedback, T>(block, i, a - static_cast<C>(code) * s.scale);
  }
}

template <class T, int kBits, bool kStochastic, bool kFeedback>
void quantize_span(const FixedQuantizeArgs& args, const Span& span, int64_t first,
                   int64_t last, bool streams) {
  using C = ComputeOf<T>;
  const PhiloxStream stream{args.seed, span.parameter_id, args.step, args.stream};
  Coding<T> coding{args, span, streams, Draws(stream)};
  const uint8_t* exponents = args.exponents.data + span.earlier;
  for (int64_t block = first; block < last; ++block) {
    const auto s = fixed_scale<T>(load<StoredExponent<C>>(exponents, block),
                                  args.digits, args.largest);
    quantize_block<T, kBits, kStochastic, kFeedback>(coding, block, s);
  }
}

// ---- decoding ----

// Returns the largest magnitude that was written, as bits.
template <class T, int kBits, bool kAdd>
COMMKERN_INLINE BitsOf<T> dequantize_block(const uint8_t* codes, ComputeOf<T> scale,
                                           ComputeOf<T> factor, uint8_t* output,
                                           int64_t n, bool streams) {
  using C = ComputeOf<T>;
  BitsOf<T> most = 0;
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    Ints lanes{};
    for (; i + kWhole <= n; i += kWhole) {
      Ints group[kParts];
      load_whole<kBits>(codes, i, group);
      for (int part = 0; part < kParts; ++part) {
        const int64_t at = i + part * kLanes;
        Floats value = to_floats(group[part]) * factor * scale;
        if constexpr (kAdd) value = load_floats<T>(output, at) + value;
        const Elements<T> y = narrow<T>(value);
        lanes = larger(lanes, magnitude_of(widen<T>(y)));
        put_elements<T>(output, at, y, streams);
      }
    }
    most = largest_lane(lanes);
  }
  for (; i < n; ++i) {
    C value = static_cast<C>(load<Code<kBits>>(codes, i)) * factor * scale;
    if constexpr (kAdd) value = load_compute<T>(output, i) + value;
    const T y = convert<T>(value);
    const BitsOf<T> bits = magnitude_bits(convert<C>(y));
    most = bits > most ? bits : most;
    store(output, i, y);
  }
  return most;
}

template <class T, int kBits, bool kAdd>
void dequantize_span(const FixedDequantizeArgs& args, const Span& span, int64_t row,
                     int64_t first, int64_t last, bool streams) {
  using C = ComputeOf<T>;
  const uint8_t* exponents = args.payload.data + span.earlier;
  const C factor = static_cast<C>(args.scale);
  BitsOf<T> most = 0;
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * args.block_size;
    const int64_t n = smaller(args.block_size, span.length - begin);
    const int32_t exponent = load<StoredExponent<C>>(exponents, block);
    const C scale = fixed_scale<T>(exponent, args.digits, 1).scale;
    const uint8_t* codes = args.payload.data + span.body + begin * (kBits / 8);
    uint8_t* y = args.output.data + (span.offset + begin) * sizeof(T);
    const BitsOf<T> bits = dequantize_block<T, kBits, kAdd>(codes, scale, factor, y, n,
                                                            streams && can_stream(y));
    most = bits > most ? bits : most;
  }
  if (!is_finite(bits_as<C>(most)) && args.nonfinite) raise_flag(args.nonfinite, row);
}

template <bool kAdd>
void dequantize_any(const FixedDequantizeArgs& args) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    const bool streams = !kAdd && streams_past_cache<T>(args.spans);
    with_bits(args.bits, [&](auto bits) {
      for_units(args.spans, args.block_size,
                [&](int64_t row, const Span& span, int64_t first, int64_t last) {
                  dequantize_span<T, bits.value, kAdd>(args, span, row, first, last,
                                                       streams);
                });
    });
  });
}

// ---- the owner's steps: integers, element by element ----

template <class Word>
struct Sum {
  static COMMKERN_MEMBER Word of(Word a, Word b) { return static_cast<Word>(a + b); }
};
template <class Word>
struct Max {
  static COMMKERN_MEMBER Word of(Word a, Word b) { return a > b ? a : b; }
};

// Words [begin, end) behind byte `at` of every part, a stretch at a time that stays in
// the cache.
template <template <class> class Op, class Word>
void combine(const Parts& parts, uint8_t* payload, int64_t at, int64_t begin,
             int64_t end) {
  constexpr int64_t kStretch = 4096;
  for (int64_t first = begin; first < end; first += kStretch) {
    const int64_t start = at + first * static_cast<int64_t>(sizeof(Word));
    const int64_t n = smaller(kStretch, end - first);
    uint8_t* __restrict out = payload + start;
    std::memcpy(out, parts.rows[0].data + start, n * sizeof(Word));
    for (int64_t rank = 1; rank < parts.count; ++rank) {
      const uint8_t* __restrict part = parts.rows[rank].data + start;
      for (int64_t i = 0; i < n; ++i) {
        store(out, i, Op<Word>::of(load<Word>(out, i), load<Word>(part, i)));
      }
    }
  }
}

}  // namespace

// ---- entries ----

void block_exponents(const BlockExponentsArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    with_flag(static_cast<bool>(args.residual), [&](auto feedback) {
      for_units(args.spans, args.block_size,
                [&](int64_t, const Span& span, int64_t first, int64_t last) {
                  using Stored = StoredExponent<ComputeOf<T>>;
                  uint8_t* exponents = args.payload.data + span.body;
                  for (int64_t block = first; block < last; ++block) {
                    const auto values = block_of<T, feedback.value>(args, span, block);
                    store(exponents, block, static_cast<Stored>(exponent_of(values)));
                  }
                });
    });
  });
}

void max_exponents(const MaxExponentsArgs& args, void*) {
  const auto run = [&]<class Word>(Tag<Word>) {
    for_units(args.spans, args.block_size,
              [&](int64_t, const Span& span, int64_t first, int64_t last) {
                combine<Max, Word>(args.parts, args.payload.data, span.body, first,
                                   last);
              });
  };
  if (args.dtype == DType::kFloat64) return run(Tag<StoredExponent<double>>{});
  run(Tag<StoredExponent<float>>{});
}

void fixed_quantize(const FixedQuantizeArgs& args, void*) {
  const bool streams = streams_residual(args.residual, args.spans);
  const bool is_stochastic = args.rounding == Rounding::kStochastic;
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    with_bits(args.bits, [&](auto bits) {
      with_flag(is_stochastic, [&](auto stochastic) {
        with_flag(static_cast<bool>(args.residual), [&](auto feedback) {
          for_units(args.spans, args.block_size,
                    [&](int64_t, const Span& span, int64_t first, int64_t last) {
                      quantize_span<T, bits.value, stochastic.value, feedback.value>(
                          args, span, first, last, streams);
                    });
        });
      });
    });
  });
}

void fixed_sum(const FixedSumArgs& args, void*) {
  with_bits(args.bits, [&](auto bits) {
    for_elements(
        args.spans, [&](int64_t, const Span& span, int64_t begin, int64_t end) {
          using Word = typename CodeOf<bits.value>::Unsigned;
          combine<Sum, Word>(args.parts, args.payload.data, span.body, begin, end);
        });
  });
}

void fixed_dequantize(const FixedDequantizeArgs& args, void*) {
  dequantize_any<false>(args);
}

void fixed_dequantize_add(const FixedDequantizeArgs& args, void*) {
  dequantize_any<true>(args);
}

COMMKERN_END_ISA
