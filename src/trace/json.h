// json.h — writing JSON: what the trace formats need, no more.
//
// The writer puts commas and quotes where they belong. Text that is no UTF-8 is written with U+FFFD in place of the bad
// bytes, so that what we write is always valid JSON.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace interlace {

// Length of the valid UTF-8 sequence at the start of `text`, or 0.
size_t Utf8Length(std::string_view text);
// Appends `text` as a JSON string with its quotes.
void AppendJsonString(std::string& out, std::string_view text);
// Appends the shortest number that reads back to the same double; null when it is not finite (JSON has no word for it).
void AppendJsonNumber(std::string& out, double value);

class JsonWriter {
 public:
  JsonWriter& BeginObject() { return Open('{', '}'); }
  JsonWriter& EndObject() { return Close(); }
  JsonWriter& BeginArray() { return Open('[', ']'); }
  JsonWriter& EndArray() { return Close(); }
  JsonWriter& Key(std::string_view key);
  JsonWriter& String(std::string_view text);
  JsonWriter& Int(int64_t value);
  JsonWriter& Number(double value);
  JsonWriter& Bool(bool value);
  JsonWriter& Null();
  // Nanoseconds as microseconds with three decimals, exactly.
  JsonWriter& Micros(int64_t nanoseconds);
  // Key and value in one call.
  JsonWriter& Field(std::string_view key, std::string_view text) { return Key(key).String(text); }
  JsonWriter& Field(std::string_view key, const char* text) { return Key(key).String(text); }
  JsonWriter& Field(std::string_view key, int64_t value) { return Key(key).Int(value); }
  JsonWriter& Field(std::string_view key, int32_t value) { return Key(key).Int(value); }
  JsonWriter& Field(std::string_view key, double value) { return Key(key).Number(value); }
  JsonWriter& Field(std::string_view key, bool value) { return Key(key).Bool(value); }
  // Keys and values in turn: Fields("size", bytes, "stream", 0).
  template <typename Value, typename... More>
  JsonWriter& Fields(std::string_view key, const Value& value, const More&... more) {
    Field(key, value);
    if constexpr (sizeof...(more) > 0) Fields(more...);
    return *this;
  }
  // A line break between values, for files that people open.
  JsonWriter& NewLine();
  std::string Take() { return std::move(out_); }

 private:
  JsonWriter& Open(char open, char close);
  JsonWriter& Close();
  void Separate();
  std::string out_;
  std::string closers_;  // of what is open
  bool need_comma_ = false;
};

}  // namespace interlace
