// Every file of this folder but isa_select is compiled once per ISA, in a namespace of
// that name. Nothing here may have linkage outside it: the linker would be free to pick
// the AVX-512 copy of a shared inline function for everybody.
#pragma once

#include "core/numerics.h"
#include "core/types.h"

#ifndef COMMKERN_ISA
#define COMMKERN_ISA baseline
#endif

#define COMMKERN_BEGIN_ISA namespace commkern::cpu::COMMKERN_ISA {
#define COMMKERN_END_ISA }
#define COMMKERN_MEMBER inline __attribute__((always_inline))
#define COMMKERN_INLINE static COMMKERN_MEMBER
