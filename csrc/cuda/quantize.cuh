// Device code that decodes block-quantised payloads (kernels/quantize.h holds the
// contract).
#pragma once

#include "core/bitpack.h"
#include "core/block_scale.h"
#include "core/code_books.h"
#include "core/five_pack.h"
#include "cuda/elements.cuh"
#include "cuda/tuning.h"
#include "kernels/quantize.h"

namespace commkern::cuda {

// The elements that a thread decodes at once. They begin at a multiple of 8 in their
// span, so that they lie within one block and, packed densely, begin on a byte.
constexpr int kRunCount = kDequantizeTuning.per_thread;
static_assert(kRunCount == kPackGroup);

// ---- code -> value, in units of the scale; every value is exact in fp32 ----

using CodeValues = Run<float, kRunCount>;

// Indexed, where Book::value() would branch. Built at compile time.
template <class Book>
struct BookTable {
  float decoded[1 << Book::kBits];
  constexpr BookTable() : decoded() {
    for (int code = 0; code < 1 << Book::kBits; ++code) {
      decoded[code] = book_decoded<Book>(code);
    }
  }
};
static __device__ constexpr BookTable<NormalFloat4Book> kNormalFloat4Table;
static __device__ constexpr BookTable<Dynamic8Book> kDynamic8Table;

// A sign on top, then a level k: 2^(k - largest level), 0 for 0.
COMMKERN_DEVICE float natural_value(uint32_t code, int bits) {
  const int top = (1 << (bits - 1)) - 1;
  const int level = static_cast<int>(code) & top;
  if (level == 0) return 0;
  const float value = power_of_two<float>(level - top);
  return static_cast<int>(code) == level ? value : -value;
}

// decode(code) of each code in `word`, the first in the lowest bits.
template <class Decode>
COMMKERN_DEVICE CodeValues decode_each(uint64_t word, int bits, const Decode& decode) {
  const uint32_t mask = (1u << bits) - 1;
  CodeValues values;
  for (int k = 0; k < kRunCount; ++k) {
    values.at[k] = decode(static_cast<uint32_t>(word >> (k * bits)) & mask);
  }
  return values;
}

template <class Float>
COMMKERN_DEVICE CodeValues decode_floats(uint64_t word) {
  return decode_each(word, Float::kBits,
                     [](uint32_t code) { return minifloat_value<Float>(code); });
}

// Of all codes but ternary ones.
COMMKERN_DEVICE CodeValues decode_dense(const Format& f, uint64_t word) {
  const int bits = f.bits;
  switch (f.code) {
    case Code::kAsymmetric:
      return decode_each(word, bits,
                         [](uint32_t code) { return static_cast<float>(code); });
    case Code::kSign:
      return decode_each(word, 1,
                         [](uint32_t code) { return code == 0 ? 1.0f : -1.0f; });
    case Code::kNatural:
      return decode_each(word, bits,
                         [bits](uint32_t code) { return natural_value(code, bits); });
    case Code::kFloat8E4M3: return decode_floats<Float8E4M3>(word);
    case Code::kFloat8E5M2: return decode_floats<Float8E5M2>(word);
    case Code::kFloat6E3M2: return decode_floats<Float6E3M2>(word);
    case Code::kFloat6E2M3: return decode_floats<Float6E2M3>(word);
    case Code::kFloat4E2M1: return decode_floats<Float4E2M1>(word);
    case Code::kNormalFloat4:
      return decode_each(
          word, 4, [](uint32_t code) { return kNormalFloat4Table.decoded[code]; });
    case Code::kDynamic8:
      return decode_each(word, 8,
                         [](uint32_t code) { return kDynamic8Table.decoded[code]; });
    default:  // symmetric, threshold
      return decode_each(word, bits, [bits](uint32_t code) {
        return static_cast<float>(signed_code(code, bits));
      });
  }
}

// ---- the pieces of a body ----

// `a` >= 0, `b` > 0. Most lengths fit 32 bits, where division is several times cheaper.
COMMKERN_DEVICE int64_t divide(int64_t a, int32_t b) {
  if (a <= UINT32_MAX) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The packed codes of `n` elements.
COMMKERN_DEVICE uint64_t load_codes(const uint8_t* from, int n, int bits) {
  if (n < kPackGroup) return load_word(from, packed_nbytes(n, bits));
  if (bits != 4 && bits != 8) return load_word(from, bits);
  const uint64_t low = load<uint32_t>(from);
  return bits == 4 ? low : low | uint64_t{load<uint32_t>(from + 4)} << 32;
}

// Five to a byte: `n` codes from element `i` on of the block of `count` at `from`.
COMMKERN_DEVICE CodeValues decode_ternary(const uint8_t* from, int32_t count, int32_t i,
                                          int n) {
  const auto width = static_cast<int32_t>(five_packed_nbytes(count));
  int32_t plane = i / width;
  int32_t column = i - plane * width;
  CodeValues values{};
  for (int k = 0; k < kRunCount; ++k) {
    if (k < n) values.at[k] = five_packed_code(from[column], plane);
    if (++column == width) {
      column = 0;
      ++plane;
    }
  }
  return values;
}

COMMKERN_DEVICE CodeValues decode_codes(const Format& f, const Span& span,
                                        const uint8_t* codes, int64_t block,
                                        int64_t first, int n) {
  if (f.code != Code::kTernary) {
    const int64_t at = first / kPackGroup * f.bits;
    return decode_dense(f, load_codes(codes + at, n, f.bits));
  }
  const int64_t begin = block * f.block_size;
  const int64_t left = span.length - begin;
  const auto count = left < f.block_size ? static_cast<int32_t>(left) : f.block_size;
  return decode_ternary(codes + block * five_packed_nbytes(f.block_size), count,
                        static_cast<int32_t>(first - begin), n);
}

// The bits of a stored scale or offset.
template <class C>
COMMKERN_DEVICE uint64_t load_stored(const uint8_t* from, int64_t nbytes) {
  if (nbytes == 1) return *from;
  return nbytes == 2 ? load<uint16_t>(from) : load<BitsOf<C>>(from);
}

template <class C>
COMMKERN_DEVICE BlockScale<C> scale_of(const Format& f, const BodyLayout& layout,
                                       const uint8_t* body, int64_t block) {
  const bool shared = f.scales == Scales::kSpan;  // the head is the scale
  const C head = has_head(f) ? load<C>(body) : C(1);
  const auto value = [&](int64_t at) {
    const uint64_t stored = load_stored<C>(body + at, layout.scale_nbytes);
    return decode_scale<C>(f.scales, stored, head);
  };
  const C scale = shared ? head : value(layout.scale_at(block));
  const C offset = has_offsets(f) ? value(layout.offset_at(shared ? 0 : block)) : C(0);
  return decoding_scale(f, scale, offset);
}

// ---- kernels ----

// With kPlainBits a symmetric format with scales of the compute type, of which the
// compiler then knows all but the block size; those are common, and much faster so.
template <int kPlainBits>
COMMKERN_DEVICE Format known_format(const Format& given) {
  if constexpr (kPlainBits == 0) return given;
  Format format;
  format.bits = kPlainBits;
  format.block_size = given.block_size;
  return format;
}

// Whether the scale of the block is finite, and what it wrote where that can overflow.
template <class T>
COMMKERN_DEVICE bool dequantize_run(const DequantizeArgs& args, const Format& f,
                                    bool add, const Span& span, int64_t first, int n) {
  using C = ComputeOf<T>;
  const int64_t blocks = divide(span.length + f.block_size - 1, f.block_size);
  const int64_t block = divide(first, f.block_size);
  const BodyLayout layout(f, args.dtype, span.length, blocks);
  const uint8_t* body = args.payload.data + span.body;
  const BlockScale<C> s = scale_of<C>(f, layout, body, block);
  const CodeValues values = decode_codes(f, span, body + layout.codes, block, first, n);
  const C factor = static_cast<C>(args.scale);
  uint8_t* output = args.output.data + (span.offset + first) * sizeof(T);
  Run<T, kRunCount> results{};
  if (add) results = load_run<T, kRunCount>(output, n);
  bool finite = is_finite(s.scale);
  for (int k = 0; k < kRunCount; ++k) {
    C value = static_cast<C>(values.at[k]) * s.scale;
    if (has_offsets(f)) value += s.offset;  // of -0 and 0, that is 0
    if (s.halved) value *= C(2);
    value *= factor;
    if (add) value = convert<C>(results.at[k]) + value;
    results.at[k] = convert<T>(value);
    if (sizeof(T) == 2 && k < n) finite &= is_finite(convert<C>(results.at[k]));
  }
  store_run(output, results, n);
  return finite;
}

template <class T, int kPlainBits>
__global__ void __launch_bounds__(kDequantizeTuning.threads)
    dequantize_kernel(const __grid_constant__ DequantizeArgs args, bool add) {
  const Format format = known_format<kPlainBits>(args.format);
  for_runs<kDequantizeTuning.threads, kRunCount>(
      args.spans, [&](int64_t row, const Span& span, int64_t first, int n) {
        const bool finite = dequantize_run<T>(args, format, add, span, first, n);
        // Whichever thread writes writes the same.
        if (!finite && args.nonfinite.data != nullptr) args.nonfinite.data[row] = 1;
      });
}

}  // namespace commkern::cuda
