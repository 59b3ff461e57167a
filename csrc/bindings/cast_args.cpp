#include "bindings/cast_args.h"

#include <cstring>
#include <limits>

namespace commkern::bindings {
namespace {

std::string type_name(py::handle value) { return Py_TYPE(value.ptr())->tp_name; }

[[noreturn]] void wrong_type(const char* field, const char* expected, py::handle got) {
  throw py::type_error(std::string(field) + ": expected " + expected + ", got " +
                       type_name(got));
}

[[noreturn]] void wrong_value(const char* field, const std::string& expected,
                              py::handle got) {
  throw py::value_error(std::string(field) + ": expected " + expected + ", got " +
                        std::string(py::str(py::repr(got))));
}

py::object as_index(const char* field, py::handle value) {
  if (PyIndex_Check(value.ptr()) == 0) wrong_type(field, "an integer", value);
  PyObject* number = PyNumber_Index(value.ptr());
  if (number == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(number);
}

template <class T>
void cast_integer(const char* field, py::handle value, T& out) {
  using Limits = std::numeric_limits<T>;
  const py::object number = as_index(field, value);
  int overflow = 0;
  const long long small = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow == 0 && small >= 0 && static_cast<uint64_t>(small) <= Limits::max()) {
    out = static_cast<T>(small);
    return;
  }
  if (overflow == 0 && small < 0 && small >= static_cast<long long>(Limits::min())) {
    out = static_cast<T>(small);
    return;
  }
  if (overflow > 0 && Limits::max() == std::numeric_limits<uint64_t>::max()) {
    const unsigned long long large = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred() == nullptr) {
      out = static_cast<T>(large);
      return;
    }
    PyErr_Clear();
  }
  wrong_value(field,
              "an integer in " + std::to_string(Limits::min()) + " ... " +
                  std::to_string(Limits::max()),
              value);
}

template <class T>
Buffer<T> from_tuple(const char* field, const py::tuple& tuple) {
  if (tuple.size() != 2) {
    wrong_value(field, "a (pointer, nbytes) tuple", tuple);
  }
  uint64_t address = 0;
  uint64_t nbytes = 0;
  cast_integer(field, tuple[0], address);
  cast_integer(field, tuple[1], nbytes);
  if (nbytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    wrong_value(field, "a size below 2^63 bytes", tuple[1]);
  }
  return {reinterpret_cast<T*>(static_cast<uintptr_t>(address)),
          static_cast<int64_t>(nbytes)};
}

const View& request(const char* field, py::handle value, bool writable,
                    Holder& holder) {
  if (PyObject_CheckBuffer(value.ptr()) == 0) {
    wrong_type(field, "a buffer, a (pointer, nbytes) tuple or None", value);
  }
  View& view = holder.buffers.emplace_back();
  if (PyObject_GetBuffer(value.ptr(), view.get(), PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    wrong_value(field, "contiguous memory", py::str("a strided " + type_name(value)));
  }
  if (writable && view->readonly != 0) {
    wrong_value(field, "writable memory", py::str("a read-only " + type_name(value)));
  }
  return view;
}

template <class T>
void cast_buffer(const char* field, py::handle value, bool writable, Buffer<T>& out,
                 Holder& holder) {
  if (value.is_none()) {
    out = {};
  } else if (py::isinstance<py::tuple>(value)) {
    out = from_tuple<T>(field, py::reinterpret_borrow<py::tuple>(value));
  } else {
    const View& view = request(field, value, writable, holder);
    out = {static_cast<T*>(view->buf), static_cast<int64_t>(view->len)};
  }
}

std::string field_list(const py::dict& signature) {
  std::string list;
  for (const auto& item : signature) {
    list += (list.empty() ? "" : ", ") + item.first.cast<std::string>();
  }
  return list;
}

}  // namespace

void cast_value(const char* field, py::handle value, ConstBytes& out, Holder& holder) {
  cast_buffer(field, value, false, out, holder);
}

void cast_value(const char* field, py::handle value, MutableBytes& out,
                Holder& holder) {
  cast_buffer(field, value, true, out, holder);
}

void cast_value(const char* field, py::handle value, SpanTable& out, Holder& holder) {
  if (PyObject_CheckBuffer(value.ptr()) == 0) {
    wrong_type(field, "an array of dtype commkern.spans.SPAN", value);
  }
  const View& view = request(field, value, false, holder);
  if (view->ndim != 1 || view->itemsize != static_cast<py::ssize_t>(sizeof(Span))) {
    wrong_value(field,
                "a one-dimensional array of dtype commkern.spans.SPAN (56 bytes)",
                py::str(std::to_string(view->ndim) + " dimensions of " +
                        std::to_string(view->itemsize) + " bytes"));
  }
  std::vector<Span> rows(static_cast<size_t>(view->shape[0]));
  if (!rows.empty()) std::memcpy(rows.data(), view->buf, rows.size() * sizeof(Span));
  holder.spans.push_back(std::move(rows));
  const std::vector<Span>& kept = holder.spans.back();
  out = {kept.data(), static_cast<int64_t>(kept.size())};
}

void cast_value(const char* field, py::handle value, Parts& out, Holder& holder) {
  if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value)) {
    wrong_type(field, "a list of buffers", value);
  }
  const auto list = py::reinterpret_borrow<py::sequence>(value);
  std::vector<ConstBytes> rows(list.size());
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const std::string name = std::string(field) + "[" + std::to_string(rank) + "]";
    cast_value(name.c_str(), py::object(list[rank]), rows[rank], holder);
  }
  holder.parts.push_back(std::move(rows));
  const std::vector<ConstBytes>& kept = holder.parts.back();
  out = {kept.data(), static_cast<int64_t>(kept.size())};
}

