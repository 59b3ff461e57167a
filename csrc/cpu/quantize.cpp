#include "kernels/quantize.h"

#include "cpu/scale_maker.h"
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

  // From a buffer.
  template <class C>
  COMMKERN_MEMBER void put(int64_t first, int64_t n, const C* errors) const {
    const ResidualSpan here = residual.from(first);
    const bool adds = mode == Errors::kAdd;
    int64_t i = 0;
    if constexpr (kHasVectors<C>) {
      const bool past_cache = streams && can_stream(here.new_values);
      for (; i + kLanes <= n; i += kLanes) {
        const uint8_t* old_values = adds ? here.new_values : here.old_values;
        const Floats before = load_floats<float>(old_values, i);
        const Floats error = load_floats<float>(errors, i);
        const Floats after = adds ? before + error : error;
        put_elements<float>(here.new_values, i,
                            choose(finite_mask(after), after, before), past_cache);
      }
    }
    for (; i < n; ++i) {
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
        mode_(mode_of_loop(feedback, values)),
        first_block_(span.begin / args.format.block_size),
        draws_per_block_(ceil_div(args.format.block_size, 16)),
        stochastic_(args.rounding == Rounding::kStochastic),
        draws_({args.seed, span.parameter_id, args.step, args.stream}),
        maker_(args.format, layout_, body_) {}

  // The head, which all blocks have a part in.
  void encode_head() {
    const Format& f = format_;
    if (f.scales != Scales::kSpan) {
      return store(body_, 0, span_head(f, absmax_of_span(true)));
    }
    const C absmax = absmax_of_span(false);
    if (!is_finite(absmax))
      return maker_.store_head(bits_as<C>(FloatBits<C>::kNan), C(0));
    switch (f.statistic) {
      case Statistic::kAbsmax:
        return maker_.store_span_scale(absmax / maker_.largest(), absmax);
      case Statistic::kConstant:
        return maker_.store_head(absmax == 0 ? C(0) : static_cast<C>(f.constant), C(0));
      case Statistic::kRange: return encode_span_range();
      default: break;
    }
    const C q = normaliser(absmax);
    TileTree<C> tree;
    each(kSumTile, [&](int64_t, int64_t n, const auto& source) {
      tree.add(tile_facts<C>(f.statistic, source, n, q).sum);
    });
    maker_.store_span_scale(wanted_of_sum(f, tree.total(), span_.length, q), absmax);
  }

  void encode_blocks(int64_t first, int64_t last) {
    maker_.read_head();
    const int64_t unit = unit_of(format_);
    const int64_t end = smaller(last * unit, span_.length);
    const int64_t batch = batch_of(format_);
    for (int64_t i = first * unit; i < end; i += batch) {
      encode_batch(i, smaller(batch, end - i));
    }
  }

 private:
  static COMMKERN_MEMBER Errors mode_of_loop(const Feedback& feedback,
                                             const Values& values) {
    return is_same<C, double> || values.rotation ? Errors::kNone : feedback.mode;
  }

  // fn(source) of the elements from `first` on, whose values lie in `a`.
  template <class Fn>
  COMMKERN_MEMBER void with_source(const uint8_t* a, int64_t first, Fn fn) {
    const uint8_t* added = values_.added(first);
    if (added == nullptr) return fn(PlainSource<C>{a});
    fn(FedSource<C>{a, added});
  }

  // fn(first, n, source) over the whole span, `step` elements at a time.
  template <class Fn>
  COMMKERN_MEMBER void each(int64_t step, Fn fn) {
    for (int64_t i = 0; i < span_.length; i += step) {
      const int64_t n = smaller(step, span_.length - i);
      with_source(values_.get(i, n, values_buffer_), i,
                  [&](const auto& source) { fn(i, n, source); });
    }
  }

  C absmax_of_span(bool skip_nonfinite) {
    C most = 0;
    const auto note = [&](C absmax) {
      if (magnitude_bits(absmax) > magnitude_bits(most)) most = absmax;
    };
    each(batch_of(format_), [&](int64_t, int64_t n, const auto& source) {
      const C absmax = absmax_of<C>(source, n);
      if (is_finite(absmax) || !skip_nonfinite) return note(absmax);
      for (int64_t i = 0; i < n; i += format_.block_size) {
        const int64_t length = smaller(format_.block_size, n - i);
        const C of_block = absmax_of<C>(source.from(i), length);
        if (is_finite(of_block)) note(of_block);
      }
    });
    return most;
  }

  void encode_span_range() {
    C least = 0, most = 0;
    each(batch_of(format_), [&](int64_t first, int64_t n, const auto& source) {
      const ValueRange<C> range = range_of<C>(source, n);
      least = first == 0 || range.least < least ? range.least : least;
      most = first == 0 || range.most > most ? range.most : most;
    });
    maker_.store_span_range({least, most});
  }

  void encode_batch(int64_t first, int64_t n) {
    const int64_t block_size = format_.block_size;
    const int64_t first_block = first / block_size;
    const uint8_t* a = values_.get(first, n, values_buffer_);
    with_source(a, first, [&](const auto& source) {
      maker_.encode_scales(first_block, source, n);
    });
    const ResidualSpan residual = feedback_.residual.from(first);
    const EncodeRun<C> run{a,
                           residual.new_values,
                           residual.old_values,
                           feedback_.streams && can_stream(residual.new_values),
                           n,
                           block_size,
                           maker_.scales(),
                           body_ + layout_.codes_at(first_block),
                           layout_.block_nbytes,
                           bytes_of_blocks(first_block, ceil_div(n, block_size)),
                           draws_per_block_ * Draws::kDrawNbytes};
    coder_.encode[static_cast<int>(mode_)](run);
    if (!feedback_.residual) return;
    if (mode_ == Errors::kNone) return put_decoded_errors(first, n);
    for (int64_t k = 0, i = 0; i < n; ++k, i += block_size) {
      if (is_finite(maker_.scales().scale[k])) continue;
      feedback_.keep(first + i, smaller(block_size, n - i));
    }
  }

  // The random bytes of some blocks; null where nothing is drawn.
  COMMKERN_MEMBER const uint8_t* bytes_of_blocks(int64_t first, int64_t count) {
    if (!stochastic_) return nullptr;
    draws_.write((first_block_ + first) * draws_per_block_, count * draws_per_block_,
                 bytes_buffer_);
    return bytes_buffer_;
  }

  // Errors from the codes: of fp64, which may not be finite as floats, and of a
  // rotation, where they are not those of single values.
  void put_decoded_errors(int64_t first, int64_t n) {
    const int64_t block_size = format_.block_size;
    coder_.decode[0]({body_ + layout_.codes_at(first / block_size),
                      layout_.block_nbytes, n, block_size, maker_.scales(), C(1),
                      reinterpret_cast<uint8_t*>(errors_buffer_), false});
    values_.put_errors(first, n, values_buffer_, errors_buffer_);
    feedback_.put(first, n, errors_buffer_);
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
  const bool stochastic_;
  const Draws draws_;
  ScaleMaker<C> maker_;
  alignas(64) C values_buffer_[kMaxUnit];
  alignas(64) C errors_buffer_[kMaxUnit];
  // A block of 24 draws 32.
  alignas(64) uint8_t bytes_buffer_[2 * kMaxUnit + Draws::kDrawNbytes * kLanes];
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
    SpanRotation rotation(args.format, span);
    const InputValues<T> values{args.input.data + span.offset * sizeof(T),
                                residual.old_values, rotation};
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
    SpanRotation rotation(args.format, span);
    const SumValues<C> values{args.parts, args.format, span.body,
                              layout,     coder,       rotation};
    SpanEncoder<C, SumValues<C>> encoder(args, span, values, feedback, coder);
    fn(encoder);
  });
}

