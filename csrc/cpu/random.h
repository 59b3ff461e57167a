// The random bytes of one span, sixteen a draw, made for many draws at once.
#pragma once

#include "core/philox.h"
#include "cpu/elements.h"

COMMKERN_BEGIN_ISA

class Draws {
 public:
  static constexpr int kBatch = 16;

  explicit Draws(const PhiloxStream& stream) : stream_(stream) {}

  // The sixteen bytes of a draw. Cheap where draws come in order.
  COMMKERN_MEMBER const uint8_t* bytes_of(uint64_t draw) {
    if (draw - first_ >= filled_) {
      fill(draw);
      first_ = draw;
      filled_ = kBatch;
    }
    return bytes_ + 16 * (draw - first_);
  }

 private:
  void fill(uint64_t draw) {
    for (int k = 0; k < kBatch; ++k) {
      const PhiloxWords words = philox_draw(stream_, draw + k);
      for (int j = 0; j < 16; ++j) {
        bytes_[16 * k + j] = static_cast<uint8_t>(philox_byte(words, j));
      }
    }
  }

  PhiloxStream stream_;
  uint64_t first_ = 0;
  uint64_t filled_ = 0;  // draws from first_ on
  alignas(64) uint8_t bytes_[16 * kBatch];
};

COMMKERN_END_ISA
