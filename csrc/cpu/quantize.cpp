#include "kernels/quantize.h"

#include "cpu/span_values.h"
#include "cpu/statistics.h"
#include "cpu/tables.h"
#include "cpu/units.h"

COMMKERN_BEGIN_ISA
namespace {

// ---- where errors go ----

// The residual of a span: written by quantize, added to by the owner's step.
struct Feedback {
  ResidualSpan residual;
  Errors mode;
  bool streams;

  // Errors of an fp64 block go through a buffer: in fp32 they may not be finite.
  COMMKERN_MEMBER void put(int64_t first, int64_t n, const double* errors) const {
    const ResidualSpan here = residual.from(first);
    const bool adds = mode == Errors::kAdd;
    for (int64_t i = 0; i < n; ++i) {
      const float before = load<float>(adds ? here.new_values : here.old_values, i);
      const float error = static_cast<float>(errors[i]);
      const float after = adds ? before + error : error;
      store(here.new_values, i, is_finite(after) ? after : before);
    }
  }

  // The block is not finite: what was there stays.
  COMMKERN_MEMBER void keep(int64_t first, int64_t n) const {
    const ResidualSpan here = residual.from(first);
    if (mode == Errors::kAdd) return;
    std::memmove(here.new_values, here.old_values, n * sizeof(float));
  }
};

// ---- one span's way from values to codes ----

template <class C, class Values>
class SpanEncoder {
 public:
  template <class Args>
  SpanEncoder(const Args& args, const Span& span, const Values& values,
              const Feedback& feedback, const Coder<C>& coder)
      : format_(args.format),
        span_(span),
        values_(values),
        feedback_(feedback),
        coder_(coder),
        layout_(args.format, args.dtype, span.length),
        body_(args.payload.data + span.body),
        mode_(is_same<C, double> && feedback.residual ? Errors::kWrite : feedback.mode),
        first_block_(span.begin / args.format.block_size),
        draws_per_block_(ceil_div(args.format.block_size, 16)),
        draws_({args.seed, span.parameter_id, args.step, args.stream}) {}

  // The head, which all blocks have a part in.
  void encode_head() {
    const Format& f = format_;
    if (f.scales != Scales::kSpan) {
      return store(body_, 0, span_head(f, absmax_of_span(true)));
    }
    const C absmax = absmax_of_span(false);
    if (!is_finite(absmax)) return store_head(bits_as<C>(FloatBits<C>::kNan), C(0));
    switch (f.statistic) {
      case Statistic::kAbsmax: return store_span_scale(absmax / largest(), absmax);
      case Statistic::kConstant:
        return store_head(absmax == 0 ? C(0) : static_cast<C>(f.constant), C(0));
      case Statistic::kRange: return encode_span_range();
      default: break;
    }
    const C q = normaliser(absmax);
    TileTree<C> tree;
    each(kTile, [&](int64_t, int64_t n, const uint8_t* a) {
      tree.add(tile_sum(f.statistic, a, n, q));
    });
    store_span_scale(wanted_of_sum(f, tree.total(), span_.length, q), absmax);
  }

  void encode_blocks(int64_t first, int64_t last) {
    if (has_head(format_)) head_ = load<C>(body_, 0);
    const int64_t unit = unit_of(format_);
    const int64_t batch = kBatchElements / unit * unit;
    const int64_t begin = first * unit, end = smaller(last * unit, span_.length);
    for (int64_t i = begin; i < end; i += batch > 0 ? batch : unit) {
      encode_batch(i, smaller(batch > 0 ? batch : unit, end - i));
    }
  }

 private:
  COMMKERN_MEMBER C largest() const { return static_cast<C>(largest_value(format_)); }

  // fn(first, n, values) over the whole span, `step` elements at a time.
  template <class Fn>
  COMMKERN_MEMBER void each(int64_t step, Fn fn) {
    for (int64_t i = 0; i < span_.length; i += step) {
      const int64_t n = smaller(step, span_.length - i);
      fn(i, n, values_.get(i, n, values_buffer_));
    }
  }

