#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> minifloat_coder(const Format& format, Rounding) {
  switch (format.code) {
    case Code::kFloat8E4M3: return kCoder<C, Minifloat<Float8E4M3>, false>;
    case Code::kFloat8E5M2: return kCoder<C, Minifloat<Float8E5M2>, false>;
    case Code::kFloat6E3M2: return kCoder<C, Minifloat<Float6E3M2>, false>;
    case Code::kFloat6E2M3: return kCoder<C, Minifloat<Float6E2M3>, false>;
    default: return kCoder<C, Minifloat<Float4E2M1>, false>;
  }
}

template Coder<float> minifloat_coder<float>(const Format&, Rounding);
template Coder<double> minifloat_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
