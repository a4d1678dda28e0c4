#include "ir/rule.h"

#include <algorithm>

namespace interlace {
namespace {

constexpr RuleTraits Unary(std::string_view name, uint8_t numbers = 0) {
  return {.name = name, .operands = 1, .numbers = numbers};
}
constexpr RuleTraits Binary(std::string_view name) {
  return {.name = name, .operands = 2, .numbers = 0b11};
}

// In the order of RuleCode.
constexpr RuleTraits kTraits[] = {
    Unary("copy", 0b1),
    Unary("neg"),
    Unary("abs"),
    Unary("sign"),
    Unary("sqrt"),
    Unary("rsqrt"),
    Unary("reciprocal"),
    Unary("exp"),
    Unary("log"),
    Unary("tanh"),
    Binary("mul"),
    Binary("div"),
    Binary("max"),
    Binary("min"),
    Binary("pow"),
    Binary("gt"),
    Binary("ge"),
    Binary("lt"),
    Binary("le"),
    Binary("eq"),
    Binary("ne"),
    {.name = "add", .operands = 3, .numbers = 0b111, .scaled = true},
    {.name = "lerp", .operands = 3, .numbers = 0b100},
    {.name = "where", .operands = 3, .numbers = 0b110},
    {.name = "addcmul", .operands = 4, .numbers = 0b1000, .scaled = true},
    {.name = "addcdiv", .operands = 4, .numbers = 0b1000, .scaled = true},
};
static_assert(std::size(kTraits) == kRuleCodes);

}  // namespace

const RuleTraits& TraitsOf(RuleCode code) {
  return kTraits[static_cast<size_t>(code)];
}

std::optional<RuleCode> RuleCodeOf(std::string_view name) {
  for (int i = 0; i < kRuleCodes; ++i) {
    if (kTraits[i].name == name) return static_cast<RuleCode>(i);
  }
  return std::nullopt;
}

std::vector<std::string_view> RuleOpNames() {
  std::vector<std::string_view> names;
  for (const RuleTraits& row : kTraits) names.push_back(row.name);
  return names;
}

size_t UpdateRule::RowSize() const {
  int most = 0;
  for (const RuleForm& form : forms) most = std::max(most, form.numbers);
  return static_cast<size_t>(most) + 1;
}

}  // namespace interlace
