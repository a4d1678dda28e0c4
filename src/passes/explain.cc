#include "passes/explain.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>
#include <vector>

#include "ir/pending.h"

namespace interlace {
namespace {

struct Row {
  std::string name;
  double us = 0;
  double bytes = 0;
  std::string recompute, passes;
};

std::vector<std::string> SplitLines(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

double Number(const std::string& text) {
  double number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

std::vector<Row> Table(const Program& program, std::string_view key) {
  std::vector<Row> rows;
  const std::string* text = program.Meta(key);
  if (text == nullptr || text->empty()) return rows;
  for (const std::string& line : SplitLines(*text, '\n')) {
    std::vector<std::string> parts = SplitLines(line, '|');
    if (parts.size() < 3) continue;
    Row row{parts[0], Number(parts[1]), Number(parts[2]), "", ""};
    if (parts.size() >= 5) {
      row.recompute = parts[3];
      row.passes = parts[4];
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string Format(const char* format, double a) {
  char text[64];
  std::snprintf(text, sizeof text, format, a);
  return text;
}

std::string Ms(double us) {
  return Format(us < 1e5 ? "%.2f ms" : "%.0f ms", us / 1e3);
}

std::string Bytes(double bytes) {
  const double size = std::fabs(bytes);
  if (size >= 1073741824.0) return Format("%.2f GiB", bytes / 1073741824.0);
  if (size >= 1048576.0) return Format("%.1f MiB", bytes / 1048576.0);
  return Format("%.0f KiB", bytes / 1024.0);
}

std::string Padded(std::string text, size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

// "12 % slower, 1.20 GiB less" beside the chosen one.
std::string Against(const Row& row, const Row& chosen) {
  const double percent = 100 * (row.us / std::max(chosen.us, 1e-9) - 1);
  std::string text = std::fabs(percent) < 0.05
                         ? "as fast"
                         : Format("%.1f %% ", std::fabs(percent)) + (percent > 0 ? "slower" : "faster");
  const double more = row.bytes - chosen.bytes;
  text += ", ";
  text += std::fabs(more) < 1024 ? "same memory" : Bytes(std::fabs(more)) + (more > 0 ? " more" : " less");
  return text;
}

std::string Line(const std::string& name, const Row& row, const std::string& remark) {
  return "  " + Padded(name, 56) + Padded(Ms(row.us), 13) + Padded(Bytes(row.bytes), 13) + remark + "\n";
}

size_t Count(std::string_view text, char c) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), c));
}

// The value of one option of `schedule(...)`; empty when it is not given.
std::string OptionOf(const std::string& passes, const std::string& name) {
  size_t at = passes.find(name + "=");
  if (at == std::string::npos) return {};
  at += name.size() + 1;
  return passes.substr(at, passes.find_first_of(",)", at) - at);
}

std::string Decisions(const Program& program, const Row& chosen) {
  std::string text;
  int64_t pending = 0, updates = 0;
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) {
      if (!program.op(id).name.starts_with("update.")) continue;
      ++updates;
      pending += IsPending(program.op(id)) ? 1 : 0;
    }
  }
  const bool repositioned = pending > 0;
  const std::string next_step =
      (pending == updates ? "of each unit"
                          : "of " + std::to_string(pending) + " of " + std::to_string(updates) + " units") +
      " in the next step, before its first use";
  if (!chosen.passes.starts_with("schedule")) {
    return "  the passes of a heuristic: " + (chosen.passes.empty() ? std::string("none") : chosen.passes) + "\n" +
           (repositioned ? "  optimizer step         " + next_step + "\n" : "");
  }
  const std::string keep = OptionOf(chosen.passes, "keep");
  const size_t kept = keep.empty() ? 0 : Count(keep, '+') + 1;
  text +=
      "  kept gathered          " + std::to_string(kept) + " of " + std::to_string(program.units.size()) + " units\n";
  for (auto [name, title, what] :
       {std::tuple{"forward", "gathers of forward     ", "steps ahead"},
        std::tuple{"backward", "gathers of backward    ", "steps ahead"},
        std::tuple{"reduce", "reductions             ", "later ones start before the wait"}}) {
    const std::string list = OptionOf(chosen.passes, name);
    if (list.empty()) continue;
    double least = 1e9, most = 0;
    size_t units = 0;
    for (const std::string& bucket : SplitLines(list, ';')) {
      units += Count(bucket, '+') + 1;
      const size_t colon = bucket.find(':');
      const std::string ahead = colon == std::string::npos ? "0" : bucket.substr(colon + 1);
      const double steps = ahead == "head" ? 1e6 : Number(ahead);
      least = std::min(least, steps);
      most = std::max(most, steps);
    }
    const bool starts = std::string_view(name) != "reduce";
    const auto show = [starts](double n) {
      return n < 1e6 ? Format("%.0f", n) : std::string(starts ? "as early as possible" : "all");
    };
    text += std::string("  ") + title + std::to_string(Count(list, ';') + 1) + " calls of " + std::to_string(units) +
            " units, " + show(least) + (most > least ? " to " + show(most) : "") + " " + what + "\n";
  }
  text += std::string("  optimizer step         ") +
          (repositioned                                                 ? next_step
           : chosen.passes.find(",overlap_update") != std::string::npos ? "of each unit when its gradient is complete"
                                                                        : "after the last micro-batch") +
          "\n";
  const std::string* recompute = program.Meta("recompute");
  text += "  recomputed             " + (recompute == nullptr ? std::string("nothing") : *recompute) + "\n";
  if (const std::string* offload = program.Meta("offload")) text += "  out of memory          " + *offload + "\n";
  if (const std::string* host = program.Meta("host_update")) text += "  steps on the host      " + *host + "\n";
  return text;
}

}  // namespace

Result<std::string> Explain(const Program& program) {
  const std::vector<Row> chosen_rows = Table(program, "search.chosen");
  if (chosen_rows.empty()) {
    return MakeError(
        "the program was not made by a search; run the pass search on it (after shard, accumulate and update)");
  }
  const Row& chosen = chosen_rows[0];
  const std::string* limit_text = program.Meta("search.limit");
  std::optional<double> limit;
  if (limit_text != nullptr && *limit_text != "none") limit = Number(*limit_text);
  const std::string* bound = program.Meta("search.bound_us");
  const std::string* evaluations = program.Meta("search.evaluations");
  std::string out = "step " + Ms(chosen.us) + ", peak " + Bytes(chosen.bytes) +
                    (limit ? " of " + Bytes(*limit) + " allowed" : "") + "\n";
  if (bound != nullptr && Number(*bound) > 0) {
    out += "no schedule is faster than " + Ms(Number(*bound)) + ": the gap is " +
           Format("%.1f", 100 * (chosen.us / Number(*bound) - 1)) + " %\n";
  }
  if (evaluations != nullptr) out += *evaluations + " schedules were simulated\n";
  out += "\ndecided (" + chosen.name + ")\n" + Decisions(program, chosen);
  const std::vector<Row> without = Table(program, "search.without");
  if (!without.empty()) {
    out += "\nwhat each decision is worth: the same schedule without it\n";
    for (const Row& row : without) out += Line(row.name, row, Against(row, chosen));
  }
  out += "\nrejected\n";
  for (const Row& row : Table(program, "search.heuristics")) {
    out += Line(row.name, row,
                limit && row.bytes > *limit ? "does not fit: " + Bytes(row.bytes - *limit) + " too much"
                                            : Against(row, chosen));
  }
  out += "\nmemory against time: the best that was found\n";
  const std::vector<Row> front = Table(program, "search.front");
  constexpr size_t kShown = 12;
  for (size_t i = 0; i < front.size(); ++i) {
    const bool is_chosen = front[i].us == chosen.us && front[i].bytes == chosen.bytes;
    const size_t every = (front.size() + kShown - 1) / kShown;
    if (!is_chosen && i % every != 0 && i + 1 != front.size()) continue;
    std::string remark = is_chosen                          ? "chosen"
                         : limit && front[i].bytes > *limit ? "does not fit"
                                                            : Against(front[i], chosen);
    out += Line(front[i].name, front[i], remark);
  }
  return out;
}

}  // namespace interlace
