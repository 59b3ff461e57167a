// The kernels of this ISA, as KernelTable lists them, and the table of every ISA.
#pragma once

#include "cpu/isa.h"
#include "kernels/kernel_table.h"

COMMKERN_BEGIN_ISA
#define COMMKERN_DECLARE(name, Args) void name(const Args& args, void* stream);
COMMKERN_KERNELS(COMMKERN_DECLARE)
#undef COMMKERN_DECLARE
COMMKERN_END_ISA

namespace commkern::cpu {
namespace baseline {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif
}  // namespace commkern::cpu
