#include "cpu/coder_loops.h"

COMMKERN_BEGIN_ISA

template <class C>
Coder<C> few_values_coder(const Format& format, Rounding rounding) {
  const bool stochastic = rounding == Rounding::kStochastic;
  switch (format.code) {
    case Code::kTernary: return kCoder<C, Ternary, true>;
    case Code::kThreshold: return kCoder<C, Threshold, false>;
    default: return stochastic ? kCoder<C, Sign, true> : kCoder<C, Sign, false>;
  }
}

template Coder<float> few_values_coder<float>(const Format&, Rounding);
template Coder<double> few_values_coder<double>(const Format&, Rounding);

COMMKERN_END_ISA
