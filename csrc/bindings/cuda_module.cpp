// The module _cuda: hands its kernels to _core, and says what it was built for.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/device.h"
#include "cuda/table.h"

namespace py = pybind11;
namespace cuda = commkern::cuda;

namespace {

py::capsule table() { return py::capsule(&cuda::kTable, commkern::kTableCapsule); }

py::tuple device_count() {
  const cuda::Devices found = cuda::devices();
  return py::make_tuple(found.archs.size(), found.reason);
}

}  // namespace

// Nothing here may ask the driver: importing must work where there is none, and a
// process that forks must not have started it.
PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of commkern. Use commkern.backend.cuda(), not this module.";
  m.def("table", &table);
  m.def("archs", &cuda::built_archs);
  m.def("runtime_version", &cuda::runtime_version);
  m.def("device_count", &device_count);
  m.def("device_archs", [] { return cuda::devices().archs; });
}
