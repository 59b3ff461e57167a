// The scales of a span: from values to what a body holds and what coding needs.
#pragma once

#include "cpu/coder.h"
#include "cpu/codes_float.h"
#include "cpu/statistics.h"

COMMKERN_BEGIN_ISA

template <class C>
class ScaleMaker {
 public:
  COMMKERN_MEMBER ScaleMaker(const Format& format, const BodyLayout& layout,
                             uint8_t* body)
      : format_(format), layout_(layout), body_(body) {}

  COMMKERN_MEMBER C largest() const { return static_cast<C>(largest_value(format_)); }
  COMMKERN_MEMBER const BlockScales<C>& scales() const { return scales_; }

  // ---- heads ----

  COMMKERN_MEMBER void read_head() {
    if (has_head(format_)) head_ = load<C>(body_, 0);
  }
  void store_head(C stored, C offset) {
    store(body_, 0, stored);
    if (has_offsets(format_)) store(body_, 1, offset);
  }
  void store_span_scale(C wanted, C absmax) {
    const uint64_t bits = encode_scale(format_, wanted, absmax, C(1));
    store_head(bits_as<C>(static_cast<BitsOf<C>>(bits)), C(0));
  }

  void store_span_range(ValueRange<C> range) {
    const RangeBits bits = bits_of_range(range);
    store_head(value_of(bits.scale), value_of(bits.offset));
  }

  // ---- blocks ----

