#include "runtime/kernel_call.h"

#include <algorithm>
#include <concepts>
#include <limits>
#include <list>
#include <string_view>
#include <type_traits>

#include "core/check.h"

namespace commkern {
namespace {

void append(std::string& list, std::string_view name) {
  if (!list.empty()) list += ", ";
  list += name;
}

template <std::integral T>
T narrow(const char* what, uint64_t value) {
  constexpr auto kMost = uint64_t(std::numeric_limits<T>::max());
  if (value > kMost) {
    fail(what, ": expected at most ", kMost, ", got ", value);
  }
  return T(value);
}

template <class Enum>
Enum parse(const char* field, const std::string& text) {
  std::string listed;
  int32_t value = 0;
  for (const char* name : NamesOf<Enum>::kNames) {
    if (text == name) return static_cast<Enum>(value);
    append(listed, name);
    ++value;
  }
  fail(field, ": expected one of ", listed, ", got ", text);
}

// What an Args struct points to, and how its fields follow from a frame. Fields are
// captured by address: neither the struct nor this may move.
struct Bindings {
  std::list<std::vector<Span>> spans;
  std::list<std::vector<ConstBytes>> parts;
  std::vector<std::function<void(const Frame&)>> at_run;
};

// Visits the fields of an Args struct: sets constants at once, binds the rest.
class FieldSetter {
 public:
  FieldSetter(const KernelSpec& spec, PlanNames& names, Bindings& bindings)
      : spec_(spec), names_(names), bindings_(bindings) {}

  template <class Field>
  void operator()(const char* name, Field& field) {
    append(listed_, name);
    for (const auto& [key, value] : spec_.fields) {
      if (key != name) continue;
      ++found_;
      if (set(name, field, value)) continue;
      fail(key, ": the plan has a value of the wrong kind");
    }
  }

  void require_all_found() const {
    if (found_ == spec_.fields.size()) return;
    std::string given;
    for (const auto& [key, value] : spec_.fields) append(given, key);
    fail("fields: expected some of ", listed_, "; got ", given);
  }

 private:
  bool set(const char*, SpanTable& field, const FieldValue& value) {
    const auto* rows = std::get_if<std::vector<Span>>(&value);
    if (!rows) return false;
    const auto& kept = bindings_.spans.emplace_back(*rows);
    field = {kept.data(), int64_t(kept.size())};
    return true;
  }

  template <class T>
  bool set(const char*, Buffer<T>& field, const FieldValue& value) {
    if (std::holds_alternative<std::monostate>(value)) return true;
    const auto* slice = std::get_if<Slice>(&value);
    if (slice) bind(field, *slice);
    return slice;
  }

  bool set(const char*, Parts& field, const FieldValue& value) {
    const auto* slices = std::get_if<std::vector<Slice>>(&value);
    if (!slices) return false;
    auto& rows = bindings_.parts.emplace_back(slices->size());
    for (size_t i = 0; i < rows.size(); ++i) bind(rows[i], (*slices)[i]);
    field = {rows.data(), int64_t(rows.size())};
    return true;
  }

  bool set(const char*, Residual& field, const FieldValue& value) {
    if (std::holds_alternative<std::monostate>(value)) return true;
    const auto* slices = std::get_if<ResidualSlices>(&value);
    if (!slices) return false;
    bind(field.version[0], slices->version[0]);
    bind(field.version[1], slices->version[1]);
    if (slices->committed) bind(field.committed, *slices->committed);
    return true;
  }

  template <std::integral T>
  bool set(const char* name, T& field, const FieldValue& value) {
    if (const auto* constant = std::get_if<uint64_t>(&value)) {
      field = narrow<T>(name, *constant);
      return true;
    }
    const auto* given = std::get_if<Register>(&value);
    if (!given) return false;
    bindings_.at_run.push_back([&field, name, at = names_.use(*given)](const Frame& f) {
      field = narrow<T>(name, f.registers[size_t(at.index)]);
    });
    return true;
  }

  bool set(const char*, double& field, const FieldValue& value) {
    const auto* whole = std::get_if<uint64_t>(&value);
    const auto* number = std::get_if<double>(&value);
    if (!whole && !number) return false;
    field = whole ? double(*whole) : *number;
    return true;
  }

  template <class Enum>
    requires std::is_enum_v<Enum>
  bool set(const char* name, Enum& field, const FieldValue& value) {
    const auto* text = std::get_if<std::string>(&value);
    if (text) field = parse<Enum>(name, *text);
    return text;
  }

  template <class T>
  void bind(Buffer<T>& field, const Slice& slice) {
    bindings_.at_run.push_back([&field, at = names_.use(slice)](const Frame& frame) {
      const MutableBytes bytes = frame.at(at);
      field = {reinterpret_cast<T*>(bytes.data), bytes.nbytes};
    });
  }

  const KernelSpec& spec_;
  PlanNames& names_;
  Bindings& bindings_;
  std::string listed_;
  size_t found_ = 0;
};

template <class Args>
class TypedCall final : public KernelCall {
 public:
  using Entry = void (*KernelTable::*)(const Args&, void*);

  TypedCall(const KernelSpec& spec, PlanNames& names, Entry entry)
      : name_(spec.name), entry_(entry) {
    FieldSetter setter(spec, names, bindings_);
    visit_fields(args_, setter);
    setter.require_all_found();
  }
  TypedCall(const TypedCall&) = delete;
  TypedCall& operator=(const TypedCall&) = delete;

  const std::string& name() const override { return name_; }

  void bind(const Frame& frame) override {
    for (const auto& set_field : bindings_.at_run) set_field(frame);
  }

  void check(const KernelTable& table) const override {
    if (!(table.*entry_)) {
      fail(table.filler, " kernels: expected ", name_, " among them, got none");
    }
    commkern::check(args_);
  }

  void run(const KernelTable& table) const override { (table.*entry_)(args_, nullptr); }

 private:
  const std::string name_;
  const Entry entry_;
  Args args_;
  Bindings bindings_;
};

}  // namespace

const Slice& PlanNames::use(const Slice& slice) {
  if (slice.buffer < 0 || size_t(slice.buffer) >= buffers_.size()) {
    fail("buffer: expected 0 ... ", int64_t(buffers_.size()) - 1, ", got ",
         slice.buffer);
  }
  if (slice.offset < 0 || slice.nbytes < 0 || slice.offset > kMaxNbytes ||
      slice.nbytes > kMaxNbytes) {
    fail("slice of ", buffers_[size_t(slice.buffer)], ": expected 0 ... ", kMaxNbytes,
         " as offset and size, got ", slice.offset, " and ", slice.nbytes);
  }
  auto& required = required_nbytes_[size_t(slice.buffer)];
  required = std::max(required, slice.offset + slice.nbytes);
  return slice;
}

const Register& PlanNames::use(const Register& given) const {
  if (given.index < 0 || size_t(given.index) >= registers_.size()) {
    fail("register: expected 0 ... ", int64_t(registers_.size()) - 1, ", got ",
         given.index);
  }
  return given;
}

std::unique_ptr<KernelCall> make_kernel_call(const KernelSpec& spec, PlanNames& names) {
#define COMMKERN_ENTRY(kernel, Args)                                             \
  if (spec.name == #kernel) {                                                    \
    return std::make_unique<TypedCall<Args>>(spec, names, &KernelTable::kernel); \
  }
  COMMKERN_KERNELS(COMMKERN_ENTRY)
#undef COMMKERN_ENTRY
  fail("kernel: expected a name of the kernel table, got ", spec.name);
}

}  // namespace commkern
