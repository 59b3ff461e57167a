// The two loops that every code goes through. A `Code` (cpu/codes.h) says how a value
// in units of its block's scale becomes bits and back.
#pragma once

#include "core/bitpack.h"
#include "cpu/coder.h"
#include "cpu/codes.h"
#include "cpu/codes_book.h"
#include "cpu/codes_float.h"
#include "cpu/five_pack.h"

COMMKERN_BEGIN_ISA

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};
// fn(Int<bits>{}) for bits from kLeast to kMost.
template <int kLeast, int kMost, class Fn>
COMMKERN_INLINE void with_bits(int32_t bits, Fn fn) {
  if constexpr (kLeast < kMost) {
    if (bits > kLeast) return with_bits<kLeast + 1, kMost>(bits, fn);
  }
  fn(Int<kLeast>{});
}

// Where the codes of a block lie before they are packed five to a byte.
struct FiveBuffer {
  alignas(64) uint8_t codes[kMaxUnit + kFiveSlack];
};
// Those of all blocks of a run: vectors read what smaller ones wrote, which is slow
// right after. kFivePad bytes follow each block.
struct FiveBuffers {
  static constexpr int64_t kNbytes = kMaxUnit + kMaxBlocks * kFivePad;
  alignas(64) uint8_t codes[kNbytes + kFiveSlack];
  COMMKERN_MEMBER uint8_t* block(int64_t k, int64_t block_size) {
    return codes + k * (block_size + kFivePad);
  }
};
struct NoBuffer {};
template <bool kFivePacked, class Buffer>
struct BufferFor {
  using type = NoBuffer;
};
template <class Buffer>
struct BufferFor<true, Buffer> {
  using type = Buffer;
};
template <class Code, class Buffer>
using BufferOf = typename BufferFor<Code::kFivePacked, Buffer>::type;

template <class C, class Code, bool kStochastic, Errors kErrors>
class EncodeLoop {
 public:
  explicit COMMKERN_MEMBER EncodeLoop(const EncodeRun<C>& run) : run_(run) {}

  COMMKERN_MEMBER void run() {
    if constexpr (kHasVectors<C> && !Code::kFivePacked) {
      const bool whole =
          run_.block_size % kWhole == 0 && run_.count % run_.block_size == 0;
      if (whole && run_.scales.all_ordinary) return encode_whole_blocks();
    }
    encode_any_blocks();
  }

 private:
  // The commonest case, for blocks so small that what else there is would count.
  COMMKERN_MEMBER void encode_whole_blocks() {
    uint8_t* out = run_.codes;
    const int64_t size = run_.block_size;
    const int64_t block_nbytes = run_.block_nbytes;
    const uint8_t* values = run_.values;
    const uint8_t* before = run_.before;
    uint8_t* errors = run_.errors;
    const bool streams = run_.streams;
    const uint8_t* bytes = run_.bytes;
    const int64_t draws_nbytes = run_.block_draws_nbytes;
    const BlockScales<C>& s = run_.scales;
    for (int64_t k = 0, begin = 0; begin < run_.count; ++k, begin += size) {
      encode_lanes({s.scale[k], s.offset[k], s.reciprocal[k], 1, false},
                   values + begin * sizeof(C), before + begin * sizeof(float),
                   errors + begin * sizeof(float), streams, 0, size,
                   out + k * block_nbytes, bytes + k * draws_nbytes);
    }
  }