void cast_value(const char* field, py::handle value, Residual& out, Holder& holder) {
  out = {};
  if (value.is_none()) return;
  if (!py::isinstance<py::tuple>(value)) {
    wrong_type(field, "None or (version0, version1[, committed])", value);
  }
  const auto tuple = py::reinterpret_borrow<py::tuple>(value);
  if (tuple.size() != 2 && tuple.size() != 3) {
    wrong_value(field, "(version0, version1[, committed])",
                py::str("a tuple of " + std::to_string(tuple.size())));
  }
  for (size_t version = 0; version < 2; ++version) {
    const std::string name = std::string(field) + "[" + std::to_string(version) + "]";
    cast_buffer(name.c_str(), py::object(tuple[version]), true, out.version[version],
                holder);
  }
  if (tuple.size() == 3) {
    cast_value((std::string(field) + "[2]").c_str(), py::object(tuple[2]),
               out.committed, holder);
  }
}

int32_t cast_name(const char* field, py::handle value,
                  std::span<const char* const> names) {
  std::string list;
  for (const char* name : names) {
    list += (list.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  if (!py::isinstance<py::str>(value)) {
    wrong_type(field, ("one of " + list).c_str(), value);
  }
  const auto text = value.cast<std::string>();
  for (size_t k = 0; k < names.size(); ++k) {
    if (text == names[k]) return static_cast<int32_t>(k);
  }
  wrong_value(field, "one of " + list, value);
}

void cast_value(const char* field, py::handle value, int32_t& out, Holder&) {
  cast_integer(field, value, out);
}

void cast_value(const char* field, py::handle value, uint32_t& out, Holder&) {
  cast_integer(field, value, out);
}

void cast_value(const char* field, py::handle value, uint64_t& out, Holder&) {
  cast_integer(field, value, out);
}

void cast_value(const char* field, py::handle value, double& out, Holder&) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    wrong_type(field, "a number", value);
  }
  out = number;
}

void raise_unknown_field(const std::string& kernel, const py::dict& given,
                         const py::dict& signature) {
  std::string unknown;
  for (const auto& item : given) {
    if (!signature.contains(item.first)) unknown = py::str(py::repr(item.first));
  }
  throw py::type_error(kernel + "() has no field " + unknown +
                       "; its fields are: " + field_list(signature));
}

void raise_missing_field(const std::string& kernel, const char* field,
                         const py::dict& signature) {
  throw py::type_error(kernel + "() is missing field '" + field +
                       "'; its fields are: " + field_list(signature));
}

}  // namespace commkern::bindings
