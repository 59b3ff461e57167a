// The formats of the block quantisers: what an element, a scale and a body look like.
//
// Body of one span (payload + span.body), n = span.length, B = block_size,
// K = ceil(n / B), C the compute type of the data (fp64 for fp64 data, else fp32):
//   head     one C, for scales float16, e4m3 and span
//   scales   K scales (none for span)
//   offsets  asymmetric only: as many values of the same type (one C for span)
// (all of them missing where n = 0)
//   codes    dense: code j fills bits [j * bits, (j + 1) * bits), little-endian, the
//            last byte padded with zero bits (B is a multiple of 8, so that every block
//            starts on a byte; core/bitpack.h); ternary: five to a byte, block by
//            block (core/five_pack.h)
//
// A block's scale, from its values a, every operation in C and rounded once; L is the
// largest value of a code (see `largest_value`), q the power of two of normaliser() in
// core/block_scale.h, 1 for absmax in [2^-60, 2^40):
//   absmax    wanted = max |a| / L
//   l2        wanted = sqrt(sum((a q)^2)) / L / q
//   mean      wanted = sum(|a| q) / count / q
//   constant  wanted = constant
//   range     offset = min a; wanted = (max a - offset) / L. Where that difference
//             overflows the block is halved: both from a / 2, and s is stored negative.
// Sums are taken in tiles of kSumTile values from the start of the block (span):
// sixteen lane-strided partial sums in a tile, combined pairwise; tiles as a binary
// tree in index order. Its stored form s (and s is what the code is made with):
//   compute   wanted
//   bfloat16  the smallest number that is not below wanted
//   float16   the same of wanted / head; head = the power of two that brings the
//             largest wanted of the span's finite blocks (bounded from their largest
//             |a|: that for range and mean, times sqrt(B) for l2) to [2^14, 2^15)
//   e8m0      the smallest power of two that is not below wanted, in 2^-127 ... 2^127
//   ocp       2^(floor(log2(max |a|)) - exponent of L), in e8m0 (OCP MX v1.0, 6.3)
//   e4m3      e4m3 of wanted / head to nearest, head = largest finite |a| / (448 L),
//             at least the smallest number
//   span      wanted of the whole span, in the head; with a constant, 0 for zeros only
// Where L * s would overflow, s is the largest scale of its type for which it does not
// (e4m3: the next smaller head; range: the next smaller scale where L * s + offset,
// doubled for a halved block, would). Offsets in 16 bits are rounded down. A block (for
// span: a span) that holds NaN or Inf gets scale NaN, offset 0 and codes 0. Where s is
// 0 all codes are 0.
#pragma once

#include "core/minifloat.h"
#include "core/types.h"

