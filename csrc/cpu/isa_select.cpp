#include "cpu/isa_select.h"

#include <atomic>
#include <cstdlib>

#include "core/check.h"
#include "cpu/tables.h"

namespace commkern::cpu {
namespace {

struct Isa {
  const char* name;
  const KernelTable* table;
  bool (*supported)();
};

#if defined(__x86_64__)
bool has_baseline() { return __builtin_cpu_supports("sse4.2") != 0; }
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
constexpr Isa kIsas[] = {{"baseline", &baseline::kTable, has_baseline},
                         {"avx2", &avx2::kTable, has_avx2},
                         {"avx512", &avx512::kTable, has_avx512}};
#else
bool has_baseline() { return true; }
constexpr Isa kIsas[] = {{"baseline", &baseline::kTable, has_baseline}};
#endif

std::string joined() {
  std::string list;
  for (const std::string& name : available_isas()) {
    list += (list.empty() ? "" : ", ") + name;
  }
  return list.empty() ? "none: this CPU lacks SSE4.2" : list;
}

const Isa* find(std::string_view name) {
  for (const Isa& isa : kIsas) {
    if (name == isa.name && isa.supported()) return &isa;
  }
  fail("COMMKERN_ISA: expected one of ", joined(), ", got '", name, "'");
}

const Isa* chosen_at_start() {
  const char* wanted = std::getenv("COMMKERN_ISA");
  if (wanted != nullptr && *wanted != '\0') return find(wanted);
  const std::vector<std::string> names = available_isas();
  return find(names.empty() ? "baseline" : names.back());
}

std::atomic<const Isa*> chosen{nullptr};

const Isa& active() {
  const Isa* isa = chosen.load();
  if (isa == nullptr) {
    isa = chosen_at_start();
    chosen.store(isa);
  }
  return *isa;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.supported()) names.emplace_back(isa.name);
  }
  return names;
}

const KernelTable& active_table() { return *active().table; }

std::string active_isa() { return active().name; }

void set_isa(std::string_view name) { chosen.store(find(name)); }

}  // namespace commkern::cpu
