// Scales of blocks as numbers and as stored bits, for host and device; core/format.h
// states the rules.
#pragma once

#include "core/format.h"

namespace commkern {

// What a block's values are coded with.
template <class C>
struct BlockScale {
  C scale;       // what a code's value is multiplied by; NaN: nothing is coded
  C offset;      // what is added then
  C reciprocal;  // of scale * lift; 0 where the scale is
  C lift;        // 2^100 where 1 / scale would overflow
  bool halved;   // values are twice that
};

template <class C>
COMMKERN_HD int biased_exponent(C x) {
  return static_cast<int>(magnitude_bits(x) >> kMantissaBitsOf<C>);
}

template <class C>
COMMKERN_HD C largest_finite() {
  return bits_as<C>(static_cast<BitsOf<C>>(FloatBits<C>::kInf - 1));
}

template <class C>
COMMKERN_HD C next_below(C positive) {
  return bits_as<C>(static_cast<BitsOf<C>>(bits_as<BitsOf<C>>(positive) - 1));
}

COMMKERN_HD int clipped(int x, int least, int most) {
  return x < least ? least : (x > most ? most : x);
}

// What values are multiplied by before they are summed: 1 where no sum or square can
// leave the range, else what brings `absmax` to [1, 2), as far as normal numbers do.
template <class C>
COMMKERN_HD C normaliser(C absmax) {
  constexpr int kBias = kBiasOf<C>;
  const int exponent = biased_exponent(absmax) - kBias;
  if (exponent >= -60 && exponent < 40) return C(1);
  return power_of_two<C>(clipped(-exponent, 1 - kBias, kBias - 1));
}

// The head of a span whose largest finite |a| is `absmax`.
template <class C>
COMMKERN_HD C span_head(const Format& f, C absmax) {
  const C largest = static_cast<C>(largest_value(f));
  if (f.scales == Scales::kE4M3) {
    constexpr C kMost = Float8E4M3::kLargestNumber;
    const C head = absmax / (kMost * largest);
    if (head == 0 && absmax > 0) return bits_as<C>(BitsOf<C>{1});
    return is_finite(largest * (kMost * head)) ? head : next_below(head);
  }
  C wanted = absmax / largest;
  if (f.statistic == Statistic::kRange || f.statistic == Statistic::kMean) {
    wanted = absmax;
  } else if (f.statistic == Statistic::kL2) {
    wanted = absmax * static_cast<C>(__builtin_sqrt(double(f.block_size))) / largest;
    if (!is_finite(wanted)) wanted = largest_finite<C>();
  }
  if (wanted == 0) return C(1);
  constexpr int kBias = kBiasOf<C>;
  return power_of_two<C>(
      clipped(biased_exponent(wanted) - kBias - 14, 1 - kBias, kBias - 15));
}

// ---- stored forms: the low bytes of an integer ----

template <class C>
COMMKERN_HD uint64_t nan_scale_bits(Scales scales) {
  switch (scales) {
    case Scales::kFloat16: return 0x7e00;
    case Scales::kBFloat16: return 0x7fc0;
    case Scales::kE8M0:
    case Scales::kOcp: return kE8M0Nan;
    case Scales::kE4M3: return 0x7f;
    default: return FloatBits<C>::kNan;
  }
}

template <class C>
COMMKERN_HD C decode_scale(Scales scales, uint64_t bits, C head) {
  switch (scales) {
    case Scales::kFloat16: return convert<C>(Half{static_cast<uint16_t>(bits)}) * head;
    case Scales::kBFloat16: return convert<C>(BFloat16{static_cast<uint16_t>(bits)});
    case Scales::kE8M0:
    case Scales::kOcp: return e8m0_value<C>(static_cast<uint8_t>(bits));
    case Scales::kE4M3:
      return C(minifloat_value<Float8E4M3>(static_cast<uint32_t>(bits))) * head;
    default: return bits_as<C>(static_cast<BitsOf<C>>(bits));
  }
}

// The exponent of the largest value of an OCP format.
COMMKERN_HD int largest_exponent(const Format& f) {
  return floor_log2(largest_value(f));
}

// The largest s for which largest * s is finite.
template <class C>
COMMKERN_HD C largest_scale(C largest) {
  const C scale = largest_finite<C>() / largest;
  return is_finite(scale * largest) ? scale : next_below(scale);
}

// The smallest stored scale that is not below `wanted` >= 0; or with `up` false the
// largest that is not above, of an offset, too.
template <class C>
COMMKERN_HD uint64_t nearest_scale(Scales scales, C wanted, C head, bool up) {
  const C finite = is_finite(wanted) ? wanted : largest_finite<C>();
  switch (scales) {
    case Scales::kFloat16: return narrow_toward<Half>(wanted / head, up).bits;
    case Scales::kBFloat16: return narrow_toward<BFloat16>(finite, up).bits;
    case Scales::kE8M0:
      if (wanted == 0) return 0;
      return up ? e8m0_at_least(finite) : e8m0_of_absmax(finite, 0);
    default: return bits_as<BitsOf<C>>(finite);
  }
}

// `wanted` >= 0, perhaps infinite; `absmax` is that of the block.
template <class C>
COMMKERN_HD uint64_t encode_scale(const Format& f, C wanted, C absmax, C head) {
  if (f.scales == Scales::kOcp) {
    return absmax == 0 ? 0 : e8m0_of_absmax(absmax, largest_exponent(f));
  }
  if (f.scales == Scales::kE4M3) {
    return head == 0 ? 0 : minifloat_code<Float8E4M3>(wanted / head);
  }
  const C largest = static_cast<C>(largest_value(f));
  const uint64_t bits = nearest_scale(f.scales, wanted, head, true);
  if (is_finite(largest * decode_scale<C>(f.scales, bits, head))) return bits;
  return nearest_scale(f.scales, largest_scale(largest), head, false);
}

// What is stored for values from `least` to `most`.
struct RangeBits {
  uint64_t scale, offset;
};

template <class C>
COMMKERN_HD RangeBits encode_range(const Format& f, C least, C most, C head,
                                   int64_t nbytes) {
  const C largest = static_cast<C>(largest_value(f));
  const auto value = [&](uint64_t bits) {
    return decode_scale<C>(f.scales, bits, head);
  };
  const C first = value(nearest_scale(f.scales, least, head, false));
  const bool halved = !is_finite(most - first);
  const C half = halved ? C(0.5) : C(1);
  RangeBits bits;
  bits.offset = nearest_scale(f.scales, least * half, head, false);
  // Rounded down to -2^127, it would decode to twice that.
  if (!is_finite(value(bits.offset) / half)) --bits.offset;
  const C offset = value(bits.offset);
  // Below 0 where the offset could not reach that low.
  const C distance = most * half > offset ? most * half - offset : C(0);
  const C wanted = (is_finite(distance) ? distance : largest_finite<C>()) / largest;
  bits.scale = nearest_scale(f.scales, wanted, head, true);
  if (!is_finite((largest * value(bits.scale) + offset) / half)) --bits.scale;
  if (halved) bits.scale |= uint64_t{1} << (8 * nbytes - 1);
  return bits;
}

// ---- as numbers ----

// What decoding needs. Negative scales are those of halved blocks, which have offsets.
template <class C>
COMMKERN_HD BlockScale<C> decoding_scale(const Format& f, C stored, C offset) {
  const bool halved = has_offsets(f) && stored < 0;
  return {halved ? -stored : stored, offset, C(0), C(1), halved};
}

template <class C>
COMMKERN_HD BlockScale<C> block_scale(const Format& f, C stored, C offset) {
  BlockScale<C> s = decoding_scale(f, stored, offset);
  if (s.scale >= C(0x1p-100) || (has_power_scales(f) && s.scale > 0)) {
    s.reciprocal = C(1) / s.scale;
  } else if (s.scale > 0) {
    s.lift = C(0x1p100);
    s.reciprocal = C(1) / (s.scale * s.lift);
  }
  return s;
}

}  // namespace commkern