namespace commkern {

// What an element becomes. In brackets the values that a code stands for, in units of
// the scale.
enum class Code : int32_t {
  kSymmetric,   // two's complement [-L ... L, L = 2^(bits-1) - 1]
  kAsymmetric,  // unsigned [0 ... 2^bits - 1], plus the block's offset
  kSign,        // 0 [+1] or 1 [-1]
  kTernary,     // [-1, 0, 1]
  kThreshold,   // two's complement [-1, 0, 1]: 0 below the scale
  kNatural,     // a sign and a power of two [0, 2^(1-K) ... 1, K = 2^(bits-1) - 1]
  kFloat8E4M3,  // floats of the OCP specifications
  kFloat8E5M2,
  kFloat6E3M2,
  kFloat6E2M3,
  kFloat4E2M1,
  kNormalFloat4,  // an index into core/code_books.h, XORed with that of 0
  kDynamic8,
};
enum class Scales : int32_t {
  kCompute,
  kFloat16,
  kBFloat16,
  kE8M0,
  kOcp,
  kE4M3,
  kSpan,
};
enum class Statistic : int32_t { kAbsmax, kL2, kMean, kRange, kConstant };

template <>
struct NamesOf<Code> {
  static constexpr const char* kNames[] = {
      "symmetric",   "asymmetric",  "sign",        "ternary",     "threshold",
      "natural",     "float8_e4m3", "float8_e5m2", "float6_e3m2", "float6_e2m3",
      "float4_e2m1", "nf4",         "dynamic8"};
};
template <>
struct NamesOf<Scales> {
  static constexpr const char* kNames[] = {"compute", "float16", "bfloat16", "e8m0",
                                           "ocp",     "e4m3",    "span"};
};
template <>
struct NamesOf<Statistic> {
  static constexpr const char* kNames[] = {"absmax", "l2", "mean", "range", "constant"};
};

struct Format {
  Code code = Code::kSymmetric;
  int32_t bits = 8;
  int32_t block_size = 128;
  Scales scales = Scales::kCompute;
  Statistic statistic = Statistic::kAbsmax;
  double constant = 1.0;  // of the statistic of that name
  int32_t rotation = 0;   // elements of a Hadamard transform before the code, or 0
};

template <class Visitor>
void visit_format(Format& f, Visitor&& field) {
  field("code", f.code);
  field("bits", f.bits);
  field("block_size", f.block_size);
  field("scales", f.scales);
  field("statistic", f.statistic);
  field("constant", f.constant);
  field("rotation", f.rotation);
}

// Values that are summed before tiles are combined.
inline constexpr int64_t kSumTile = 4096;

constexpr double largest_value(const Format& f) {
  switch (f.code) {
    case Code::kSymmetric: return (1 << (f.bits - 1)) - 1;
    case Code::kAsymmetric: return (1 << f.bits) - 1;
    case Code::kFloat8E4M3: return Float8E4M3::kLargestNumber;
    case Code::kFloat8E5M2: return Float8E5M2::kLargestNumber;
    case Code::kFloat6E3M2: return Float6E3M2::kLargestNumber;
    case Code::kFloat6E2M3: return Float6E2M3::kLargestNumber;
    case Code::kFloat4E2M1: return Float4E2M1::kLargestNumber;
    default: return 1;
  }
}

constexpr bool has_head(const Format& f) {
  return f.scales == Scales::kFloat16 || f.scales == Scales::kE4M3 ||
         f.scales == Scales::kSpan;
}

// Whether scales are powers of two, whose reciprocals are exact.
constexpr bool has_power_scales(const Format& f) {
  return f.scales == Scales::kE8M0 || f.scales == Scales::kOcp;
}

constexpr bool has_offsets(const Format& f) { return f.code == Code::kAsymmetric; }

// Bytes of one stored scale or offset.
constexpr int64_t scale_nbytes(const Format& f, DType dtype) {
  switch (f.scales) {
    case Scales::kFloat16:
    case Scales::kBFloat16: return 2;
    case Scales::kE8M0:
    case Scales::kOcp:
    case Scales::kE4M3: return 1;
    default: return compute_nbytes(dtype);
  }
}

constexpr int64_t codes_nbytes(const Format& f, int64_t length) {
  if (f.code != Code::kTernary) return ceil_div(length * f.bits, 8);
  return length / f.block_size * ceil_div(f.block_size, 5) +
         ceil_div(length % f.block_size, 5);
}

// Where the pieces of a span's body lie, in bytes from its start.
struct BodyLayout {
  int64_t scale_nbytes;
  int64_t scales;
  int64_t offsets = 0;
  int64_t codes = 0;
  int64_t block_nbytes = 0;  // codes of a whole block
  int64_t nbytes = 0;

  constexpr BodyLayout(const Format& f, DType dtype, int64_t length)
      : BodyLayout(f, dtype, length, ceil_div(length, f.block_size)) {}
  constexpr BodyLayout(const Format& f, DType dtype, int64_t length, int64_t blocks)
      : scale_nbytes(commkern::scale_nbytes(f, dtype)),
        scales(has_head(f) && length > 0 ? compute_nbytes(dtype) : 0) {
    const int64_t count = f.scales == Scales::kSpan ? 0 : blocks;
    const int64_t offset_count = f.scales == Scales::kSpan && length > 0 ? 1 : count;
    offsets = scales + count * scale_nbytes;
    codes = offsets + (has_offsets(f) ? offset_count * scale_nbytes : 0);
    block_nbytes = codes_nbytes(f, f.block_size);
    nbytes = codes + codes_nbytes(f, length);
  }

  constexpr int64_t scale_at(int64_t block) const {
    return scales + block * scale_nbytes;
  }
  constexpr int64_t offset_at(int64_t block) const {
    return offsets + block * scale_nbytes;
  }
  constexpr int64_t codes_at(int64_t block) const {
    return codes + block * block_nbytes;
  }
};

// Elements that are worked on together.
constexpr int64_t unit_of(const Format& f) {
  return f.rotation > f.block_size ? f.rotation : f.block_size;
}

// Throws std::invalid_argument, with what is allowed and what was given.
void check_format(const Format& format, Rounding rounding);

}  // namespace commkern
