#include "passes/pass_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "base/scan.h"
#include "base/suggest.h"
#include "ir/program.h"

namespace interlace {

const std::string* PassOptions::Find(std::string_view name) const {
  for (const auto& [key, text] : items_) {
    if (key == name) return &text;
  }
  return nullptr;
}

Result<int64_t> PassOptions::Int(std::string_view name, std::optional<int64_t> missing, int64_t min) const {
  const std::string* text = Find(name);
  if (text == nullptr) {
    if (missing) return *missing;
    return MakeError("option '", name, "' is required: give ", name, "=N");
  }
  const std::optional<int64_t> number = ParseNumber<int64_t>(*text);
  if (!number) return MakeError("option ", name, "=", *text, ": expected a whole number");
  if (*number < min) return MakeError("option ", name, "=", *text, ": must be at least ", min);
  return *number;
}

Result<std::optional<double>> PassOptions::PositiveOrNone(std::string_view name) const {
  const std::string* text = Find(name);
  if (text == nullptr || *text == "none") return std::optional<double>();
  const std::optional<double> number = ParseNumber<double>(*text);
  if (!number || !std::isfinite(*number) || *number <= 0)
    return MakeError("option ", name, "=", *text, ": expected a positive number or none");
  return number;
}

Result<std::string> PassOptions::Choice(std::string_view name, std::initializer_list<std::string_view> choices) const {
  const std::string* text = Find(name);
  if (text == nullptr) return std::string(*choices.begin());
  std::string list;
  for (std::string_view choice : choices) {
    if (choice == *text) return *text;
    list += list.empty() ? "" : " or ";
    list += choice;
  }
  return MakeError("option ", name, "=", *text, ": expected ", list,
                   DidYouMean(*text, std::vector<std::string_view>(choices)));
}

Result<std::string> PassOptions::Name(std::string_view name, std::string_view missing) const {
  const std::string* text = Find(name);
  if (text == nullptr) return std::string(missing);
  if (!IsWord(*text)) return MakeError("option ", name, "=", *text, ": expected a name of letters, digits and _");
  return *text;
}

Result<std::string> PassOptions::Axes(std::string_view name, std::string_view missing) const {
  std::string axes = Text(name, missing);
  std::replace(axes.begin(), axes.end(), '+', ',');
  for (std::string_view axis : AxesOf(axes)) {
    if (!IsWord(axis)) return MakeError("option ", name, "=", axis, ": expected a name of letters, digits and _");
  }
  return axes;
}

std::string PassOptions::Text(std::string_view name, std::string_view missing) const {
  const std::string* text = Find(name);
  return text == nullptr ? std::string(missing) : *text;
}

Result<std::optional<int64_t>> PassOptions::Bytes(std::string_view name) const {
  const std::string* text = Find(name);
  if (text == nullptr || *text == "none") return std::optional<int64_t>();
  double number = 0;
  auto [end, code] = std::from_chars(text->data(), text->data() + text->size(), number);
  std::string_view unit(end, static_cast<size_t>(text->data() + text->size() - end));
  static constexpr std::pair<std::string_view, double> kUnits[] = {{"", 1},
                                                                   {"B", 1},
                                                                   {"kB", 1e3},
                                                                   {"KB", 1e3},
                                                                   {"MB", 1e6},
                                                                   {"GB", 1e9},
                                                                   {"TB", 1e12},
                                                                   {"KiB", 1024.0},
                                                                   {"MiB", 1048576.0},
                                                                   {"GiB", 1073741824.0},
                                                                   {"TiB", 1099511627776.0}};
  for (auto [name_of, factor] : kUnits) {
    if (code != std::errc() || unit != name_of || !(number * factor >= 1) || number * factor > 9e18) continue;
    return std::optional<int64_t>(static_cast<int64_t>(number * factor));
  }
  return MakeError("option ", name, "=", *text,
                   ": expected a number of bytes such as 20GiB, 512MB or 1000000, or none");
}

Result<double> PassOptions::Number(std::string_view name, double missing) const {
  const std::string* text = Find(name);
  if (text == nullptr) return missing;
  const std::optional<double> number = ParseNumber<double>(*text);
  if (!number || !std::isfinite(*number) || *number < 0)
    return MakeError("option ", name, "=", *text, ": expected a number of at least 0");
  return *number;
}

Result<std::vector<int64_t>> PassOptions::Counts(std::string_view name) const {
  std::vector<int64_t> out;
  const std::string* text = Find(name);
  if (text == nullptr || *text == "none") return out;
  for (std::string_view word : Split(*text, '+')) {
    const std::optional<int64_t> number = ParseNumber<int64_t>(word);
    constexpr int64_t kMost = 1 << 24;
    if (!number || *number < 1 || *number > kMost)
      return MakeError("option ", name, "=", *text, ": expected numbers of at least 1, joined by +");
    out.push_back(*number);
  }
  return out;
}

Result<std::vector<UnitId>> ReadUnits(const Program& program, std::string_view text, const std::string& where) {
  std::vector<UnitId> units;
  for (std::string_view name : Split(text, '+')) {
    UnitId unit = kNone;
    const char* end = name.data() + name.size();
    if (!name.starts_with('u') || name.size() < 2 || std::from_chars(name.data() + 1, end, unit).ptr != end)
      return MakeError(where, ": expected units such as u0+u3, found '", name, "'");
    if (unit < 0 || unit >= static_cast<UnitId>(program.units.size()))
      return MakeError(where, ": there is no ", name, "; the program has ", program.units.size(), " units");
    if (std::find(units.begin(), units.end(), unit) != units.end())
      return MakeError(where, ": ", name, " is listed twice");
    units.push_back(unit);
  }
  return units;
}

}  // namespace interlace
