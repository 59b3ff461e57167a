// The one way to launch a kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <tuple>

#include "cuda/device.h"
#include "cuda/tuning.h"

namespace commkern::cuda {

struct Launch {
  const char* kernel;  // as errors name it
  const Tuning& tuning;
  int64_t tiles;  // more than one block may take; none: nothing is launched
  void* stream;   // cudaStream_t, on the current device
};

// Throws CudaError where the launch is refused. What goes wrong later shows in a later
// call, as always with CUDA (CUDA_LAUNCH_BLOCKING=1 makes it this one).
template <class... Parameters, class... Arguments>
void launch(const Launch& launch, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  if (launch.tiles == 0) return;  // a grid of no blocks is an error to CUDA
  const Tuning& tuning = launch.tuning;
  const int64_t blocks = std::min(
      launch.tiles, multiprocessors(launch.kernel) * int64_t{tuning.blocks_per_sm});
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(tuning.threads));
  config.stream = static_cast<cudaStream_t>(launch.stream);
  std::tuple<Parameters...> values(arguments...);
  const auto run = [&](auto&... value) {
    void* pointers[] = {&value...};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel),
                               pointers);
  };
  check_cuda(std::apply(run, values), launch.kernel);
}

}  // namespace commkern::cuda
