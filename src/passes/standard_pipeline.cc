#include "passes/standard_pipeline.h"

#include <algorithm>
#include <charconv>

#include "passes/pass_table.h"

namespace interlace {
namespace {

// The shortest decimal that reads back, always with a point: 1.0.
std::string Decimal(double number) {
  char buffer[32];
  const auto [end, problem] = std::to_chars(buffer, buffer + sizeof(buffer), number);
  std::string text(buffer, end);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

// "shard(axis=dp,ranks=2)", or on a mesh of several axes, which is declared before: "shard(axis=dp,replicas=replica,
// states=auto)", whose optimizer states all data ranks share, too; not where gradients travel narrower than the
// parameters that would be gathered then. What zero1 shards is used once a step, so all data ranks share it:
// "zero1(axis=replica+dp)".
Result<std::string> Strategy(const StandardOptions& options) {
  std::string replicas, data;
  const std::pair<std::string, int64_t>* shards = nullptr;
  size_t count = 0, first = 0, last = 0;  // of the data axes
  for (size_t i = 0; i < options.mesh.size(); ++i) {
    const std::string& axis = options.mesh[i].first;
    if (axis == options.tensor_axis || axis == options.stage_axis) continue;
    first = count++ == 0 ? i : first, last = i;
    data += (data.empty() ? "" : "+") + axis;
    if (axis == options.shard_axis) {
      shards = &options.mesh[i];
    } else {
      replicas += (replicas.empty() ? "" : "+") + axis;
    }
  }
  if (shards == nullptr)
    return MakeError("the mesh has no axis ", options.shard_axis, " to ", options.strategy, " over");
  if (options.strategy == "zero1" && count > 1 && last - first + 1 == count) return "zero1(axis=" + data + ")";
  return options.strategy + "(axis=" + options.shard_axis +
         (replicas.empty() ? ",ranks=" + std::to_string(shards->second) : ",replicas=" + replicas) +
         (options.strategy == "shard" && !replicas.empty() && options.reduce == "none" ? ",states=auto)" : ")");
}

// Ranks along an axis that is there to `what`; 1 for none.
Result<int64_t> RanksTo(const StandardOptions& options, const std::string& axis, const char* what) {
  if (axis.empty()) return 1;
  if (axis == options.shard_axis) return MakeError("axis ", axis, " cannot both ", options.strategy, " and ", what);
  for (const auto& [name, size] : options.mesh) {
    if (name == axis) return size;
  }
  return MakeError("the mesh has no axis ", axis, " to ", what);
}

std::string Joined(const std::vector<int64_t>& numbers) {
  std::string out;
  for (const int64_t number : numbers) out += (out.empty() ? "" : "+") + std::to_string(number);
  return out;
}

}  // namespace

Result<std::vector<PassCall>> StandardPipeline(const StandardOptions& options) {
  INTERLACE_ASSIGN(const std::string strategy, Strategy(options));
  std::vector<std::string> passes;
  // First, because all others tell memory by roots: a cast, a use or a gradient that hides behind a repeated op or a
  // view of a view would be missed.
  passes.push_back("canonicalize");
  // Before the passes that lay something along its axes, because they take their sizes from it; a single axis needs
  // none.
  if (options.mesh.size() > 1) {
    std::string axes;
    for (const auto& [name, size] : options.mesh) axes += (axes.empty() ? "" : "+") + name + ":" + std::to_string(size);
    if (!options.stage_ranks.empty())
      axes += ",stages=" + Joined(options.stage_ranks) + ",stage=" + std::to_string(options.stage);
    passes.push_back("mesh(axes=" + axes + ")");
  }
  INTERLACE_ASSIGN(int64_t parts, RanksTo(options, options.tensor_axis, "cut products"));
  INTERLACE_ASSIGN(const int64_t stages, RanksTo(options, options.stage_axis, "deal stages over"));
  for (size_t s = 0; s < options.stage_data.size(); ++s)
    parts = std::max(parts, options.stage_ranks[s] / options.stage_data[s]);
  // Before products are cut, because the programs of stages with unlike ranks must agree on what they exchange.
  if (parts > 1 && !options.stage_data.empty()) {
    passes.push_back("borders(axis=" + options.stage_axis + ",at=" + options.stages_at +
                     ",chunks=" + std::to_string(options.stage_chunks) + ",data=" + Joined(options.stage_data) + ")");
  }
  // At the captured level, where a parameter is one value: what comes after sees the parts of this rank as its
  // parameters.
  if (parts > 1) {
    passes.push_back("tensor(axis=" + options.tensor_axis + ",plan=" + options.tensor_plan +
                     ",sequence=" + (options.sequence ? "true" : "false") + ")");
    // What it adds are views of views; then there is something to travel while something else is computed.
    passes.push_back("canonicalize");
    if (stages == 1) passes.push_back("overlap");
  }
  // Before the strategy, because it says at the captured level which casts are made on shards and in which dtype a
  // gradient is handed over; the strategy turns that into narrow gathers and reductions.
  if (options.param != "none" || options.reduce != "none")
    passes.push_back("precision(param=" + options.param + ",reduce=" + options.reduce + ")");
  // Between what works on the whole model and the strategy, which makes units of the stage's own parameters.
  if (stages > 1) {
    const bool v = options.stage_order == "v";
    const bool chooses = options.stage_order == "auto" && options.stage_ranks.empty();
    passes.push_back("pipeline(axis=" + options.stage_axis + ",stage=" + std::to_string(options.stage) +
                     ",at=" + options.stages_at + ",chunks=" + std::to_string(v ? 2 : options.stage_chunks) + ",deal=" +
                     (v         ? "v"
                      : chooses ? "auto,gathers=auto"
                                : "turns") +
                     (options.stage_order == "auto" ? ",micro_batches=" + std::to_string(options.accumulation) : "") +
                     ",backward=" +
                     (options.stage_order == "zero_bubble" || options.stage_order == "auto" || v ? "split" : "whole") +
                     (options.stage_ranks.empty() ? "" : ",data=" + Joined(options.stage_data)) + ")");
  }
  // Before accumulation, because each variant of the micro-batch has transfers of its own, and which gradients are
  // added up where is known only when they have a place in a unit.
  passes.push_back(strategy);
  // Before the update, because the mean is over ranks and micro-batches.
  if (options.accumulation > 1) {
    passes.push_back("accumulate(steps=" + std::to_string(options.accumulation) + ",mode=" + options.accumulate_mode +
                     ")");
  }
  // Last, because it closes the step: states get their optimizer's companions, and without open sizes the program is
  // scheduled, which all that moves transfers, updates and storages starts from.
  passes.push_back("update(clip=" + (options.clip ? Decimal(*options.clip) : "none") + ",norm=" +
                   (options.norm ? "always" : "auto") + ",momentum=" + (options.momentum ? "true" : "false") + ")");
  // Behind everything that has phases of its own for the first and the last micro-batch.
  if (stages > 1) passes.push_back("order(schedule=" + options.stage_order + ")");
  std::string text;
  for (const std::string& pass : passes) text += (text.empty() ? "" : ",") + pass;
  return ParsePipeline(text);  // which checks every value by the table
}

}  // namespace interlace
