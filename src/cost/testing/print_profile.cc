#include "cost/testing/print_profile.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/scan.h"

namespace interlace {
namespace {

void AppendNumber(std::string& out, double value) {
  char buffer[32];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  out.append(buffer, end);
}

void AppendPoints(std::string& out, const std::string& head, const Sweep& sweep) {
  for (auto [bytes, us] : sweep.points()) {
    out += head + " bytes " + std::to_string(bytes) + " us ";
    AppendNumber(out, us);
    out += '\n';
  }
}

}  // namespace

std::string PrintProfile(const ProfileTable& table) {
  std::string out = "interlace-profile 2\nfingerprint ";
  AppendQuoted(out, table.fingerprint);
  out += '\n';
  std::vector<std::string_view> keys;
  for (const auto& [key, timing] : table.ops) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  for (std::string_view key : keys) {
    const OpTiming& t = table.ops.find(key)->second;
    out += "op ";
    AppendQuoted(out, key);
    out += " us ";
    AppendNumber(out, t.us);
    out += " bytes " + std::to_string(t.bytes) + " transient " + std::to_string(t.transient_bytes) +
           (t.measured ? " measured\n" : " estimated\n");
  }
  const std::pair<const char*, const ProfileTable::Sweeps*> collectives[] = {
      {"collective ", &table.collectives}, {"core ", &table.core}, {"finish ", &table.finish}};
  for (const auto& [word, sweeps] : collectives) {
    for (const auto& [key, sweep] : *sweeps) {
      AppendPoints(out, word + key.first + " ranks " + key.second, sweep);
    }
  }
  for (const auto& [kind, sweep] : table.copies) AppendPoints(out, "copy " + kind, sweep);
  if (table.issue_us) {
    out += "issue us ";
    AppendNumber(out, *table.issue_us);
    out += '\n';
  }
  for (const auto& [kinds, factors] : table.together) {
    out += "together " + kinds.first + ' ';
    AppendNumber(out, factors.first);
    out += ' ' + kinds.second + ' ';
    AppendNumber(out, factors.second);
    out += '\n';
  }
  if (!table.interference.empty()) {
    out += "interference [";
    for (size_t i = 0; i < table.interference.size(); ++i) {
      if (i > 0) out += ", ";
      AppendNumber(out, table.interference[i]);
    }
    out += "]\n";
  }
  return out;
}

}  // namespace interlace
