#include "core/check.h"
#include "cuda/cast.cuh"
#include "cuda/dispatch.h"
#include "cuda/launch.h"
#include "cuda/table.h"

namespace commkern::cuda {
namespace {

int64_t elements_of(int64_t payload_nbytes, DType wire_dtype) {
  return payload_nbytes / dtype_nbytes(wire_dtype);
}

void uncast_any(const char* name, const UncastArgs& args, bool add, void* stream) {
  const int64_t tiles = most_tiles(kUncastTuning, args.spans,
                                   elements_of(args.payload.nbytes, args.wire_dtype));
  with_dtypes(args.dtype, args.wire_dtype, [&]<class T, class W>(Tag<T>, Tag<W>) {
    launch({name, kUncastTuning, tiles, stream}, uncast_kernel<T, W>, args, add);
  });
}

RecastSumParams with_parts(const RecastSumArgs& args) {
  if (args.parts.count > kMaxParts) {
    fail("recast_sum: expected at most ", kMaxParts, " parts on CUDA, got ",
         args.parts.count);
  }
  RecastSumParams params{args, {}};
  for (int64_t rank = 0; rank < args.parts.count; ++rank) {
    params.parts[rank] = args.parts.rows[rank].data;
  }
  return params;
}

}  // namespace

void cast(const CastArgs& args, void* stream) {
  const int64_t tiles = most_tiles(kCastTuning, args.spans,
                                   elements_of(args.payload.nbytes, args.wire_dtype));
  with_dtypes(args.dtype, args.wire_dtype, [&]<class T, class W>(Tag<T>, Tag<W>) {
    launch({"cast", kCastTuning, tiles, stream}, cast_kernel<T, W>, args);
  });
}

void uncast(const UncastArgs& args, void* stream) {
  uncast_any("uncast", args, false, stream);
}

void uncast_add(const UncastArgs& args, void* stream) {
  uncast_any("uncast_add", args, true, stream);
}

void recast_sum(const RecastSumArgs& args, void* stream) {
  const RecastSumParams params = with_parts(args);
  const int64_t tiles = most_tiles(kRecastSumTuning, args.spans,
                                   elements_of(args.payload.nbytes, args.wire_dtype));
  const auto run = [&]<class C>(Tag<C>) {
    with_dtype(args.wire_dtype, [&]<class W>(Tag<W>) {
      launch({"recast_sum", kRecastSumTuning, tiles, stream}, recast_sum_kernel<C, W>,
             params);
    });
  };
  if (args.dtype == DType::kFloat64) return run(Tag<double>{});
  run(Tag<float>{});
}

}  // namespace commkern::cuda
