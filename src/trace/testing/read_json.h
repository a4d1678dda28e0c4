// read_json.h — reading JSON, for our own checkers and tests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace interlace {

struct JsonField;

// A parsed value. Objects keep the order of their keys.
struct Json {
  enum class Kind : uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<Json> items;
  std::vector<JsonField> fields;
  // The field of that name, or nullptr.
  const Json* Find(std::string_view key) const;
  bool is(Kind k) const { return kind == k; }
};

struct JsonField {
  std::string key;
  Json value;
};

// Error: not JSON (with line and column), nested deeper than 100, a key given twice.
Result<Json> ParseJson(std::string_view text);

}  // namespace interlace
