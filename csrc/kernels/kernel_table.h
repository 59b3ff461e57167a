// THE list of kernels. cpu (once per ISA) and cuda each fill one KernelTable;
// commkern.reference holds a twin of every name.
#pragma once

#include "kernels/cast.h"
#include "kernels/feedback.h"
#include "kernels/fixed_point.h"
#include "kernels/hadamard.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"

#define COMMKERN_KERNELS(X)                    \
  X(quantize, QuantizeArgs)                    \
  X(dequantize, DequantizeArgs)                \
  X(dequantize_add, DequantizeArgs)            \
  X(requantize_sum, RequantizeSumArgs)         \
  X(cast, CastArgs)                            \
  X(uncast, UncastArgs)                        \
  X(uncast_add, UncastArgs)                    \
  X(recast_sum, RecastSumArgs)                 \
  X(residual_subtract, ResidualSubtractArgs)   \
  X(residual_scale, ResidualScaleArgs)         \
  X(accumulate, AccumulateArgs)                \
  X(block_exponents, BlockExponentsArgs)       \
  X(max_exponents, MaxExponentsArgs)           \
  X(fixed_quantize, FixedQuantizeArgs)         \
  X(fixed_sum, FixedSumArgs)                   \
  X(fixed_dequantize, FixedDequantizeArgs)     \
  X(fixed_dequantize_add, FixedDequantizeArgs) \
  X(sum, SumArgs)                              \
  X(absmax, AbsmaxArgs)                        \
  X(nonfinite_check, FlagArgs)                 \
  X(nonzero_check, FlagArgs)                   \
  X(saturate, SaturateArgs)                    \
  X(hadamard, HadamardArgs)

namespace commkern {

// Raise this whenever the list, an argument struct or Span changes.
inline constexpr uint32_t kKernelTableVersion = 4;

// How a module hands over its table: a capsule of this name. `version` comes first in
// every version, so that it can be read before anything else is believed.
inline constexpr const char* kTableCapsule = "commkern.KernelTable";

// `stream` is a cudaStream_t for CUDA tables and ignored by CPU ones. A null entry is a
// kernel that the filler does not have. In the arguments of a CUDA table `spans.rows`
// and all buffers are device memory, each part's too; `parts.rows` itself is not.
struct KernelTable {
  uint32_t version = kKernelTableVersion;
  const char* filler = "";
#define COMMKERN_ENTRY(name, Args) \
  void (*name)(const Args& args, void* stream) = nullptr;
  COMMKERN_KERNELS(COMMKERN_ENTRY)
#undef COMMKERN_ENTRY
};

}  // namespace commkern
