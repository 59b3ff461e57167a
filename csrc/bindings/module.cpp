#include <pybind11/pybind11.h>

#include "bindings/register.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Compiled kernels of commkern. Use commkern.kernels, not this module.";
  m.attr("__version__") = COMMKERN_VERSION;
  commkern::bindings::register_cuda(m);
  commkern::bindings::register_kernels(m);
  commkern::bindings::register_runtime(m);
}
