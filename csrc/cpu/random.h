// The random bytes of one span, sixteen a draw, made for kLanes draws at once.
#pragma once

#include "core/philox.h"
#include "cpu/simd.h"

COMMKERN_BEGIN_ISA

class Draws {
 public:
  static constexpr int kDrawNbytes = 16;

  explicit Draws(const PhiloxStream& s)
      : parameter_id_(s.parameter_id), step_(s.step), stream_(s.stream) {
    uint32_t key0 = static_cast<uint32_t>(s.seed);
    uint32_t key1 = static_cast<uint32_t>(s.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      key0_[round] = key0;
      key1_[round] = key1;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
  }

  // The sixteen bytes of a draw. Cheap where draws come in order.
  COMMKERN_MEMBER const uint8_t* bytes_of(uint64_t draw) {
    if (draw - first_ >= filled_) fill(draw);
    return bytes_ + kDrawNbytes * (draw - first_);
  }

  // The bytes of `count` draws from one on, and of at most kLanes - 1 more.
  COMMKERN_MEMBER void write(uint64_t draw, int64_t count, uint8_t* out) const {
    for (int64_t i = 0; i < count; i += kLanes)
      generate(draw + i, out + i * kDrawNbytes);
  }

  // Draws from that one on whose bytes follow each other.
  COMMKERN_MEMBER int64_t left_from(uint64_t draw) const {
    return static_cast<int64_t>(filled_ - (draw - first_));
  }

 private:
  static constexpr int kHalf = kLanes / 2;  // draws in one vector of 64-bit lanes

  // Four counter words of kHalf draws, each in the low half of its lane. The high
  // halves hold rubbish that no product sees.
  struct State {
    Wide word[4];
  };

  COMMKERN_MEMBER State start(uint64_t draw) const {
    Wide index{};
    // The even lanes count first, as finish() stores them first.
    for (int lane = 0; lane < kHalf; ++lane) {
      index[lane] = static_cast<uint64_t>(lane % 2 * (kHalf / 2) + lane / 2);
    }
    return {{index + draw, Wide{} + parameter_id_, Wide{} + step_, Wide{} + stream_}};
  }

  COMMKERN_MEMBER void advance(State& s, int round) const {
    const Wide product0 = multiply_low(s.word[0], Wide{} + kPhiloxMultiplier0);
    const Wide product1 = multiply_low(s.word[2], Wide{} + kPhiloxMultiplier1);
    s.word[0] = (product1 >> 32) ^ s.word[1] ^ (Wide{} + key0_[round]);
    s.word[2] = (product0 >> 32) ^ s.word[3] ^ (Wide{} + key1_[round]);
    s.word[1] = product1;
    s.word[3] = product0;
  }

  static COMMKERN_MEMBER Wide joined(Wide low, Wide high) {
    return (low & 0xffffffffu) | (high << 32);
  }

  COMMKERN_MEMBER void finish(const State& s, uint8_t* out) const {
    const Wide front = joined(s.word[0], s.word[1]);
    const Wide back = joined(s.word[2], s.word[3]);
    store(out, 0, interleave_even(front, back));
    store(out, 1, interleave_odd(front, back));
  }

  __attribute__((noinline)) void fill(uint64_t draw) {
    generate(draw, bytes_);
    first_ = draw;
    filled_ = kLanes;
  }

  COMMKERN_MEMBER void generate(uint64_t draw, uint8_t* out) const {
    State a = start(draw);
    State b = start(draw + kHalf);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      advance(a, round);
      advance(b, round);
    }
    finish(a, out);
    finish(b, out + kHalf * kDrawNbytes);
  }

  uint64_t parameter_id_, step_, stream_;
  uint64_t key0_[kPhiloxRounds], key1_[kPhiloxRounds];
  uint64_t first_ = 0;
  uint64_t filled_ = 0;  // draws from first_ on
  alignas(64) uint8_t bytes_[kDrawNbytes * kLanes];
};

COMMKERN_END_ISA
