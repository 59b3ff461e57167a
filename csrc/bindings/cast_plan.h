// Python's form of a plan (commkern.plan.lower) turned into a PlanSpec.
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/plan.h"

namespace commkern::bindings {

namespace py = pybind11;

// Throws std::invalid_argument naming the step for a tuple of another form.
PlanSpec to_plan_spec(const py::list& buffers, const py::list& registers, int32_t rank,
                      int32_t world_size, const py::bytes& preamble,
                      const py::list& rounds, const py::list& steps);

}  // namespace commkern::bindings
