#include "passes/explain.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>
#include <vector>

#include "base/append.h"
#include "base/scan.h"
#include "ir/op_table.h"
#include "ir/pending.h"
#include "passes/pass_table.h"
#include "passes/schedule.h"

namespace interlace {
namespace {

struct Row {
  std::string name;
  double us = 0;
  double bytes = 0;
  std::string passes;  // of the chosen one, on the sharded program
};

double Number(std::string_view text) {
  double number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

std::vector<Row> Table(const Program& program, std::string_view key) {
  std::vector<Row> rows;
  const std::string* text = program.Meta(key);
  if (text == nullptr || text->empty()) return rows;
  for (std::string_view line : Split(*text, '\n')) {
    const std::vector<std::string_view> parts = Split(line, '|');
    if (parts.size() < 3) continue;
    rows.push_back({std::string(parts[0]), Number(parts[1]), Number(parts[2]),
                    std::string(parts.size() < 5 ? std::string_view() : parts[4])});
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

// How the optimizer steps stand.
std::string Updates(const Program& program, bool overlaps) {
  int64_t pending = 0, updates = 0;
  ForEachOp(program, [&](const Op& op) {
    if (!IsUpdate(op)) return;
    ++updates;
    pending += IsPending(op) ? 1 : 0;
  });
  if (pending == 0) return overlaps ? "of each unit when its gradient is complete" : "after the last micro-batch";
  const std::string of = pending == updates ? "of each unit" : Joined("of ", pending, " of ", updates, " units");
  return of + " in the next step, before its first use";
}

// "12 calls of 30 units, 0 to 3 steps ahead"
std::string Calls(const std::vector<Schedule::Bucket>& buckets, const char* at_once) {
  int32_t least = Schedule::kAtOnce, most = 0;
  size_t units = 0;
  for (const Schedule::Bucket& bucket : buckets) {
    units += bucket.units.size();
    least = std::min(least, bucket.ahead);
    most = std::max(most, bucket.ahead);
  }
  const auto show = [&](int32_t n) { return n < Schedule::kAtOnce ? std::to_string(n) : std::string(at_once); };
  return Joined(buckets.size(), " calls of ", units, " units, ", show(least), most > least ? " to " + show(most) : "");
}

std::string DecisionsText(const Program& program, const Row& chosen) {
  std::string text;
  const auto line = [&](const std::string& title, const std::string& what) {
    text += "  " + Padded(title, 23) + what + "\n";
  };
  const Result<std::vector<PassCall>> calls = ParsePipeline(chosen.passes);
  const bool scheduled = calls.ok() && !calls->empty() && calls->front().pass->name == "schedule";
  const bool overlaps = calls.ok() && std::any_of(calls->begin(), calls->end(), [](const PassCall& call) {
                          return call.pass->name == "overlap_update";
                        });
  const Result<Schedule> schedule =
      scheduled ? ReadSchedule(program, calls->front().options) : Result<Schedule>(Schedule{});
  if (!scheduled || !schedule.ok()) {
    text = "  the passes of a heuristic: " + (chosen.passes.empty() ? std::string("none") : chosen.passes) + "\n";
    if (!PendingOps(program).empty()) line("optimizer step", Updates(program, overlaps));
    return text;
  }
  line("kept gathered", Joined(schedule->keep.size(), " of ", program.units.size(), " units"));
  for (auto [title, list] :
       {std::pair{"gathers of forward", &schedule->forward}, std::pair{"gathers of backward", &schedule->backward}}) {
    if (!list->empty()) line(title, Calls(*list, "as early as possible") + " steps ahead");
  }
  if (!schedule->reduce.empty())
    line("reductions", Calls(schedule->reduce, "all") + " later ones start before the wait");
  line("optimizer step", Updates(program, overlaps));
  const std::string* recompute = program.Meta("recompute");
  line("recomputed", recompute == nullptr ? std::string("nothing") : *recompute);
  if (const std::string* offload = program.Meta("offload")) line("out of memory", *offload);
  if (const std::string* host = program.Meta("host_update")) line("steps on the host", *host);
  return text;
}

// How pass tensor found its plan: whole plans in the simulator, and each weight held otherwise, by the estimate.
std::string TensorText(const Program& program) {
  std::string notes;
  if (const std::string* told = program.Meta("tensor.notes")) {
    for (std::string_view note : Split(*told, '\n')) notes += "  " + std::string(note) + "\n";
    notes = "\nnot cut over the ranks\n" + notes;
  }
  const std::vector<Row> judged = Table(program, "tensor.judged");
  if (judged.empty()) return notes.empty() ? notes : notes.substr(1);
  const std::string* estimates = program.Meta("tensor.estimates");
  std::string out = "tensor parallelism";
  if (estimates != nullptr) out += ": " + *estimates + " ways to cut the weights were estimated, the best simulated";
  out += "\n";
  for (size_t i = 0; i < judged.size(); ++i)
    out += Line(judged[i].name, judged[i], i == 0 ? "chosen" : Against(judged[i], judged[0]));
  const std::string* reasons = program.Meta("tensor.reasons");
  if (reasons == nullptr || reasons->empty()) return out + notes;
  out += "\nhow each weight is held: whole, or cut along a dimension; and the step if it were held otherwise\n";
  for (std::string_view line : Split(*reasons, '\n')) {
    const std::vector<std::string_view> parts = Split(line, '|');
    if (parts.size() < 3) continue;
    const double chosen = Number(parts[2]);
    out += "  " + Padded(std::string(parts[0]), 56) + Padded(std::string(parts[1]), 13);
    for (size_t i = 3; i < parts.size(); ++i) {
      const size_t equals = parts[i].find('=');
      out += (i > 3 ? ", " : "") + std::string(parts[i].substr(0, equals)) + " " +
             Format("%+.1f %%", 100 * (Number(parts[i].substr(equals + 1)) / std::max(chosen, 1e-9) - 1));
    }
    out += "\n";
  }
  return out + notes;
}

}  // namespace

Result<std::string> Explain(const Program& program) {
  const std::string tensor = TensorText(program);
  const std::vector<Row> chosen_rows = Table(program, "search.chosen");
  if (chosen_rows.empty() && !tensor.empty()) return tensor;
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
  out += "\ndecided (" + chosen.name + ")\n" + DecisionsText(program, chosen);
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
  if (!tensor.empty()) out += "\n" + tensor;
  return out;
}

}  // namespace interlace
