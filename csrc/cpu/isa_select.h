// The choice among the kernel tables that this module was built with.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"

namespace commkern::cpu {

// Names of the ISAs that were built and that this CPU supports, best last.
std::vector<std::string> available_isas();

// The table in use. The first call takes COMMKERN_ISA (baseline, avx2 or avx512) or
// else the best supported; std::invalid_argument, with the list, for other names.
const KernelTable& active_table();
std::string active_isa();

// Changes the table for all later calls.
void set_isa(std::string_view name);

}  // namespace commkern::cpu
