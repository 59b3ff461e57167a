// The CUDA filler's own sources, compiled for the CPU into a library of plain symbols.
#include "device_code.h"
//
#include "cuda/cast.cu"
#include "cuda/quantize.cu"
#include "cuda/table.cpp"

extern "C" {

const commkern::KernelTable* emulated_table() { return &commkern::cuda::kTable; }

void emulated_settings(int64_t multiprocessors, bool backwards) {
  emulator::multiprocessors = multiprocessors;
  emulator::backwards = backwards;
}

int64_t emulated_launches() { return emulator::launches; }
int64_t emulated_blocks() { return emulator::blocks; }

uint32_t emulated_narrow(uint64_t bits) {
  return commkern::bits_as<uint32_t>(
      commkern::convert<float>(commkern::bits_as<double>(bits)));
}

uint64_t emulated_widen(uint32_t bits) {
  return commkern::bits_as<uint64_t>(
      commkern::convert<double>(commkern::bits_as<float>(bits)));
}
}