// ---- decoding ----

template <class T, bool kAdd>
void dequantize_typed(const DequantizeArgs& args) {
  using C = ComputeOf<T>;
  const Format& f = args.format;
  const Coder<C> coder = coder_of<C>(f, Rounding::kStochastic);
  const bool streams = !kAdd && streams_past_cache<T>(args.spans);
  const C factor = static_cast<C>(args.scale);
  const auto body = [&](int64_t row, const Span& span, int64_t first, int64_t last) {
    const int64_t unit = unit_of(f);
    const int64_t batch = batch_of(f);
    const int64_t end = smaller(last * unit, span.length);
    const BodyLayout layout(f, args.dtype, span.length);
    const StoredScales<C> stored(f, layout, args.payload.data + span.body);
    SpanRotation rotation(f, span);
    const bool direct = is_same<T, C> && !rotation;
    alignas(64) C buffer[kMaxUnit];
    bool finite = true;
    for (int64_t i = first * unit; i < end; i += batch) {
      const int64_t n = smaller(batch, end - i);
      uint8_t* y = args.output.data + (span.offset + i) * sizeof(T);
      if (direct) {
        finite &= decode_blocks(stored, coder.decode[kAdd], i / f.block_size, n, factor,
                                y, streams && can_stream(y));
      } else {
        auto* values = reinterpret_cast<uint8_t*>(buffer);
        finite &= decode_blocks(stored, coder.decode[0], i / f.block_size, n, C(1),
                                values, false);
        if (rotation) rotation.unrotate(buffer, i, n);
        finite &=
            put_scaled<T, C, kAdd>(buffer, n, factor, y, streams && can_stream(y));
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
