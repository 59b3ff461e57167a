#include "core/format.h"

#include "core/check.h"

namespace commkern {
namespace {

constexpr uint32_t bit_of(int32_t value) { return uint32_t{1} << value; }
template <class... Enums>
constexpr uint32_t set_of(Enums... values) {
  return (bit_of(static_cast<int32_t>(values)) | ... | 0u);
}

// What a code goes with.
struct Allowed {
  int32_t least_bits, most_bits;
  uint32_t scales;
  uint32_t statistics;
  uint32_t roundings;
};

constexpr uint32_t kPlainScales =
    set_of(Scales::kCompute, Scales::kFloat16, Scales::kBFloat16, Scales::kSpan);
constexpr uint32_t kPowerScales = kPlainScales | set_of(Scales::kE8M0);
constexpr uint32_t kFloatScales = kPowerScales | set_of(Scales::kOcp);
constexpr uint32_t kNearest = set_of(Rounding::kNearest);
constexpr uint32_t kStochastic = set_of(Rounding::kStochastic);
constexpr uint32_t kAbsmax = set_of(Statistic::kAbsmax);

constexpr Allowed allowed_for(Code code) {
  switch (code) {
    case Code::kSymmetric:
      return {2, 8, kPowerScales, kAbsmax | set_of(Statistic::kL2),
              kNearest | kStochastic};
    case Code::kAsymmetric:
      return {1, 8, kPlainScales, set_of(Statistic::kRange), kNearest | kStochastic};
    case Code::kSign:
      return {1, 1, kPlainScales,
              kAbsmax | set_of(Statistic::kMean, Statistic::kConstant),
              kNearest | kStochastic};
    case Code::kTernary: return {2, 2, kPowerScales, kAbsmax, kStochastic};
    case Code::kThreshold:
      return {2, 2, set_of(Scales::kSpan), set_of(Statistic::kConstant), kNearest};
    case Code::kNatural: return {2, 8, set_of(Scales::kE8M0), kAbsmax, kStochastic};
    case Code::kFloat8E4M3:
    case Code::kFloat8E5M2: return {8, 8, kFloatScales, kAbsmax, kNearest};
    case Code::kFloat6E3M2:
    case Code::kFloat6E2M3: return {6, 6, kFloatScales, kAbsmax, kNearest};
    case Code::kFloat4E2M1:
      return {4, 4, kFloatScales | set_of(Scales::kE4M3), kAbsmax, kNearest};
    case Code::kNormalFloat4: return {4, 4, kPowerScales, kAbsmax, kNearest};
    case Code::kDynamic8: return {8, 8, kPowerScales, kAbsmax, kNearest};
  }
  return {};
}

template <class Enum>
constexpr int32_t count_of() {
  return static_cast<int32_t>(sizeof(NamesOf<Enum>::kNames) / sizeof(const char*));
}

template <class Enum>
const char* name_of(Enum value) {
  return NamesOf<Enum>::kNames[static_cast<int32_t>(value)];
}

template <class Enum>
void check_value(const char* field, Enum value) {
  const auto number = static_cast<int32_t>(value);
  if (number < 0 || number >= count_of<Enum>()) {
    fail(field, ": expected 0 ... ", count_of<Enum>() - 1, ", got ", number);
  }
}

template <class Enum>
void check_among(const char* field, Code code, Enum value, uint32_t allowed) {
  if (allowed & bit_of(static_cast<int32_t>(value))) return;
  std::string names;
  for (int32_t k = 0; k < count_of<Enum>(); ++k) {
    if (allowed & bit_of(k)) {
      names += (names.empty() ? "" : ", ") + std::string(NamesOf<Enum>::kNames[k]);
    }
  }
  fail(field, " of code ", name_of(code), ": expected one of ", names, ", got ",
       name_of(value));
}

// A sign stands for the mean of magnitudes, a constant, or a bound that it rounds to at
// random.
void check_sign(const Format& f, Rounding rounding) {
  const bool bounds = f.statistic == Statistic::kAbsmax;
  if (bounds != (rounding == Rounding::kStochastic)) {
    fail("rounding of code sign with statistic ", name_of(f.statistic), ": expected ",
         bounds ? "stochastic" : "nearest", ", got ", name_of(rounding));
  }
  if (f.statistic == Statistic::kConstant && f.scales != Scales::kSpan) {
    fail("scales of code sign with statistic constant: expected span, got ",
         name_of(f.scales));
  }
}

void check_rotation(const Format& f) {
  if (f.rotation == 0) return;
  if (!is_rotation(f.rotation)) {
    fail("rotation: expected 0 or a power of two in 32 ... 4096, got ", f.rotation);
  }
  if (f.rotation % f.block_size != 0 && f.block_size % f.rotation != 0) {
    fail("rotation: expected a multiple or a divisor of block_size ", f.block_size,
         ", got ", f.rotation);
  }
  if (f.statistic == Statistic::kConstant) {
    fail("rotation with statistic constant: expected 0, got ", f.rotation);
  }
}

}  // namespace

void check_format(const Format& f, Rounding rounding) {
  check_value("code", f.code);
  check_value("scales", f.scales);
  check_value("statistic", f.statistic);
  check_rounding(rounding);
  const Allowed allowed = allowed_for(f.code);
  if (f.bits < allowed.least_bits || f.bits > allowed.most_bits) {
    fail("bits of code ", name_of(f.code), ": expected ", allowed.least_bits, " ... ",
         allowed.most_bits, ", got ", f.bits);
  }
  check_block_size(f.block_size);
  if (f.scales == Scales::kSpan && kSumTile % f.block_size != 0) {
    fail("block_size with scales span: expected a divisor of ", kSumTile, ", got ",
         f.block_size);
  }
  check_among("scales", f.code, f.scales, allowed.scales);
  check_among("statistic", f.code, f.statistic, allowed.statistics);
  check_among("rounding", f.code, rounding, allowed.roundings);
  if (f.code == Code::kSign) check_sign(f, rounding);
  if (f.statistic == Statistic::kConstant && !(f.constant > 0 && f.constant < 1e38)) {
    fail("constant: expected a number in (0, 1e38), got ", f.constant);
  }
  check_rotation(f);
}

}  // namespace commkern
