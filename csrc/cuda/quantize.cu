#include "core/check.h"
#include "cuda/dispatch.h"
#include "cuda/launch.h"
#include "cuda/quantize.cuh"
#include "cuda/table.h"

namespace commkern::cuda {
namespace {

int64_t elements_of(int64_t payload_nbytes, const Format& f) {
  if (f.code == Code::kTernary) return payload_nbytes * 5;
  return payload_nbytes * 8 / f.bits;
}

// The bits of formats that have a kernel of their own, else 0.
int32_t plain_bits(const Format& f) {
  if (f.code != Code::kSymmetric || f.scales != Scales::kCompute) return 0;
  return f.bits == 8 || f.bits == 4 ? f.bits : 0;
}

void dequantize_any(const char* name, const DequantizeArgs& args, bool add,
                    void* stream) {
  if (args.format.rotation != 0) {
    fail(name, ": expected rotation 0 on CUDA, got ", args.format.rotation);
  }
  const int64_t tiles = most_tiles(kDequantizeTuning, args.spans,
                                   elements_of(args.payload.nbytes, args.format));
  const Launch how = {name, kDequantizeTuning, tiles, stream};
  with_dtype(args.dtype, [&]<class T>(Tag<T>) {
    switch (plain_bits(args.format)) {
      case 8: return launch(how, dequantize_kernel<T, 8>, args, add);
      case 4: return launch(how, dequantize_kernel<T, 4>, args, add);
      default: return launch(how, dequantize_kernel<T, 0>, args, add);
    }
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
