// Python's form of a plan (commkern.plan.lower) turned into a PlanSpec.
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/plan.h"

namespace commkern {

// Throws std::invalid_argument naming the step for a tuple of another form.
PlanSpec to_plan_spec(const pybind11::list& buffers, const pybind11::list& registers,
                      int32_t rank, int32_t world_size, const pybind11::bytes& preamble,
                      const pybind11::list& rounds, const pybind11::list& steps);

}  // namespace commkern
