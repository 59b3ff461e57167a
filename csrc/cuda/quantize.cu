#include "cuda/dispatch.h"
#include "cuda/launch.h"
#include "cuda/quantize.cuh"
#include "cuda/table.h"

namespace commkern::cuda {
namespace {

void dequantize_any(const char* name, const DequantizeArgs& args, bool add,
                    void* stream) {
  const int64_t tiles =
      most_tiles(kDequantizeTuning, args.spans, args.payload.nbytes * (8 / args.bits));
  const Launch how = {name, kDequantizeTuning, tiles, stream};
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    if (args.bits == 8) return launch(how, dequantize_kernel<T, 8>, args, add);
    launch(how, dequantize_kernel<T, 4>, args, add);
  });
}

}  // namespace

void dequantize(const DequantizeArgs& args, void* stream) {
  dequantize_any("dequantize", args, false, stream);
}

void dequantize_add(const DequantizeArgs& args, void* stream) {
  dequantize_any("dequantize_add", args, true, stream);
}

}  // namespace commkern::cuda
