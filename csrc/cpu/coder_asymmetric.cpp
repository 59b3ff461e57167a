#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> asymmetric_coder(const Format& format, Rounding rounding) {
  return coder_of_width<C, Asymmetric, 1, 8>(format.bits, rounding);
}

template Coder<float> asymmetric_coder<float>(const Format&, Rounding);
template Coder<double> asymmetric_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
