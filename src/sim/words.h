// words.h — times, sizes and lines of the summaries for people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "cost/cost_model.h"

namespace interlace {

std::string TimeInWords(int64_t ps);      // "12.3 ms", with three digits
std::string BytesInWords(int64_t bytes);  // "1.50 GiB"
inline double Percent(int64_t part, int64_t whole) {
  return whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0;
}
inline std::string ModuleInWords(std::string_view module) {
  return module.empty() ? "(no module)" : std::string(module);
}

// The line that says where the times of a simulation are from.
void AddTimes(std::string& out, const CostModel::Coverage& coverage, const std::string& fingerprint, bool foreign);

template <typename... Args>
void AddLine(std::string& out, const char* format, Args... args) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, args...);
  out += buffer;
  out += '\n';
}

}  // namespace interlace