  COMMKERN_MEMBER void encode_any_blocks() {
    for (int64_t k = 0, begin = 0; begin < run_.count; ++k, begin += run_.block_size) {
      const int64_t n = smaller(run_.block_size, run_.count - begin);
      scale_ = run_.scales.at(k);
      values_ = run_.values + begin * sizeof(C);
      errors_ =
          kErrors == Errors::kNone ? nullptr : run_.errors + begin * sizeof(float);
      before_ = run_.before + begin * sizeof(float);
      bytes_ = run_.bytes + k * run_.block_draws_nbytes;
      uint8_t* out = run_.codes + k * run_.block_nbytes;
      if (!(scale_.scale > 0)) {
        encode_nothing(n, out);
      } else if constexpr (Code::kFivePacked) {
        uint8_t* codes = five_.block(k, run_.block_size);
        pad_five(codes, n);
        encode_block(n, run_.scales.ordinary[k] != 0, codes);
      } else {
        encode_block(n, run_.scales.ordinary[k] != 0, out);
      }
    }
    if constexpr (Code::kFivePacked) pack_blocks();
  }

  COMMKERN_MEMBER C at(int64_t i) const {
    const C a = load<C>(values_, i);
    if constexpr (kErrors != Errors::kWrite) return a;
    return a + static_cast<C>(load<float>(before_, i));
  }
  COMMKERN_MEMBER C position(C a) const {
    if constexpr (!Code::kOffset) return a * scale_.lift * scale_.reciprocal;
    if (scale_.halved) a *= C(0.5);
    return (a - scale_.offset) * scale_.lift * scale_.reciprocal;
  }
  COMMKERN_MEMBER int32_t code_of(C a, uint32_t byte) const {
    if constexpr (Code::template kOfValue<kStochastic>) {
      return Code::encode_value(a, scale_.scale);
    } else {
      return Code::template encode<kStochastic>(position(a), byte);
    }
  }
  COMMKERN_MEMBER C value(int32_t code) const {
    C v = Code::template decode<C>(code) * scale_.scale;
    if constexpr (Code::kOffset) v += scale_.offset;
    return Code::kOffset && scale_.halved ? v * C(2) : v;
  }

  COMMKERN_MEMBER void pack_blocks() {
    for (int64_t k = 0, begin = 0; begin < run_.count; ++k, begin += run_.block_size) {
      if (!(run_.scales.scale[k] > 0)) continue;
      const int64_t n = smaller(run_.block_size, run_.count - begin);
      pack_five(five_.block(k, run_.block_size), n, run_.codes + k * run_.block_nbytes);
    }
  }

  // Of a block without a scale: 0, or the offset for every value; NaN leaves errors.
  COMMKERN_MEMBER void encode_nothing(int64_t n, uint8_t* out) {
    const int64_t nbytes =
        Code::kFivePacked ? five_packed_nbytes(n) : packed_nbytes(n, Code::kBits);
    std::memset(out, 0, nbytes);
    if (kErrors == Errors::kNone || scale_.scale != 0) return;
    for (int64_t i = 0; i < n; ++i) put_error(i, at(i) - value(0));
  }

  COMMKERN_MEMBER void encode_block(int64_t n, bool ordinary, uint8_t* out) {
    int64_t begin = 0;
    if constexpr (kHasVectors<C>) {
      if (ordinary) begin = encode_vectors(n, out);
    }
    encode_scalars(begin, n, out);
  }

  // All whole groups of vectors, from one batch of random bytes to the next.
  COMMKERN_MEMBER int64_t encode_vectors(int64_t n, uint8_t* out) {
    const int64_t end = n / kWhole * kWhole;
    encode_own_lanes(0, end, out);
    return end;
  }

  COMMKERN_MEMBER void encode_own_lanes(int64_t begin, int64_t end, uint8_t* out) {
    encode_lanes(scale_, values_, before_, errors_, run_.streams, begin, end, out,
                 bytes_);
  }