  C absmax_of_span(bool skip_nonfinite) {
    C most = 0;
    each(unit_of(format_), [&](int64_t, int64_t n, const uint8_t* a) {
      for (int64_t i = 0; i < n; i += format_.block_size) {
        const C absmax = absmax_of<C>(a + i * static_cast<int64_t>(sizeof(C)),
                                      smaller(format_.block_size, n - i));
        if (skip_nonfinite && !is_finite(absmax)) continue;
        if (magnitude_bits(absmax) > magnitude_bits(most)) most = absmax;
      }
    });
    return most;
  }

  void encode_span_range() {
    C least = 0, most = 0;
    each(unit_of(format_), [&](int64_t first, int64_t n, const uint8_t* a) {
      const ValueRange<C> range = range_of<C>(a, n);
      least = first == 0 || range.least < least ? range.least : least;
      most = first == 0 || range.most > most ? range.most : most;
    });
    const RangeBits bits = bits_of_range({least, most});
    store_head(value_of(bits.scale), value_of(bits.offset));
  }

  void store_head(C stored, C offset) {
    store(body_, 0, stored);
    if (has_offsets(format_)) store(body_, 1, offset);
  }
  void store_span_scale(C wanted, C absmax) {
    const uint64_t bits = encode_scale(format_, wanted, absmax, C(1));
    store_head(bits_as<C>(static_cast<BitsOf<C>>(bits)), C(0));
  }

  COMMKERN_MEMBER RangeBits bits_of_range(ValueRange<C> range) const {
    return encode_range(format_, range.least, range.most, head_, layout_.scale_nbytes);
  }
  COMMKERN_MEMBER C value_of(uint64_t bits) const {
    return decode_scale(format_.scales, bits, head_);
  }

  COMMKERN_MEMBER void store_bits(int64_t at, uint64_t bits) {
    switch (layout_.scale_nbytes) {
      case 1: body_[at] = static_cast<uint8_t>(bits); return;
      case 2: return store(body_ + at, 0, static_cast<uint16_t>(bits));
      default: return store(body_ + at, 0, static_cast<BitsOf<C>>(bits));
    }
  }

  // Makes and stores the scale of a block with values `a`.
  COMMKERN_MEMBER BlockScale<C> encode_block_scale(int64_t block, const uint8_t* a,
                                                   int64_t n, C absmax) {
    const Format& f = format_;
    if (!is_finite(absmax)) {
      store_bits(layout_.scale_at(block), nan_scale_bits<C>(f.scales));
      if (has_offsets(f)) store_bits(layout_.offset_at(block), 0);
      return block_scale(f, bits_as<C>(FloatBits<C>::kNan), C(0));
    }
    if (f.statistic == Statistic::kRange) {
      const RangeBits bits = bits_of_range(range_of<C>(a, n));
      store_bits(layout_.scale_at(block), bits.scale);
      store_bits(layout_.offset_at(block), bits.offset);
      return block_scale(f, value_of(bits.scale), value_of(bits.offset));
    }
    C wanted = absmax / largest();
    if (f.statistic != Statistic::kAbsmax && absmax > 0) {
      const C q = normaliser(absmax);
      wanted = wanted_of_sum(f, sum_of(f.statistic, a, n, q), n, q);
    }
    const uint64_t bits = encode_scale(f, wanted, absmax, head_);
    store_bits(layout_.scale_at(block), bits);
    return block_scale(f, value_of(bits), C(0));
  }

  COMMKERN_MEMBER BlockScale<C> span_scale() const {
    const C offset = has_offsets(format_) ? load<C>(body_, 1) : C(0);
    return block_scale(format_, head_, offset);
  }

  void encode_scales(int64_t first_block, const uint8_t* a, int64_t n) {
    const int64_t block_size = format_.block_size;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++count, i += block_size) {
      const uint8_t* block = a + i * static_cast<int64_t>(sizeof(C));
      absmax_[count] = absmax_of<C>(block, smaller(block_size, n - i));
    }
    if (format_.scales == Scales::kSpan) {
      const BlockScale<C> s = span_scale();
      for (int64_t k = 0; k < count; ++k) scales_[k] = s;
    } else if (format_.scales == Scales::kCompute &&
               format_.statistic == Statistic::kAbsmax) {
      encode_plain_scales(first_block, count);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t i = k * block_size;
        scales_[k] =
            encode_block_scale(first_block + k, a + i * static_cast<int64_t>(sizeof(C)),
                               smaller(block_size, n - i), absmax_[k]);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      ordinary_[k] = is_ordinary(scales_[k], absmax_[k]);
    }
  }

