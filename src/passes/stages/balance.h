// balance.h — where a model is cut into stages: in front of the first use of a parameter, which names the border, so
// that other programs of the same model (for other shapes, for evaluation) are cut at the same place.
//
//   h.0.ln_1.weight  h.0.attn.weight ... | h.1.ln_1.weight ...       border "h.1.ln_1.weight"
//
// Between the uses of two parameters the position that sends the fewest bytes is taken. The slowest stage is made as
// fast as it can be (exactly, by dynamic programming over the borders); of choices within a fiftieth of that, the one
// whose messages are the fewest bytes. Of stages dealt as a V (deal.h) it is then the slowest rank that counts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cost/cost_model.h"
#include "passes/stages/deal.h"
#include "passes/stages/flow.h"

namespace interlace::stages {

// Of an op alone, in picoseconds.
inline int64_t TimeOf(const OpCost& cost) {
  return cost.latency_ps + cost.work_ps + cost.issue_ps + cost.finish_ps;
}

struct Border {
  std::string param;     // whose first use is the first behind it
  int32_t position = 0;  // in front of this forward op
  double bytes = 0;      // that cross it forward
  double back = 0;       // of gradients
};

// All that a program offers, by position; with `frozen`, in front of frozen parameters, too.
std::vector<Border> BordersOf(const Program& program, const Flow& flow, bool frozen);
// Those in front of these parameters, or of the first parameter of these modules. Error: no such name, or not in order.
Result<std::vector<Border>> NamedBorders(const std::vector<Border>& all, const std::vector<std::string>& names);
// One fewer than stages, balanced, that no recomputation and no buffer that is changed spans (Flow::Fits). Error: fewer borders than that.
Result<std::vector<Border>> BalancedBorders(const std::vector<Border>& offered, const Flow& flow, CostModel& model,
                                            const std::string& axis, const Deal& deal);
// As a pass is told where stages begin: auto, model (the program's meta line "stages"), or
// names joined by +. Error: what the two above say, another number of names.
Result<std::vector<Border>> ChosenBorders(const Program& program, const Flow& flow, std::string at, const Deal& deal,
                                          CostModel& model, const std::string& axis);
// By op: the stage it belongs to, as pass `borders` has noted or else by the borders; -1: any (Flow::Repeats).
std::vector<int32_t> StagesOf(const Flow& flow, const std::vector<Border>& borders);
inline constexpr std::string_view kStage = "stage";  // attribute of an op: what pass `borders` notes

}  // namespace interlace::stages
