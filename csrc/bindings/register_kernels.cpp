#include <pybind11/stl.h>

#include "bindings/cast_args.h"
#include "bindings/register.h"
#include "core/bitpack.h"
#include "core/check.h"
#include "core/crc32c.h"
#include "core/thread_pool.h"
#include "cpu/isa_select.h"
#include "kernels/kernel_table.h"

namespace commkern::bindings {
namespace {

template <class Args>
void run_kernel(const std::string& name, void (*kernel)(const Args&, void*),
                const py::dict& given) {
  Holder holder;
  const Args args = cast_args<Args>(name, given, holder);
  check(args);
  if (kernel == nullptr) fail("kernel ", name, ": not in table ", cpu::active_isa());
  const py::gil_scoped_release released;
  kernel(args, nullptr);
}

py::dict kernel_signatures() {
  py::dict all;
#define COMMKERN_SIGNATURE(name, Args) all[#name] = signature_of<Args>();
  COMMKERN_KERNELS(COMMKERN_SIGNATURE)
#undef COMMKERN_SIGNATURE
  return all;
}

void call(const std::string& name, const py::dict& given) {
  const KernelTable& table = cpu::active_table();
#define COMMKERN_CALL(entry, Args) \
  if (name == #entry) return run_kernel<Args>(name, table.entry, given);
  COMMKERN_KERNELS(COMMKERN_CALL)
#undef COMMKERN_CALL
  fail("kernel: expected one of ",
       py::str(", ").attr("join")(kernel_signatures()).cast<std::string>(), ", got '",
       name, "'");
}

uint32_t crc32c_of(py::object data, uint32_t value, bool portable) {
  Holder holder;
  ConstBytes bytes;
  cast_value("data", data, bytes, holder);
  if (!bytes && bytes.nbytes > 0) {
    fail("data: expected memory for ", bytes.nbytes, " bytes, got a null pointer");
  }
  const py::gil_scoped_release released;
  return (portable ? crc32c_portable : crc32c)(
      bytes.data, static_cast<size_t>(bytes.nbytes), value);
}

void check_width(int bits) {
  if (bits < 1 || bits > 8) fail("bits: expected 1 ... 8, got ", bits);
}

py::bytes pack(py::object codes, int bits) {
  check_width(bits);
  Holder holder;
  ConstBytes in;
  cast_value("codes", codes, in, holder);
  std::string out(static_cast<size_t>(packed_nbytes(in.nbytes, bits)), '\0');
  pack_codes(in.data, in.nbytes, bits, reinterpret_cast<uint8_t*>(out.data()));
  return py::bytes(out);
}

py::bytes unpack(py::object data, int bits, int64_t count) {
  check_width(bits);
  Holder holder;
  ConstBytes in;
  cast_value("data", data, in, holder);
  if (count < 0 || count > kMaxNbytes || packed_nbytes(count, bits) > in.nbytes) {
    fail("count: expected at most what ", in.nbytes, " bytes hold, got ", count);
  }
  std::string out(static_cast<size_t>(count), '\0');
  unpack_codes(in.data, count, bits, reinterpret_cast<uint8_t*>(out.data()));
  return py::bytes(out);
}

void set_threads(int count) {
  if (count < 1 || count > 1024) fail("count: expected 1 ... 1024, got ", count);
  set_num_threads(count);
}

}  // namespace

void register_kernels(py::module_& m) {
  m.attr("kernel_table_version") = kKernelTableVersion;
  m.def("call", &call, py::arg("name"), py::arg("args"));
  m.def("kernel_signatures", &kernel_signatures);
  m.def("isa", &cpu::active_isa);
  m.def("available_isas", &cpu::available_isas);
  m.def("set_isa", &cpu::set_isa, py::arg("name"));
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_threads, py::arg("count"));
  m.def("crc32c", &crc32c_of, py::arg("data"), py::arg("value") = 0,
        py::arg("portable") = false);
  m.def("pack_codes", &pack, py::arg("codes"), py::arg("bits"));
  m.def("unpack_codes", &unpack, py::arg("data"), py::arg("bits"), py::arg("count"));
}

}  // namespace commkern::bindings
