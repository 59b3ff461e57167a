#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> symmetric_coder(const Format& format, Rounding rounding) {
  Coder<C> coder;
  with_bits<2, 8>(format.bits, [&](auto bits) {
    using Code = Symmetric<bits.value>;
    coder = rounding == Rounding::kStochastic ? kCoder<C, Code, true>
                                              : kCoder<C, Code, false>;
  });
  return coder;
}

template Coder<float> symmetric_coder<float>(const Format&, Rounding);
template Coder<double> symmetric_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