  // All in arguments: for all the compiler knows, stores may change members.
  static COMMKERN_MEMBER void encode_lanes(const BlockScale<C>& s,
                                           const uint8_t* values, const uint8_t* before,
                                           uint8_t* errors, bool streams, int64_t begin,
                                           int64_t end, uint8_t* out,
                                           const uint8_t* bytes) {
    const Floats scale = broadcast(s.scale);
    const Floats reciprocal = broadcast(s.reciprocal);
    const Floats offset = broadcast(s.offset);
    for (int64_t i = begin; i < end; i += kWhole) {
      Ints codes[kParts];
      for (int v = 0; v < kParts; ++v) {
        const int64_t at = i + v * kLanes;
        Floats a = load_floats<float>(values, at);
        if constexpr (kErrors == Errors::kWrite) {
          a = a + load_floats<float>(before, at);
        }
        if constexpr (Code::template kOfValue<kStochastic>) {
          codes[v] = Code::encode_value_lanes(a, scale);
        } else {
          const Floats p = (Code::kOffset ? a - offset : a) * reciprocal;
          codes[v] = Code::template encode_lanes<kStochastic>(p, bytes + at);
        }
        if constexpr (kErrors != Errors::kNone) {
          Floats decoded = Code::decode_lanes(codes[v]) * scale;
          if constexpr (Code::kOffset) decoded = decoded + offset;
          put_errors(errors, at, a - decoded, streams);
        }
      }
      store_group<Code::kBits>(out + i * Code::kBits / 8, codes);
    }
  }

  static COMMKERN_MEMBER void put_errors(uint8_t* errors, int64_t at, Floats error,
                                         bool streams) {
    if constexpr (kErrors == Errors::kAdd) {
      const Floats before = load_floats<float>(errors, at);
      const Floats after = before + error;
      store_floats<float>(errors, at, choose(finite_mask(after), after, before));
    } else {
      put_elements<float>(errors, at, error, streams);
    }
  }

  COMMKERN_MEMBER void put_error(int64_t i, C error) const {
    if constexpr (kErrors == Errors::kNone) return;
    const bool adds = kErrors == Errors::kAdd;
    const float before = load<float>(adds ? errors_ : before_, i);
    const float after =
        adds ? before + static_cast<float>(error) : static_cast<float>(error);
    store(errors_, i, is_finite(after) ? after : before);
  }

  COMMKERN_MEMBER void encode_scalars(int64_t begin, int64_t n, uint8_t* out) {
    uint8_t group[kPackGroup];
    for (int64_t i = begin; i < n; ++i) {
      const uint32_t byte = kStochastic ? bytes_[i] : 0;
      const C a = at(i);
      const int32_t code = code_of(a, byte);
      put_error(i, a - value(code));
      const int64_t j = i % kPackGroup;
      group[j] = static_cast<uint8_t>(code);
      if (j == kPackGroup - 1 || i == n - 1) {
        const int count = static_cast<int>(j) + 1;
        store_word(pack_word(group, count, Code::kBits),
                   out + i / kPackGroup * Code::kBits,
                   packed_nbytes(count, Code::kBits));
      }
    }
  }

  const EncodeRun<C>& run_;
  BlockScale<C> scale_;
  const uint8_t* values_ = nullptr;
  uint8_t* errors_ = nullptr;
  const uint8_t* before_ = nullptr;
  const uint8_t* bytes_ = nullptr;
  [[no_unique_address]] BufferOf<Code, FiveBuffers> five_;
};

template <class C, class Code, bool kStochastic, Errors kErrors>
void encode_run(const EncodeRun<C>& run) {
  EncodeLoop<C, Code, kStochastic, kErrors>(run).run();
}

// ---- decoding ----

template <class C, class Code, bool kAdd>
class DecodeLoop {
 public:
  explicit COMMKERN_MEMBER DecodeLoop(const DecodeRun<C>& run) : run_(run) {}

  COMMKERN_MEMBER void run() {
    for (int64_t k = 0, begin = 0; begin < run_.count; ++k, begin += run_.block_size) {
      const int64_t n = smaller(run_.block_size, run_.count - begin);
      const uint8_t* codes = run_.codes + k * run_.block_nbytes;
      uint8_t* output = run_.output + begin * sizeof(C);
      if constexpr (Code::kFivePacked) {
        unpack_five(codes, n, five_.codes);
        codes = five_.codes;
      }
      decode_block(k, codes, n, output);
    }
  }

