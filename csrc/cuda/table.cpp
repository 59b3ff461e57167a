#include "cuda/table.h"

namespace commkern::cuda {

const KernelTable kTable = {.version = kKernelTableVersion,
                            .filler = "cuda",
                            .dequantize = dequantize,
                            .dequantize_add = dequantize_add,
                            .cast = cast,
                            .uncast = uncast,
                            .uncast_add = uncast_add,
                            .recast_sum = recast_sum};

}  // namespace commkern::cuda
