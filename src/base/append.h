// append.h — text built piece by piece: texts, characters and whole numbers behind one another in one call.
//
//   Append(out, "unit u", unit.id, " numel ", unit.numel);
//   const std::string name = Joined("%", id, ": ", type);
#pragma once

#include <charconv>
#include <concepts>
#include <string>
#include <string_view>

namespace interlace {

inline void AppendPart(std::string& out, std::string_view text) {
  out += text;
}
inline void AppendPart(std::string& out, char c) {
  out += c;
}
template <std::integral Number>
requires(!std::same_as<Number, bool>) void AppendPart(std::string& out, Number number) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

template <std::same_as<bool> Flag>
void AppendPart(std::string& out, Flag) = delete;  // it would be a character

template <typename... Parts>
void Append(std::string& out, const Parts&... parts) {
  (AppendPart(out, parts), ...);
}

// The parts behind one another, for messages and names.
template <typename... Parts>
std::string Joined(const Parts&... parts) {
  std::string out;
  Append(out, parts...);
  return out;
}

}  // namespace interlace
