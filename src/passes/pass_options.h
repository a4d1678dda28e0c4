// pass_options.h — the options of one pass as a pipeline spells them: `shard(axis=dp,ranks=2)` has {axis: dp, ranks:
// 2}.
//
// Values stay text until the pass reads them with a type; a wrong value is an error that names the option.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace interlace {

class Program;

class PassOptions {
 public:
  PassOptions() = default;
  PassOptions(std::initializer_list<std::pair<std::string, std::string>> items) : items_(items) {}

  const std::vector<std::pair<std::string, std::string>>& items() const { return items_; }
  const std::string* Find(std::string_view name) const;
  void Set(std::string name, std::string text) { items_.emplace_back(std::move(name), std::move(text)); }

  friend bool operator==(const PassOptions&, const PassOptions&) = default;

  // A whole number of at least `min`. Error: missing without a default, no number, too small.
  Result<int64_t> Int(std::string_view name, std::optional<int64_t> missing, int64_t min) const;
  // A positive finite number, or nullopt for "none" (also when missing). Error: anything else.
  Result<std::optional<double>> PositiveOrNone(std::string_view name) const;
  // One of `choices`; the first when missing. Error: another word.
  Result<std::string> Choice(std::string_view name, std::initializer_list<std::string_view> choices) const;
  // A name ([A-Za-z_][A-Za-z0-9_]*). Error: anything else.
  Result<std::string> Name(std::string_view name, std::string_view missing) const;
  // Names joined by +, as a program writes axes: "replica+dp" gives "replica,dp".
  Result<std::string> Axes(std::string_view name, std::string_view missing) const;
  // Any text without "," and parentheses; `missing` when it is not given.
  std::string Text(std::string_view name, std::string_view missing) const;
  // Bytes of "20GiB", "512MB" (powers of 1000) or a plain number; nullopt for "none" and when missing. Error: anything
  // else.
  Result<std::optional<int64_t>> Bytes(std::string_view name) const;
  // Whole numbers of at least 1, joined by +; none for "none" and when missing. Error: anything else.
  Result<std::vector<int64_t>> Counts(std::string_view name) const;
  // A finite number of at least 0. Error: anything else.
  Result<double> Number(std::string_view name, double missing) const;

 private:
  std::vector<std::pair<std::string, std::string>> items_;
};

// Units of a list u0+u3. Error: another text, a unit that the program lacks or that is listed twice; `where` begins it.
Result<std::vector<int32_t>> ReadUnits(const Program& program, std::string_view text, const std::string& where);

}  // namespace interlace
