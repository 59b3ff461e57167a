// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
// for host and device, and the layout of the counter that every random kernel uses.
#pragma once

#include "core/numerics.h"

namespace commkern {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xcd9e8d57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xbb67ae85u;
inline constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

// What stays the same over the draws of one span.
struct PhiloxStream {
  uint64_t seed;
  uint32_t parameter_id;
  uint32_t step;
  uint32_t stream;
};

COMMKERN_HD PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t* c = counter.word;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * c[2];
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
    c[1] = static_cast<uint32_t>(product1);
    c[3] = static_cast<uint32_t>(product0);
    c[0] = next0;
    c[2] = next2;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// Draws are counted from the start of the parameter, modulo 2^32.
COMMKERN_HD PhiloxWords philox_draw(const PhiloxStream& s, uint64_t draw) {
  const PhiloxWords counter = {
      {static_cast<uint32_t>(draw), s.parameter_id, s.step, s.stream}};
  return philox4x32(counter, static_cast<uint32_t>(s.seed),
                    static_cast<uint32_t>(s.seed >> 32));
}

// Byte `index` (0 ... 15) of a draw: its words are little-endian, one after another.
COMMKERN_HD uint32_t philox_byte(const PhiloxWords& draw, int index) {
  return (draw.word[index >> 2] >> (8 * (index & 3))) & 0xffu;
}

// The offset that stochastic rounding adds before the floor; exact in fp32.
template <class C>
COMMKERN_HD C rounding_offset(uint32_t byte) {
  return (static_cast<C>(byte) + C(0.5)) * C(0x1p-8);
}

}  // namespace commkern