  // The commonest scales, without asking each time what they are.
  COMMKERN_MEMBER void encode_plain_scales(int64_t first_block, int64_t count) {
    const Format plain{.code = format_.code, .bits = format_.bits};
    uint8_t* stored = body_ + layout_.scale_at(first_block);
    const C most = largest();
    for (int64_t k = 0; k < count; ++k) {
      const C absmax = absmax_[k];
      C s = absmax / most;
      if (!is_finite(s * most)) {
        s = is_finite(absmax) ? next_below(s) : bits_as<C>(FloatBits<C>::kNan);
      }
      store(stored, k, s);
      scales_[k] = block_scale(plain, s, C(0));
    }
  }

  // No value of the block lies outside what the codes reach, but by rounding, and no
  // error can overflow.
  COMMKERN_MEMBER bool is_ordinary(const BlockScale<C>& s, C absmax) const {
    const C reach = largest() * s.scale;
    if (s.lift != 1 || !(absmax + reach <= largest_finite<C>() / 2)) return false;
    return format_.code != Code::kSymmetric ||
           absmax * s.reciprocal <= largest() * C(1 + 0x1p-20);
  }

  void encode_batch(int64_t first, int64_t n) {
    const int64_t block_size = format_.block_size;
    const int64_t first_block = first / block_size;
    const uint8_t* a = values_.get(first, n, values_buffer_);
    encode_scales(first_block, a, n);
    uint8_t* const errors = errors_at(first);
    const EncodeRun<C> run{a,
                           errors,
                           feedback_.residual.from(first).old_values,
                           feedback_.streams && can_stream(errors),
                           n,
                           block_size,
                           scales_,
                           ordinary_,
                           body_ + layout_.codes_at(first_block),
                           layout_.block_nbytes,
                           (first_block_ + first_block) * draws_per_block_,
                           format_.bits,
                           draws_};
    coder_.encode[static_cast<int>(mode_)](run);
    if (feedback_.residual) finish_errors(first, n);
  }

  // Where errors of elements from `first` on go.
  COMMKERN_MEMBER uint8_t* errors_at(int64_t first) {
    if (!feedback_.residual) return nullptr;
    if (is_same<C, double>) return reinterpret_cast<uint8_t*>(errors_buffer_);
    return feedback_.residual.from(first).new_values;
  }

  COMMKERN_MEMBER void finish_errors(int64_t first, int64_t n) {
    const int64_t block_size = format_.block_size;
    for (int64_t k = 0, i = 0; i < n; ++k, i += block_size) {
      const int64_t length = smaller(block_size, n - i);
      if (!is_finite(scales_[k].scale)) {
        feedback_.keep(first + i, length);
      } else if constexpr (is_same<C, double>) {
        feedback_.put(first + i, length, errors_buffer_ + i);
      }
    }
  }

  const Format& format_;
  const Span& span_;
  const Values& values_;
  const Feedback& feedback_;
  const Coder<C>& coder_;
  const BodyLayout layout_;
  uint8_t* const body_;
  const Errors mode_;  // of the encoding loop
  const int64_t first_block_, draws_per_block_;
  Draws draws_;
  C head_ = 1;
  BlockScale<C> scales_[kMaxBlocks];
  bool ordinary_[kMaxBlocks];
  C absmax_[kMaxBlocks];
  alignas(64) C values_buffer_[kMaxUnit];
  alignas(64) C errors_buffer_[is_same<C, double> ? kMaxUnit : 1];
};

// with_encoder(span, fn): fn(encoder) for that span.
template <class Args, class WithEncoder>
COMMKERN_INLINE void encode_spans(const Args& args, WithEncoder with_encoder) {
  if (has_head(args.format)) {
    for_units(args.spans, kWholeSpan, [&](int64_t, const Span& span, int64_t, int64_t) {
      with_encoder(span, [](auto& encoder) { encoder.encode_head(); });
    });
  }
  for_units(args.spans, unit_of(args.format),
            [&](int64_t, const Span& span, int64_t first, int64_t last) {
              with_encoder(span,
                           [&](auto& encoder) { encoder.encode_blocks(first, last); });
            });
}

