// toml.h — the part of TOML that cluster files use: tables, and keys (quoted too) with strings, numbers, bools, lists.
//
// What it refuses (nested lists, dates, inline tables, multi-line strings) it names. Keys keep their place for
// messages.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace interlace {

struct TomlValue {
  enum class Kind : uint8_t { kString, kInt, kFloat, kBool, kList };
  Kind kind = Kind::kInt;
  std::string text;
  int64_t integer = 0;
  double number = 0;  // of integers too
  bool boolean = false;
  std::vector<TomlValue> list;
};

struct TomlEntry {
  std::string table;  // "" at the top, "device", "a.b"
  std::string key;
  TomlValue value;
  size_t key_pos = 0, value_pos = 0;  // byte offsets in the text
};

// Entries in file order. Error: "file:line:col: what" with the line and a caret; a key or a table given twice.
Result<std::vector<TomlEntry>> ParseToml(std::string_view text, std::string_view file);

}  // namespace interlace
