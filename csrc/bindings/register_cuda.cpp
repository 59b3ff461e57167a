#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/cast_args.h"
#include "bindings/register.h"
#include "core/check.h"
#include "cpu/isa_select.h"
#include "kernels/kernel_table.h"

namespace commkern::bindings {
namespace {

// By filler; what a module registered. The GIL guards it.
std::map<std::string, const KernelTable*>& registered() {
  static std::map<std::string, const KernelTable*> tables;
  return tables;
}

std::vector<std::string> entries_of(const KernelTable& table) {
  std::vector<std::string> names;
#define COMMKERN_ENTRY(name, Args) \
  if (table.name != nullptr) names.emplace_back(#name);
  COMMKERN_KERNELS(COMMKERN_ENTRY)
#undef COMMKERN_ENTRY
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  return py::str(", ").attr("join")(names).cast<std::string>();
}

void register_table(const py::object& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), kTableCapsule) == 0) {
    throw py::type_error(std::string("table: expected a capsule named ") +
                         kTableCapsule + ", got " +
                         std::string(py::str(py::repr(capsule))));
  }
  const auto* table = static_cast<const KernelTable*>(
      PyCapsule_GetPointer(capsule.ptr(), kTableCapsule));
  if (table->version != kKernelTableVersion) {  // the rest may lie anywhere then
    throw py::import_error("kernel table: expected version " +
                           std::to_string(kKernelTableVersion) + ", got " +
                           std::to_string(table->version));
  }
  capsule.inc_ref();  // it may own the table, which stays from now on
  registered()[table->filler] = table;
}

py::dict tables() {
  py::dict all;
  all["cpu"] = entries_of(cpu::active_table());
  for (const auto& [filler, table] : registered()) {
    all[filler.c_str()] = entries_of(*table);
  }
  return all;
}

const KernelTable& cuda_table() {
  const auto found = registered().find("cuda");
  if (found != registered().end()) return *found->second;
  throw std::runtime_error("cuda kernels: none are registered");
}

template <class Args>
void run_on_device(const std::string& name, const KernelTable& table,
                   void (*kernel)(const Args&, void*), const py::dict& given,
                   uintptr_t device_spans, uintptr_t stream) {
  if (kernel == nullptr) {
    throw std::runtime_error(std::string(table.filler) + " kernels: expected one of " +
                             joined(entries_of(table)) + ", got '" + name + "'");
  }
  Holder holder;
  Args args = cast_args<Args>(name, given, holder);
  check(args);
  if (args.spans.count > 0 && device_spans == 0) {
    fail("device_spans: expected the table of ", args.spans.count,
         " rows on the device, got none");
  }
  args.spans.rows = reinterpret_cast<const Span*>(device_spans);
  const py::gil_scoped_release released;
  kernel(args, reinterpret_cast<void*>(stream));
}

void call_cuda(const std::string& name, const py::dict& given, uintptr_t device_spans,
               uintptr_t stream) {
  const KernelTable& table = cuda_table();
#define COMMKERN_CALL(entry, Args)                                                     \
  if (name == #entry) {                                                                \
    return run_on_device<Args>(name, table, table.entry, given, device_spans, stream); \
  }
  COMMKERN_KERNELS(COMMKERN_CALL)
#undef COMMKERN_CALL
  fail("kernel: expected one of ", joined(entries_of(table)), ", got '", name, "'");
}

}  // namespace

void register_cuda(py::module_& m) {
  m.def("register_table", &register_table, py::arg("table"));
  m.def("tables", &tables);
  m.def("call_cuda", &call_cuda, py::arg("name"), py::arg("args"),
        py::arg("device_spans"), py::arg("stream") = 0);
}

}  // namespace commkern::bindings
