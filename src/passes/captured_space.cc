#include "passes/captured_space.h"

#include <algorithm>
#include <set>

#include "passes/search_space.h"

namespace interlace {
namespace {

using Recompute = CapturedDecisions::Recompute;

// The first `count` blocks.
CapturedDecisions RecomputationOf(const std::vector<std::string>& blocks, size_t count) {
  const auto end = blocks.begin() + static_cast<ptrdiff_t>(count);
  return {Recompute::kBlocks, std::vector<std::string>(blocks.begin(), end), blocks.size(), 1};
}

}  // namespace

std::vector<CapturedDecisions> CapturedSpace(const Program& captured, const Program& sharded, bool recompute,
                                             bool breadth_first) {
  std::vector<CapturedDecisions> all = {{}};
  const std::vector<std::string> blocks = BlocksOf(captured);
  if (recompute && !blocks.empty() && captured.Meta("recompute") == nullptr) {
    all.push_back({Recompute::kSelective, {}, 0, 1});
    std::set<size_t> counts;
    for (size_t quarter : {1, 2, 3, 4}) counts.insert(std::max<size_t>(blocks.size() * quarter / 4, 1));
    for (size_t count : counts) all.push_back(RecomputationOf(blocks, count));
  }
  if (!breadth_first || sharded.accumulate_mode != "reduce_last" || sharded.width != 1) return all;
  const size_t recomputations = all.size();
  for (int64_t width : {2, 4}) {
    if (sharded.accumulation % width != 0) continue;
    std::vector<size_t> with = {0};
    if (width == 2 && recomputations > 1) with = {0, 1, recomputations - 1};
    for (size_t i : with) {
      all.push_back(all[i]);
      all.back().width = width;
    }
  }
  return all;
}

std::vector<CapturedDecisions> NeighboursOf(const Program& captured, const CapturedDecisions& chosen,
                                            const std::vector<CapturedDecisions>& all) {
  std::vector<CapturedDecisions> out;
  if (chosen.recompute == Recompute::kSelective || chosen.width > 1) return out;
  const std::vector<std::string> blocks = BlocksOf(captured);
  const size_t step = std::max<size_t>(blocks.size() / 8, 1), count = chosen.blocks.size();
  for (size_t next : {count >= step ? count - step : 0, count + step}) {
    if (next == 0 || next > blocks.size()) continue;
    CapturedDecisions variant = RecomputationOf(blocks, next);
    if (std::find(all.begin(), all.end(), variant) == all.end()) out.push_back(std::move(variant));
  }
  return out;
}

}  // namespace interlace
