// Python values as fields of kernel arguments: one `cast_value` for each field type.
// Mistakes raise TypeError or ValueError that name the field and what it got.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/types.h"

namespace commkern::bindings {

namespace py = pybind11;

// A buffer held through the buffer protocol.
class View {
 public:
  View() = default;
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  Py_buffer* get() { return &view_; }
  const Py_buffer* operator->() const { return &view_; }

 private:
  Py_buffer view_{};  // with no object in it, releasing does nothing
};

// Keeps alive and unmoved what the cast fields point to. Spans are copied, so that no
// Python thread can change them between the check and the kernel.
struct Holder {
  std::deque<View> buffers;
  std::deque<std::vector<Span>> spans;
  std::deque<std::vector<ConstBytes>> parts;
};

// Buffers: an object with the buffer protocol, a (pointer, nbytes) tuple, or None.
// Mutable ones refuse read-only memory.
void cast_value(const char* field, py::handle value, ConstBytes& out, Holder& holder);
void cast_value(const char* field, py::handle value, MutableBytes& out, Holder& holder);
// A one-dimensional structured array of dtype commkern.spans.SPAN.
void cast_value(const char* field, py::handle value, SpanTable& out, Holder& holder);
// A sequence of buffers, one a rank.
void cast_value(const char* field, py::handle value, Parts& out, Holder& holder);
// None, (version0, version1) or (version0, version1, committed).
void cast_value(const char* field, py::handle value, Residual& out, Holder& holder);
// The name of one of an enum's values.
int32_t cast_name(const char* field, py::handle value,
                  std::span<const char* const> names);
template <class Enum>
  requires std::is_enum_v<Enum>
void cast_value(const char* field, py::handle value, Enum& out, Holder&) {
  out = static_cast<Enum>(cast_name(field, value, NamesOf<Enum>::kNames));
}
void cast_value(const char* field, py::handle value, int32_t& out, Holder& holder);
void cast_value(const char* field, py::handle value, uint32_t& out, Holder& holder);
void cast_value(const char* field, py::handle value, uint64_t& out, Holder& holder);
void cast_value(const char* field, py::handle value, double& out, Holder& holder);

// The first column of `_core.kernel_signatures()`: what a field takes.
inline const char* kind_of(const ConstBytes&) { return "bytes"; }
inline const char* kind_of(const MutableBytes&) { return "mutable_bytes"; }
inline const char* kind_of(const SpanTable&) { return "spans"; }
inline const char* kind_of(const Parts&) { return "parts"; }
inline const char* kind_of(const Residual&) { return "residual"; }
inline const char* kind_of(const DType&) { return "dtype"; }
template <class Enum>
  requires std::is_enum_v<Enum>
const char* kind_of(const Enum&) {
  return "name";
}
inline const char* kind_of(const int32_t&) { return "int32"; }
inline const char* kind_of(const uint32_t&) { return "uint32"; }
inline const char* kind_of(const uint64_t&) { return "uint64"; }
inline const char* kind_of(const double&) { return "float64"; }

// The second column: the struct's default, or `...` for a field that must be given.
template <class T>
  requires(!std::is_enum_v<T>)
py::object default_of(const char*, const T&) {
  return py::ellipsis();
}
inline py::object default_of(const char* field, const MutableBytes&) {
  if (std::string(field) == "nonfinite") return py::none();
  return py::ellipsis();
}
inline py::object default_of(const char*, const Residual&) { return py::none(); }
inline py::object default_of(const char*, DType) { return py::ellipsis(); }
template <class Enum>
  requires std::is_enum_v<Enum>
py::object default_of(const char*, Enum value) {
  return py::str(NamesOf<Enum>::kNames[static_cast<int32_t>(value)]);
}
inline py::object default_of(const char*, int32_t value) { return py::int_(value); }
inline py::object default_of(const char*, uint32_t value) { return py::int_(value); }
inline py::object default_of(const char*, uint64_t value) { return py::int_(value); }
inline py::object default_of(const char*, double value) { return py::float_(value); }

// {field: (kind, default)} in the order of the struct.
template <class Args>
py::dict signature_of() {
  py::dict fields;
  Args args;
  visit_fields(args, [&](const char* field, auto& value) {
    fields[field] = py::make_tuple(kind_of(value), default_of(field, value));
  });
  return fields;
}

[[noreturn]] void raise_unknown_field(const std::string& kernel, const py::dict& given,
                                      const py::dict& signature);
[[noreturn]] void raise_missing_field(const std::string& kernel, const char* field,
                                      const py::dict& signature);

// Fills a whole Args struct from keyword arguments; missing fields keep the struct's
// defaults. `cast_field(field, value, out)` turns one value into one field.
template <class Args, class CastField>
Args cast_fields(const std::string& kernel, const py::dict& given,
                 CastField cast_field) {
  Args args;
  size_t used = 0;
  visit_fields(args, [&](const char* field, auto& out) {
    if (PyObject* value = PyDict_GetItemString(given.ptr(), field)) {
      cast_field(field, py::handle(value), out);
      ++used;
    } else if (default_of(field, out).is(py::ellipsis())) {
      raise_missing_field(kernel, field, signature_of<Args>());
    }
  });
  if (used != given.size()) raise_unknown_field(kernel, given, signature_of<Args>());
  return args;
}

template <class Args>
Args cast_args(const std::string& kernel, const py::dict& given, Holder& holder) {
  return cast_fields<Args>(kernel, given,
                           [&](const char* field, py::handle value, auto& out) {
                             cast_value(field, value, out, holder);
                           });
}

}  // namespace commkern::bindings
