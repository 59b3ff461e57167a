#include "cpu/tables.h"

#define COMMKERN_STRING(x) #x
#define COMMKERN_NAME(x) COMMKERN_STRING(x)

COMMKERN_BEGIN_ISA

const KernelTable kTable = {.version = kKernelTableVersion,
                            .filler = "cpu:" COMMKERN_NAME(COMMKERN_ISA),
#define COMMKERN_FILL(kernel, Args) .kernel = kernel,
                            COMMKERN_KERNELS(COMMKERN_FILL)
#undef COMMKERN_FILL
};

COMMKERN_END_ISA
