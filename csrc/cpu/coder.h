// Between the shapes of a body (quantize.cpp) and its codes (coder_*.cpp): runs of
// blocks go from values to codes and back through one function pointer a format.
#pragma once

#include "core/block_scale.h"
#include "cpu/random.h"

COMMKERN_BEGIN_ISA

// Most elements that are worked on at once: a unit, which is a whole block or rotation.
constexpr int64_t kMaxUnit = 8192;
constexpr int64_t kMaxBlocks = kMaxUnit / 16;

// The scales of the blocks in work.
template <class C>
struct BlockScales {
  alignas(64) C scale[kMaxBlocks];
  alignas(64) C reciprocal[kMaxBlocks];
  C offset[kMaxBlocks];
  alignas(64) C lift[kMaxBlocks];
  bool halved[kMaxBlocks];
  // Neither lift nor halved, a scale above 0, and no value outside what the codes
  // reach, but by rounding: then no code needs to be clamped and no error overflows.
  alignas(64) int32_t ordinary[kMaxBlocks];  // 0 or -1
  bool all_ordinary;

  COMMKERN_MEMBER BlockScale<C> at(int64_t k) const {
    return {scale[k], offset[k], reciprocal[k], lift[k], halved[k]};
  }
  COMMKERN_MEMBER void set(int64_t k, const BlockScale<C>& s) {
    scale[k] = s.scale;
    offset[k] = s.offset;
    reciprocal[k] = s.reciprocal;
    lift[k] = s.lift;
    halved[k] = s.halved;
  }
};

// What is coded, and what becomes of its error; those of a NaN block are left alone.
enum class Errors {
  kNone,   // the values
  kWrite,  // the values plus `before`; the error is written
  kAdd,    // the values; the error is added to what is there, if the sum is finite
};

// Blocks that follow each other, from their values in the compute type.
template <class C>
struct EncodeRun {
  const uint8_t* values;
  uint8_t* errors;        // of type float
  const uint8_t* before;  // of type float; written where an error is not finite
  bool streams;           // written past the cache; the address allows it
  int64_t count;          // values
  int64_t block_size;
  const BlockScales<C>& scales;
  uint8_t* codes;
  int64_t block_nbytes;
  const uint8_t* bytes;  // random, one a value; a block's fill whole draws
  int64_t block_draws_nbytes;
};

// v * factor of each code; `add` adds it to what `output` holds.
template <class C>
struct DecodeRun {
  const uint8_t* codes;
  int64_t block_nbytes;
  int64_t count;
  int64_t block_size;
  const BlockScales<C>& scales;  // `ordinary` and what else encoding needs is not read
  C factor;
  uint8_t* output;
  bool streams;
};

template <class C>
using Encode = void (*)(const EncodeRun<C>& run);
template <class C>
using Decode = void (*)(const DecodeRun<C>& run);

// What serves a format; looked up once a call.
template <class C>
struct Coder {
  Encode<C> encode[3];  // by Errors; of fp64 only kNone
  Decode<C> decode[2];  // overwriting and adding
};

// The coders of some codes each, in the file of that name.
template <class C>
Coder<C> symmetric_coder(const Format& format, Rounding rounding);
template <class C>
Coder<C> asymmetric_coder(const Format& format, Rounding rounding);
template <class C>
Coder<C> few_values_coder(const Format& format, Rounding rounding);
template <class C>
Coder<C> natural_coder(const Format& format, Rounding rounding);
template <class C>
Coder<C> table_coder(const Format& format, Rounding rounding);
template <class C>
Coder<C> minifloat_coder(const Format& format, Rounding rounding);

template <class C>
COMMKERN_INLINE Coder<C> coder_of(const Format& format, Rounding rounding) {
  switch (format.code) {
    case Code::kSymmetric: return symmetric_coder<C>(format, rounding);
    case Code::kAsymmetric: return asymmetric_coder<C>(format, rounding);
    case Code::kSign:
    case Code::kTernary:
    case Code::kThreshold: return few_values_coder<C>(format, rounding);
    case Code::kNatural: return natural_coder<C>(format, rounding);
    case Code::kNormalFloat4:
    case Code::kDynamic8: return table_coder<C>(format, rounding);
    default: return minifloat_coder<C>(format, rounding);
  }
}

COMMKERN_END_ISA