template <class T>
void quantize_typed(const QuantizeArgs& args) {
  using C = ComputeOf<T>;
  const Coder<C> coder = coder_of<C>(args.format, args.rounding);
  const bool streams = streams_residual(args.residual, args.spans);
  encode_spans(args, [&](const Span& span, auto fn) {
    const ResidualSpan residual = residual_of(args.residual, span);
    const Feedback feedback{residual, residual ? Errors::kWrite : Errors::kNone,
                            streams};
    const InputValues<T> values{args.input.data + span.offset * sizeof(T),
                                residual.old_values};
    SpanEncoder<C, InputValues<T>> encoder(args, span, values, feedback, coder);
    fn(encoder);
  });
}

template <class C>
void requantize_typed(const RequantizeSumArgs& args) {
  const Coder<C> coder = coder_of<C>(args.format, args.rounding);
  encode_spans(args, [&](const Span& span, auto fn) {
    const ResidualSpan residual = residual_of(args.residual, span);
    const Feedback feedback{residual, residual ? Errors::kAdd : Errors::kNone, false};
    const BodyLayout layout(args.format, args.dtype, span.length);
    const SumValues<C> values{args.parts, args.format, span.body, layout, coder};
    SpanEncoder<C, SumValues<C>> encoder(args, span, values, feedback, coder);
    fn(encoder);
  });
}

// ---- decoding ----

template <class T, bool kAdd>
COMMKERN_INLINE void put_values(const ComputeOf<T>* values, int64_t n,
                                uint8_t* output) {
  int64_t i = 0;
  if constexpr (kHasVectors<T>) {
    for (; i + kLanes <= n; i += kLanes) {
      Floats y = load_floats<float>(values, i);
      if constexpr (kAdd) y = load_floats<T>(output, i) + y;
      store_floats<T>(output, i, y);
    }
  }
  for (; i < n; ++i) {
    ComputeOf<T> y = values[i];
    if constexpr (kAdd) y = load_compute<T>(output, i) + y;
    store(output, i, convert<T>(y));
  }
}

template <class T, bool kAdd>
void dequantize_typed(const DequantizeArgs& args) {
  using C = ComputeOf<T>;
  const Format& f = args.format;
  const Coder<C> coder = coder_of<C>(f, Rounding::kStochastic);
  const bool streams = !kAdd && streams_past_cache<T>(args.spans);
  const C factor = static_cast<C>(args.scale);
  const auto body = [&](int64_t row, const Span& span, int64_t first, int64_t last) {
    const int64_t unit = unit_of(f);
    const int64_t batch = unit < kBatchElements ? kBatchElements / unit * unit : unit;
    const int64_t end = smaller(last * unit, span.length);
    const BodyLayout layout(f, args.dtype, span.length);
    const StoredScales<C> stored(f, layout, args.payload.data + span.body);
    alignas(64) C buffer[kMaxUnit];
    bool finite = true;
    for (int64_t i = first * unit; i < end; i += batch) {
      const int64_t n = smaller(batch, end - i);
      uint8_t* y = args.output.data + (span.offset + i) * sizeof(T);
      if constexpr (is_same<T, C>) {
        finite &= decode_blocks(stored, coder.decode[kAdd], i / f.block_size, n, factor,
                                y, streams && can_stream(y));
      } else {
        auto* values = reinterpret_cast<uint8_t*>(buffer);
        finite &= decode_blocks(stored, coder.decode[0], i / f.block_size, n, factor,
                                values, false);
        put_values<T, kAdd>(buffer, n, y);
      }
    }
    if (!finite && args.nonfinite) raise_flag(args.nonfinite, row);
  };
  for_units(args.spans, unit_of(f), body);
}

}  // namespace

// ---- entries ----

void quantize(const QuantizeArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) { quantize_typed<T>(args); });
}

void dequantize(const DequantizeArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) { dequantize_typed<T, false>(args); });
}

void dequantize_add(const DequantizeArgs& args, void*) {
  with_dtype(args.dtype, [&]<class T>(Tag<T>) { dequantize_typed<T, true>(args); });
}

void requantize_sum(const RequantizeSumArgs& args, void*) {
  if (args.dtype == DType::kFloat64) return requantize_typed<double>(args);
  requantize_typed<float>(args);
}

COMMKERN_END_ISA
