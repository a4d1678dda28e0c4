// plan.h — which dimension of which parameter is cut: a plan's text.
//
//   model.layers.*.self_attn.q_proj.weight 0                 PATTERN DIM [blocks N]; * stands for anything but a dot
//   model.layers.*.self_attn.o_proj.weight 1
//   transformer.h.*.attn.c_attn.weight 1 blocks 3            fused q, k, v: each third is cut
//
// Entries are separated by ";" or line ends, "#" begins a comment. A parameter that no entry names is whole.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace::tensor {

struct PlanEntry {
  std::string pattern;
  int64_t dim = 0, blocks = 1;
};

// Error: a line that is no entry, with its number; a parameter that two entries cut along different dimensions.
Result<std::vector<PlanEntry>> ReadPlan(std::string_view text);
// The text that reads back: entries separated by "; ".
std::string PrintPlan(const std::vector<PlanEntry>& plan);
bool Matches(std::string_view pattern, std::string_view name);
// Why a dimension is not cut so, and what could be done: "dimension 0 of 'lm_head.weight', 50257 in 1 block, cannot be
// cut into 2 equal parts; 50258 could, and 50257 into 29".
std::string DoesNotDivide(std::string_view name, int64_t dim, int64_t size, int64_t blocks, int64_t ranks);
// The entry for a parameter, by any of its names; nullptr: none. Error: tied names that are cut in two ways.
Result<const PlanEntry*> EntryOf(const std::vector<PlanEntry>& plan, const Param& param);


// Meta line: parameters of several stages, where these cut products over other numbers of ranks (pass `borders`).
inline constexpr std::string_view kStagesWhole = "stages.whole";
bool StaysWhole(const Program& program, const Param& param);

}  // namespace interlace::tensor
