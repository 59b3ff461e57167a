#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> symmetric_coder(const Format& format, Rounding rounding) {
  return coder_of_width<C, Symmetric, 2, 8>(format.bits, rounding);
}

template Coder<float> symmetric_coder<float>(const Format&, Rounding);
template Coder<double> symmetric_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
