// What nvcc knows and g++ doesn't: enough to run the device code of csrc/cuda on the
// CPU, one thread after another. Included before any .cuh file.
#pragma once

#define COMMKERN_DEVICE_CODE true
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulator {

struct Index {
  unsigned x = 0;
};

inline Index thread_index, block_index, block_size, grid_size;

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
