// The randomised Hadamard transform: spreads a large value over its piece, and has an
// inverse. On its own, and before the code of a quantiser.
//
// A span is cut into pieces of `rotation` values from its start, what is left at its
// end into powers of two, the largest first (100 = 64 + 32 + 4). A piece x of n values,
// in the compute type, every operation rounded once:
//   forward  x[i] = -x[i] where sign bit i is set; the butterflies; x[i] *= C(2^(-k/2))
//   inverse  the butterflies; x[i] *= C(2^(-k/2)); x[i] = -x[i] where sign bit i is set
//   n = 2^k; butterflies: for h = 1, 2, 4 ... n/2, for every j without bit h,
//   x[j], x[j+h] = x[j] + x[j+h], x[j] - x[j+h]
//
// Sign bits: Philox-4x32-10, key = seed, counter = (g / 128 modulo 2^32,
// span.parameter_id, 0, kRotationStream), bit g % 128 of the four little-endian words,
// where g is the element's index in its parameter. So all ranks and steps share them.
//
// span.begin is a multiple of `rotation`. A span ends at a piece's end or at its
// parameter's end. Source: Ailon and Chazelle, STOC'06; before a quantiser: Suresh et
// al., "Distributed mean estimation with limited communication", ICML'17.
#pragma once

#include "core/types.h"

namespace commkern {

// Purpose 2, level 0, shared by all.
inline constexpr uint32_t kRotationStream = 2u << 24 | 0xfffeu;

// output = T(transform of input). May be in place.
struct HadamardArgs {
  SpanTable spans;
  ConstBytes input;
  MutableBytes output;
  DType dtype = DType::kFloat32;  // of both
  int32_t rotation = 128;
  int32_t inverse = 0;  // or 1
  uint64_t seed = 0;
};

template <class Visitor>
void visit_fields(HadamardArgs& a, Visitor&& field) {
  field("spans", a.spans);
  field("input", a.input);
  field("output", a.output);
  field("dtype", a.dtype);
  field("rotation", a.rotation);
  field("inverse", a.inverse);
  field("seed", a.seed);
}

void check(const HadamardArgs& args);

}  // namespace commkern
