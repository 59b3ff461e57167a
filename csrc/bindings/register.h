// One function an area; module.cpp calls each once.
#pragma once

#include <pybind11/pybind11.h>

namespace commkern::bindings {

void register_cuda(pybind11::module_& m);
void register_kernels(pybind11::module_& m);
void register_runtime(pybind11::module_& m);

}  // namespace commkern::bindings
