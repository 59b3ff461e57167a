#include "bindings/cast_plan.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace commkern::bindings {
namespace {

std::string shown(const py::handle& value) { return std::string(py::repr(value)); }

py::tuple as_tuple(const py::handle& value, size_t least) {
  if (!py::isinstance<py::tuple>(value) || py::len(value) < least) {
    fail("plan: expected a tuple of at least ", least, " items, got ", shown(value));
  }
  return py::reinterpret_borrow<py::tuple>(value);
}

Slice slice_from(const py::tuple& tuple, size_t begin) {
  return {tuple[begin].cast<int32_t>(), tuple[begin + 1].cast<int64_t>(),
          tuple[begin + 2].cast<int64_t>()};
}

Slice to_slice(const py::handle& value) { return slice_from(as_tuple(value, 3), 0); }

std::vector<Slice> to_slices(const py::handle& list) {
  std::vector<Slice> slices;
  for (const auto& item : list.cast<py::list>()) slices.push_back(to_slice(item));
  return slices;
}

std::vector<Span> to_spans(const py::array& array) {
  if (array.itemsize() != sizeof(Span) || array.ndim() != 1 ||
      !(array.flags() & py::array::c_style)) {
    fail("spans: expected a contiguous table of rows of ", sizeof(Span),
         " bytes, got rows of ", array.itemsize());
  }
  std::vector<Span> spans(size_t(array.size()));
  if (!spans.empty()) {
    std::memcpy(spans.data(), array.data(), spans.size() * sizeof(Span));
  }
  return spans;
}

FieldValue to_symbol(const py::tuple& tuple) {
  const auto kind = tuple[0].cast<std::string>();
  if (kind == "slice") return slice_from(as_tuple(tuple, 4), 1);
  if (kind == "register") return Register{tuple[1].cast<int32_t>()};
  if (kind == "residual") {
    as_tuple(tuple, 4);
    ResidualSlices residual{{to_slice(tuple[1]), to_slice(tuple[2])}, {}};
    if (!tuple[3].is_none()) residual.committed = to_slice(tuple[3]);
    return residual;
  }
  if (kind == "parts") {
    return to_slices(tuple[1]);
  }
  fail("field: expected a slice, register, residual or parts, got ", shown(tuple));
}

FieldValue to_field(const py::handle& value) {
  if (value.is_none()) return std::monostate{};
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::array>(value)) return to_spans(value.cast<py::array>());
  if (py::isinstance<py::tuple>(value)) return to_symbol(as_tuple(value, 2));
  return value.cast<uint64_t>();
}

KernelSpec to_kernel(const py::tuple& step) {
  KernelSpec kernel{as_tuple(step, 3)[1].cast<std::string>(), {}};
  for (const auto& [name, value] : step[2].cast<py::dict>()) {
    kernel.fields.emplace_back(name.cast<std::string>(), to_field(value));
  }
  return kernel;
}

HeaderTemplate to_header(const py::handle& value) {
  const auto text = value.cast<std::string_view>();
  return HeaderTemplate({text.begin(), text.end()});
}

HeaderPlace to_header_place(const py::tuple& step) {
  HeaderPlace place{to_slice(step[1]), to_header(step[2]), to_slice(step[3]), {}};
  if (!step[4].is_none()) place.nonfinite = to_slice(step[4]);
  return place;
}

Begin to_begin(const py::handle& value) {
  const auto name = value.cast<std::string>();
  const auto at = std::find(kPurposes.begin(), kPurposes.end(), name);
  if (at == kPurposes.end()) {
    fail("purpose: expected other, compress, reduce or decompress, got ", name);
  }
  return {int32_t(at - kPurposes.begin())};
}

StepSpec to_step(const py::tuple& step) {
  const auto kind = step[0].cast<std::string>();
  if (kind == "kernel") return to_kernel(step);
  if (kind == "post") return Post{step[1].cast<int32_t>()};
  if (kind == "complete") return Complete{step[1].cast<int32_t>()};
  if (kind == "begin") return to_begin(step[1]);
  if (kind == "write_header") {
    return WriteHeader{to_header_place(as_tuple(step, 5))};
  }
  if (kind == "read_header") {
    return ReadHeader{to_header_place(as_tuple(step, 6)), step[5].cast<int32_t>()};
  }
  fail("expected kernel, write_header, read_header, post, complete or begin, got ",
       kind);
}

std::vector<Transfer> to_transfers(const py::handle& list) {
  std::vector<Transfer> transfers;
  for (const auto& item : list.cast<py::list>()) {
    const auto transfer = as_tuple(item, 2);
    transfers.push_back({transfer[0].cast<int32_t>(), to_slices(transfer[1])});
  }
  return transfers;
}

// Whatever a wrong value raised on the way, the step is named.
template <class Convert>
auto named(const char* what, size_t index, Convert&& convert) {
  try {
    return convert();
  } catch (const py::cast_error& error) {
    fail(what, " ", index, ": ", error.what());
  } catch (const std::invalid_argument& error) {
    fail(what, " ", index, ": ", error.what());
  }
}

}  // namespace

PlanSpec to_plan_spec(const py::list& buffers, const py::list& registers, int32_t rank,
                      int32_t world_size, const py::bytes& preamble,
                      const py::list& rounds, const py::list& steps) {
  PlanSpec spec;
  spec.buffers = buffers.cast<std::vector<std::string>>();
  spec.registers = registers.cast<std::vector<std::string>>();
  spec.rank = rank;
  spec.world_size = world_size;
  const auto bytes = std::string_view(preamble);
  if (bytes.size() != sizeof(spec.preamble)) {
    fail("preamble: expected ", sizeof(spec.preamble), " bytes, got ", bytes.size());
  }
  std::memcpy(&spec.preamble, bytes.data(), bytes.size());
  for (const auto& item : rounds) {
    spec.rounds.push_back(named("round", spec.rounds.size(), [&] {
      const auto round = as_tuple(item, 2);
      return Round{to_transfers(round[0]), to_transfers(round[1])};
    }));
  }
  for (const auto& item : steps) {
    spec.steps.push_back(
        named("step", spec.steps.size(), [&] { return to_step(as_tuple(item, 2)); }));
  }
  return spec;
}

}  // namespace commkern::bindings
