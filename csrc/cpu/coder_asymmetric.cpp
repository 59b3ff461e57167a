#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> asymmetric_coder(const Format& format, Rounding rounding) {
  Coder<C> coder;
  with_bits<1, 8>(format.bits, [&](auto bits) {
    using Code = Asymmetric<bits.value>;
    coder = rounding == Rounding::kStochastic ? kCoder<C, Code, true>
                                              : kCoder<C, Code, false>;
  });
  return coder;
}

template Coder<float> asymmetric_coder<float>(const Format&, Rounding);
template Coder<double> asymmetric_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
