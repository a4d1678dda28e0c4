// baselines.h — what other systems could choose, as spaces of the same cost model, so that plans can be compared; and
// the steps from one to the next.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/tune.h"

namespace interlace::plan {

struct Baseline {
  std::string name, help;
  std::vector<Space> spaces;  // the best plan of any of them
};

// In the order of tables:
//   full       everything
//   paper      Mist, Table 2: no selective recomputation
//   artifact   Mist's artifact
//   megatron   a grid of data, tensor and pipeline parallel: equal stages, ZeRO-1, all blocks recomputed or none
//   deepspeed  one stage: ZeRO 0 to 3, each kind of state on the host or not, all blocks recomputed or none
//   aceso      uneven stages, recomputed blocks counted; no ZeRO, no offload; chosen as if nothing overlapped
// and for the steps between them:
//   parallel, full-ckpt, ckpt, zero, offload, all   Mist, Fig. 2, equal stages and ZeRO-1: no memory saved, all blocks
//                                                   recomputed, one thing tuned beside parallelism (zero and offload
//                                                   with all blocks recomputed), all of them
//   grid, grid+ckpt, grid+offload, grid+imbalance   Fig. 13: stages of equal devices, grown step by step; until the
//                                                   last step all micro-batches are taken to be alike
const std::vector<Baseline>& Baselines();
// Error: unknown name (did you mean).
Result<const Baseline*> FindBaseline(std::string_view name);

// `options.space` is not looked at.
Result<TuneResult> TuneBaseline(const Baseline& baseline, const LayerSource& layers, const ClusterSpec& cluster,
                                TuneOptions options);

}  // namespace interlace::plan