 private:
  COMMKERN_MEMBER void decode_block(int64_t k, const uint8_t* codes, int64_t n,
                                    uint8_t* output) {
    const C scale = run_.scales.scale[k], factor = run_.factor;
    const C offset = Code::kOffset ? run_.scales.offset[k] : C(0);
    const bool halved = Code::kOffset && run_.scales.halved[k];
    int64_t begin = 0;
    if constexpr (kHasVectors<C>) {
      begin = halved ? 0 : n / kWhole * kWhole;
      decode_lanes(scale, offset, factor, codes, begin, output, run_.streams);
    }
    for (int64_t i = begin; i < n; ++i) {
      C y = Code::template decode<C>(code_at(codes, i)) * scale;
      if constexpr (Code::kOffset) {
        y += offset;
        if (halved) y *= C(2);
      }
      y *= factor;
      if constexpr (kAdd) y = load<C>(output, i) + y;
      store(output, i, y);
    }
  }

  static COMMKERN_MEMBER int32_t code_at(const uint8_t* codes, int64_t i) {
    const int64_t bit = i * Code::kBits;
    uint32_t code = codes[bit / 8] >> (bit % 8);
    if (bit % 8 + Code::kBits > 8)
      code |= uint32_t{codes[bit / 8 + 1]} << (8 - bit % 8);
    if constexpr (Code::kSigned) return signed_code(code, Code::kBits);
    return static_cast<int32_t>(code & ((1u << Code::kBits) - 1));
  }

  static COMMKERN_MEMBER void decode_lanes(float s, float o, float factor,
                                           const uint8_t* codes, int64_t end,
                                           uint8_t* output, bool streams) {
    const Floats scale = broadcast(s), offset = broadcast(o);
    for (int64_t i = 0; i < end; i += kWhole) {
      Ints group[kParts];
      load_group<Code::kBits, Code::kSigned>(codes + i * Code::kBits / 8, group);
      for (int v = 0; v < kParts; ++v) {
        const int64_t at = i + v * kLanes;
        Floats y = Code::decode_lanes(group[v]) * scale;
        if constexpr (Code::kOffset) y = y + offset;
        y = y * factor;
        if constexpr (kAdd) y = load_floats<float>(output, at) + y;
        put_elements<float>(output, at, y, streams);
      }
    }
  }

  const DecodeRun<C>& run_;
  [[no_unique_address]] BufferOf<Code, FiveBuffer> five_;
};

template <class C, class Code, bool kAdd>
void decode_run(const DecodeRun<C>& run) {
  DecodeLoop<C, Code, kAdd>(run).run();
}

template <class C, class Code, bool kStochastic>
constexpr Coder<C> make_coder() {
  Coder<C> coder{{encode_run<C, Code, kStochastic, Errors::kNone>, nullptr, nullptr},
                 {decode_run<C, Code, false>, decode_run<C, Code, true>}};
  if constexpr (is_same<C, float>) {
    coder.encode[1] = encode_run<C, Code, kStochastic, Errors::kWrite>;
    coder.encode[2] = encode_run<C, Code, kStochastic, Errors::kAdd>;
  }
  return coder;
}
template <class C, class Code, bool kStochastic>
constexpr Coder<C> kCoder = make_coder<C, Code, kStochastic>();

// Of a code that comes in widths, rounded either way.
template <class C, template <int> class Code, int kLeast, int kMost>
COMMKERN_INLINE Coder<C> coder_of_width(int32_t bits, Rounding rounding) {
  const bool stochastic = rounding == Rounding::kStochastic;
  Coder<C> coder;
  with_bits<kLeast, kMost>(bits, [&](auto width) {
    using Width = Code<width.value>;
    coder = stochastic ? kCoder<C, Width, true> : kCoder<C, Width, false>;
  });
  return coder;
}

COMMKERN_END_ISA
