#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "bindings/cast_args.h"
#include "bindings/cast_plan.h"
#include "bindings/register.h"
#include "core/check.h"
#include "cpu/isa_select.h"
#include "runtime/runner.h"
#include "runtime/thread_transport.h"

namespace commkern::bindings {
namespace {

// Any Python object with post(round) and complete(round). The GIL is taken for these
// two calls alone. commkern.runner aborts such a transport itself.
class CallbackTransport final : public Transport {
 public:
  explicit CallbackTransport(const py::object& object)
      : post_(object.attr("post")), complete_(object.attr("complete")) {}

  void post(const Exchange& exchange) override { call(post_, exchange.round); }
  void complete(const Exchange& exchange) override { call(complete_, exchange.round); }
  void abort(const char*) noexcept override {}

 private:
  static void call(const py::object& method, int32_t round) {
    const py::gil_scoped_acquire gil;
    method(round);
  }

  py::object post_;
  py::object complete_;
};

void check_endpoint(const Plan& plan, const ThreadEndpoint& endpoint) {
  if (endpoint.rank() != plan.rank || endpoint.world_size() != plan.world_size) {
    fail("transport: expected rank ", plan.rank, " of ", plan.world_size,
         " as in the plan, got rank ", endpoint.rank(), " of ", endpoint.world_size());
  }
}

py::dict run(Runner& runner, const py::list& objects,
             const std::vector<uint64_t>& registers, const py::object& transport) {
  std::optional<CallbackTransport> callbacks;
  Transport* used = nullptr;
  if (py::isinstance<ThreadEndpoint>(transport)) {
    auto& endpoint = transport.cast<ThreadEndpoint&>();
    check_endpoint(runner.plan(), endpoint);
    used = &endpoint;
  } else {
    used = &callbacks.emplace(transport);
  }
  Holder holder;
  std::vector<MutableBytes> buffers(objects.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const std::string name = "buffers[" + std::to_string(i) + "]";
    cast_value(name.c_str(), objects[i], buffers[i], holder);
  }
  Timing timing;
  {
    const py::gil_scoped_release released;
    timing = runner.run(buffers, registers, *used, cpu::active_table());
  }
  py::dict times;
  for (size_t i = 0; i < kPurposes.size(); ++i) {
    times[py::str(std::string(kPurposes[i]))] = timing.purpose_ns[i];
  }
  times["exchange"] = timing.exchange_ns;
  return times;
}

const char* kind_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::kMismatch: return "mismatch";
    case FailureKind::kLost: return "lost";
    case FailureKind::kFailed: return "failed";
    default: return "corrupt";
  }
}

py::bytes to_bytes(const PreambleBytes& preamble) {
  return {reinterpret_cast<const char*>(preamble.data()), preamble.size()};
}

void translate_failure(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Failure& failure) {
    const auto type = py::module_::import("commkern.failure").attr("Failure");
    const auto error =
        type(kind_name(failure.kind), failure.peer, failure.observer, failure.text,
             to_bytes(failure.received), to_bytes(failure.expected));
    PyErr_SetObject(type.ptr(), error.ptr());
  }
}

}  // namespace

void register_runtime(py::module_& m) {
  py::register_exception_translator(translate_failure);

  py::class_<Runner>(m, "Plan", "A plan in the form of commkern.plan.lower().")
      .def(py::init([](const py::list& buffers, const py::list& registers, int32_t rank,
                       int32_t world_size, const py::bytes& preamble,
                       const py::list& rounds, const py::list& steps) {
             return std::make_unique<Runner>(compile(to_plan_spec(
                 buffers, registers, rank, world_size, preamble, rounds, steps)));
           }),
           py::arg("buffers"), py::arg("registers"), py::arg("rank"),
           py::arg("world_size"), py::arg("preamble"), py::arg("rounds"),
           py::arg("steps"))
      .def(
          "run", &run, py::arg("buffers"), py::arg("registers"), py::arg("transport"),
          "Run every step; nanoseconds of kernels and exchanges. Buffers are arrays or "
          "(address, nbytes); the transport is a ThreadEndpoint or has post(round) "
          "and complete(round).");

  py::class_<ThreadGroup, std::shared_ptr<ThreadGroup>>(
      m, "ThreadGroup", "Ranks that are threads of this process.")
      .def(py::init<int32_t, double>(), py::arg("world_size"),
           py::arg("timeout_s") = 60.0)
      .def_property_readonly("world_size", &ThreadGroup::world_size)
      .def(
          "endpoint",
          [](std::shared_ptr<ThreadGroup> group, int32_t rank) {
            return std::make_unique<ThreadEndpoint>(std::move(group), rank);
          },
          py::arg("rank"), "The group as this rank sees it; for one thread at a time.");

  py::class_<ThreadEndpoint>(m, "ThreadEndpoint", "One rank of a ThreadGroup.")
      .def_property_readonly("rank", &ThreadEndpoint::rank)
      .def_property_readonly("world_size", &ThreadEndpoint::world_size)
      .def_property_readonly("bytes_sent", &ThreadEndpoint::bytes_sent)
      .def(
          "bind",
          [](const py::object& self, const py::object&, const py::object&,
             const py::object&) { return self; },
          py::arg("plan"), py::arg("buffers"), py::arg("step"),
          "The transport of one run: this endpoint itself.")
      .def(
          "abort",
          [](ThreadEndpoint& self, const py::object& error) {
            const auto reason = std::string(py::str(error));
            const py::gil_scoped_release released;
            self.abort(reason.c_str());
          },
          py::arg("error"), "This rank stops: peers that wait raise PeerFailed.");
}

}  // namespace commkern::bindings
