#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> natural_coder(const Format& format, Rounding) {
  Coder<C> coder;
  with_bits<2, 8>(format.bits,
                  [&](auto bits) { coder = kCoder<C, Natural<bits.value>, true>; });
  return coder;
}

template Coder<float> natural_coder<float>(const Format&, Rounding);
template Coder<double> natural_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
