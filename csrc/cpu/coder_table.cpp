#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> table_coder(const Format& format, Rounding) {
  if (format.code == Code::kDynamic8) return kCoder<C, Dynamic8, false>;
  return kCoder<C, NormalFloat4, false>;
}

template Coder<float> table_coder<float>(const Format&, Rounding);
template Coder<double> table_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