  // Makes and stores the scales of the blocks from `first_block` on, of n values.
  template <class Source>
  void encode_scales(int64_t first_block, const Source& source, int64_t n) {
    const int64_t block_size = format_.block_size;
    const int64_t count = ceil_div(n, block_size);
    look_at_blocks(source, n);
    if (format_.scales == Scales::kSpan) {
      const C offset = has_offsets(format_) ? load<C>(body_, 1) : C(0);
      const BlockScale<C> s = block_scale(format_, head_, offset);
      for (int64_t k = 0; k < count; ++k) scales_.set(k, s);
    } else if (!store_common_scales(body_ + layout_.scale_at(first_block), n, count)) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t i = k * block_size;
        scales_.set(
            k, encode_block_scale(first_block + k, source.from(i),
                                  smaller(block_size, n - i), absmax_[k], sums_[k]));
      }
    }
    finish_scales(count);
  }

 private:
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

  // Makes and stores the scale of a block.
  template <class Source>
  COMMKERN_MEMBER BlockScale<C> encode_block_scale(int64_t block, const Source& source,
                                                   int64_t n, C absmax, C plain_sum) {
    const Format& f = format_;
    if (!is_finite(absmax)) {
      store_bits(layout_.scale_at(block), nan_scale_bits<C>(f.scales));
      if (has_offsets(f)) store_bits(layout_.offset_at(block), 0);
      return block_scale(f, bits_as<C>(FloatBits<C>::kNan), C(0));
    }
    if (f.statistic == Statistic::kRange) {
      const RangeBits bits = bits_of_range(range_of<C>(source, n));
      store_bits(layout_.scale_at(block), bits.scale);
      store_bits(layout_.offset_at(block), bits.offset);
      return block_scale(f, value_of(bits.scale), value_of(bits.offset));
    }
    C wanted = absmax / largest();
    if (f.statistic != Statistic::kAbsmax && absmax > 0) {
      const C q = normaliser(absmax);
      const C sum = q == C(1) ? plain_sum : facts_of<C>(f.statistic, source, n, q).sum;
      wanted = wanted_of_sum(f, sum, n, q);
    }
    const uint64_t bits = encode_scale(f, wanted, absmax, head_);
    store_bits(layout_.scale_at(block), bits);
    return block_scale(f, value_of(bits), C(0));
  }

  // One pass over the values for what most scales come from.
  template <class Source>
  COMMKERN_MEMBER void look_at_blocks(const Source& source, int64_t n) {
    const int64_t block_size = format_.block_size;
    const bool sums =
        format_.scales != Scales::kSpan &&
        (format_.statistic == Statistic::kMean || format_.statistic == Statistic::kL2);
    int64_t k = sums ? 0 : look_at_small_blocks(source, n);
    for (int64_t i = k * block_size; i < n; ++k, i += block_size) {
      const int64_t length = smaller(block_size, n - i);
      if (sums) {
        const auto facts = facts_of<C>(format_.statistic, source.from(i), length, C(1));
        absmax_[k] = facts.absmax;
        sums_[k] = facts.sum;
      } else {
        absmax_[k] = absmax_of<C>(source.from(i), length);
      }
    }
  }

  // Small blocks by kLanes; returns how many.
  template <class Source>
  COMMKERN_MEMBER int64_t look_at_small_blocks(const Source& source, int64_t n) {
    int64_t k = 0;
    if constexpr (kHasVectors<C>) {
      const int64_t block_size = format_.block_size;
      const int64_t whole = n / block_size / kLanes * kLanes;
      if (block_size > 64 || block_size % kLanes != 0) return 0;
      for (; k < whole; k += kLanes) {
        Ints most[kLanes];
        for (int64_t b = 0; b < kLanes; ++b) {
          const int64_t begin = (k + b) * block_size;
          most[b] = magnitude_of(source.lanes(begin));
          for (int64_t i = kLanes; i < block_size; i += kLanes) {
            most[b] = larger(most[b], magnitude_of(source.lanes(begin + i)));
          }
        }
        gather_largest(most);
        store(absmax_ + k, 0, most[0]);
      }
    }
    return k;
  }

  // The commonest scales, many at a time, where nothing can overflow and no sum needs a
  // normaliser. Returns false for all others.
  COMMKERN_MEMBER bool store_common_scales(uint8_t* stored, int64_t n, int64_t count) {
    BitsOf<C> most = 0, least = FloatBits<C>::kInf;
    for (int64_t k = 0; k < count; ++k) {
      const BitsOf<C> bits = magnitude_bits(absmax_[k]);
      most = bits > most ? bits : most;
      least = bits < least ? bits : least;
    }
    const bool plain = format_.scales == Scales::kCompute;
    if (plain && format_.statistic == Statistic::kMean) {
      if (bits_as<C>(least) < C(0x1p-60) || !(bits_as<C>(most) < C(0x1p40))) {
        return false;
      }
      return store_mean_scales(stored, n, count);
    }
    if (format_.statistic != Statistic::kAbsmax) return false;
    if (!(bits_as<C>(most) < largest_finite<C>() / 4)) return false;
    switch (format_.scales) {
      case Scales::kCompute: return store_plain_scales(stored, count);
      case Scales::kE8M0:
      case Scales::kOcp: return store_power_scales(stored, count);
      case Scales::kE4M3: return store_e4m3_scales(stored, count);
      default: return false;
    }
  }

  COMMKERN_MEMBER bool store_plain_scales(uint8_t* stored, int64_t count) {
    const C most = largest();
    for (int64_t k = 0; k < count; ++k) scales_.scale[k] = absmax_[k] / most;
    std::memcpy(stored, scales_.scale, count * sizeof(C));
    return true;
  }

  COMMKERN_MEMBER bool store_mean_scales(uint8_t* stored, int64_t n, int64_t count) {
    const int64_t block_size = format_.block_size;
    const C values = static_cast<C>(block_size);
    for (int64_t k = 0; k < count; ++k) scales_.scale[k] = sums_[k] / values;
    const int64_t rest = n - (count - 1) * block_size;
    scales_.scale[count - 1] = sums_[count - 1] / static_cast<C>(rest);
    std::memcpy(stored, scales_.scale, count * sizeof(C));
    return true;
  }

  COMMKERN_MEMBER bool store_power_scales(uint8_t* stored, int64_t count) {
    const bool ocp = format_.scales == Scales::kOcp;
    const C most = largest();
    const int exponent = largest_exponent(format_);
    for (int64_t k = 0; k < count; ++k) {
      const C wanted = absmax_[k] / most;
      const uint8_t byte =
          ocp ? e8m0_of_absmax(absmax_[k], exponent) : e8m0_at_least(wanted);
      stored[k] = (ocp ? absmax_[k] : wanted) == 0 ? uint8_t{0} : byte;
      scales_.scale[k] = e8m0_value<C>(stored[k]);
    }
    return true;
  }

  COMMKERN_MEMBER bool store_e4m3_scales(uint8_t* stored, int64_t count) {
    if constexpr (!kHasVectors<C>) {
      return false;
    } else {
      using Code = Minifloat<Float8E4M3>;
      if (head_ == 0) return false;
      alignas(64) int32_t codes[kMaxBlocks];
      for (int64_t k = 0; k < count; k += kLanes) {
        const Floats wanted = load_floats<float>(absmax_, k) / largest();
        const Ints code =
            Code::template encode_lanes<false>(wanted / head_, nullptr) & 0xff;
        store_floats<float>(scales_.scale, k, Code::decode_lanes(code) * head_);
        store(codes + k, 0, code);
      }
      for (int64_t k = 0; k < count; ++k) stored[k] = static_cast<uint8_t>(codes[k]);
      return true;
    }
  }

  // Reciprocals, and which blocks are ordinary.
  COMMKERN_MEMBER void finish_scales(int64_t count) {
    const C least = has_power_scales(format_) ? C(0) : next_below(C(0x1p-100));
    const C most = largest();
    const bool clamps = format_.code != Code::kSymmetric;  // when it encodes
    const C limit = largest_finite<C>() / 2;
    const C reach = clamps ? limit : most * C(1 + 0x1p-20);
    int64_t k = 0;
    if constexpr (kHasVectors<C>) {
      for (; k < count; k += kLanes) {  // and a few more, which nobody reads
        const Floats s = load_floats<float>(scales_.scale, k);
        const Floats absmax = load_floats<float>(absmax_, k);
        const Floats r = 1.0f / s;
        store_floats<float>(scales_.reciprocal, k, r);
        store_floats<float>(scales_.lift, k, broadcast(1.0f));
        store(scales_.ordinary + k, 0,
              (s > least) & (absmax + most * s <= limit) & (absmax * r <= reach));
      }
    }
    for (; k < count; ++k) {
      const C s = scales_.scale[k], absmax = absmax_[k];
      const C r = C(1) / s;
      scales_.reciprocal[k] = r;
      scales_.lift[k] = C(1);
      scales_.ordinary[k] =
          s > least && absmax + most * s <= limit && absmax * r <= reach ? -1 : 0;
    }
    int32_t all = -1;
    for (k = 0; k < count; ++k) all &= scales_.ordinary[k];
    scales_.all_ordinary = all != 0;
    if (has_offsets(format_)) return finish_offset_scales(count);
    std::memset(scales_.halved, 0, count);
    for (k = 0; all == 0 && k < count; ++k) {
      if (!scales_.ordinary[k]) {
        scales_.set(k, block_scale(format_, scales_.scale[k], C(0)));
      }
    }
  }

  // Blocks with offsets have been set one by one.
  COMMKERN_MEMBER void finish_offset_scales(int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      const bool ordinary = scales_.ordinary[k] != 0 && !scales_.halved[k];
      if (!ordinary) {
        const C s = scales_.halved[k] ? -scales_.scale[k] : scales_.scale[k];
        scales_.set(k, block_scale(format_, s, scales_.offset[k]));
      }
      scales_.ordinary[k] = ordinary ? -1 : 0;
      scales_.all_ordinary &= ordinary;
    }
  }

  const Format& format_;
  const BodyLayout& layout_;
  uint8_t* const body_;
  C head_ = 1;
  BlockScales<C> scales_;
  alignas(64) C absmax_[kMaxBlocks];
  C sums_[kMaxBlocks];
};

COMMKERN_END_ISA
