// The launchers, as KernelTable lists them; table.cpp fills in those that exist.
#pragma once

#include "kernels/kernel_table.h"

namespace commkern::cuda {

#define COMMKERN_DECLARE(name, Args) void name(const Args& args, void* stream);
COMMKERN_KERNELS(COMMKERN_DECLARE)
#undef COMMKERN_DECLARE

extern const KernelTable kTable;

}  // namespace commkern::cuda
