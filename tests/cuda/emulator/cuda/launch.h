// Stands in for csrc/cuda/launch.h: the whole grid runs before launch() returns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/tuning.h"
#include "device_code.h"

namespace emulator {

inline int64_t multiprocessors = 2;
inline bool backwards = false;  // the order of threads must not matter
inline int64_t launches = 0;
inline int64_t blocks = 0;  // of the last launch

template <class Visit>
void in_order(unsigned count, Visit visit) {
  for (unsigned i = 0; i < count; ++i) visit(backwards ? count - 1 - i : i);
}

}  // namespace emulator

namespace commkern::cuda {

struct Launch {
  const char* kernel;
  const Tuning& tuning;
  int64_t tiles;
  void* stream;
};

template <class... Parameters, class... Arguments>
void launch(const Launch& launch, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  if (launch.tiles == 0) return;
  emulator::blocks = std::min(
      launch.tiles, emulator::multiprocessors * int64_t{launch.tuning.blocks_per_sm});
  emulator::launches += 1;
  gridDim.x = static_cast<unsigned>(emulator::blocks);
  blockDim.x = static_cast<unsigned>(launch.tuning.threads);
  emulator::in_order(gridDim.x, [&](unsigned block) {
    blockIdx.x = block;
    emulator::in_order(blockDim.x, [&](unsigned thread) {
      threadIdx.x = thread;
      kernel(arguments...);
    });
  });
}

}  // namespace commkern::cuda
