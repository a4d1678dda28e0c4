// apply.h — a plan carried out on a captured program.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/tensor/cutter.h"
#include "passes/tensor/plan.h"

namespace interlace::tensor {

struct Applied {
  std::vector<std::string> kept_whole;        // weights that the plan cuts and the ranks do not divide, and what would
  std::map<std::string, int64_t> made_whole;  // bytes gathered for operators without a rule, by operator
  std::vector<std::string> opaque;            // modules that every rank runs whole
};

// `strict`: a weight that cannot be cut as the plan says is an error, else it stays whole. The program is to be
// compacted after it. Error: of the plan, an entry that names no parameter, and what the cutter says.
Result<Applied> ApplyPlan(Program& program, const std::vector<PlanEntry>& plan, const CutterOptions& options,
                          bool strict);

// For people, a line each: what stays whole and why.
std::vector<std::string> NotesOf(const Applied& applied);

}  // namespace interlace::tensor
