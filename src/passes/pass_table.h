// pass_table.h — every pass with its command-line name, help and options. A new pass is one row here
// (docs/adding_a_pass.md).
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "passes/pipeline.h"

namespace interlace {

enum class OptionKind { kCount, kPositiveOrNone, kChoice, kName, kAxes, kText, kBytes, kNumber };

struct OptionInfo {
  std::string_view name;
  OptionKind kind;
  std::string_view missing;  // text of the default; empty: the option is required
  std::string_view help;
  std::vector<std::string_view> choices = {};  // kChoice
  int64_t min = 0;                             // kCount
};

// What a pass works on; the runner refuses anything else.
enum class Takes : uint8_t {
  kAny,
  kCaptured,
  kUnits,    // after shard, replicate or zero1
  kNumbers,  // after update, with all sizes known
};

struct PassInfo {
  std::string_view name;
  std::string_view help;
  std::vector<OptionInfo> options;
  Result<bool> (*run)(Program&, const PassOptions&);  // true: the program changed
  Takes takes = Takes::kAny;
  bool keeps_pending = false;  // it runs where updates stand before the first use of what they update (ir/pending.h)
  // A pass that, with such options, decides about the captured program and runs again what has run since.
  bool (*goes_back)(const PassOptions&) = nullptr;
  Result<bool> (*run_again)(Program&, const Origin&, const PassOptions&) = nullptr;
};

std::span<const PassInfo> PassTable();
const PassInfo* FindPass(std::string_view name);
// The table as text for people: names, help, options with defaults.
std::string PassTableText();

}  // namespace interlace
