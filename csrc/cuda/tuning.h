// Launch numbers as data. Tests read these lines, so each stays a line of plain
// numbers.
#pragma once

#include <cstdint>

namespace commkern::cuda {

struct Tuning {
  int32_t threads;        // of a block
  int32_t per_thread;     // consecutive elements that a thread moves at once
  int32_t blocks_per_sm;  // of a grid, at most
};

inline constexpr Tuning kCastTuning = {256, 4, 8};
inline constexpr Tuning kUncastTuning = {256, 4, 8};
inline constexpr Tuning kRecastSumTuning = {256, 4, 8};
inline constexpr Tuning kDequantizeTuning = {256, 8, 8};

// Their pointers travel in the kernel's parameters, of which every GPU takes 4096
// bytes.
inline constexpr int32_t kMaxParts = 480;

}  // namespace commkern::cuda
