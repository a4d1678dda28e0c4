// standard_pipeline.h — the passes that make a training step of a captured program, in the order they must have. What
// a search or a user adds goes between them or behind them (docs/passes.md).
//
//   canonicalize,precision(param=bf16,reduce=bf16),shard(axis=dp,ranks=2),accumulate(...),update(clip=1.0,...)
//   canonicalize,mesh(axes=dp:2+tp:2),tensor(axis=tp,plan=auto,sequence=true),shard(axis=dp,ranks=2),update(...)
//   canonicalize,mesh(axes=pp:2+dp:2),pipeline(axis=pp,stage=0,at=auto,...),shard(axis=dp),...,order(schedule=1f1b)
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "passes/pipeline.h"

namespace interlace {

struct StandardOptions {
  std::string strategy = "shard";                                   // or replicate, zero1
  std::vector<std::pair<std::string, int64_t>> mesh = {{"dp", 1}};  // axes by name and size, the last varies fastest
  std::string shard_axis = "dp";                                    // all others but the tensor axis replicate
  std::string tensor_axis;                                          // along which products are cut; empty: none are
  std::string tensor_plan = "auto";                                 // or model: as the program says
  bool sequence = true;                                             // what lies between the products is cut, too
  std::string stage_axis;                                           // of the stages of a pipeline; empty: none
  int64_t stage = 0;                                                // whose program it becomes
  std::string stages_at = "auto";                                   // where they begin: pass `pipeline`
  std::string stage_order = "1f1b";                                 // what they run when: pass `order`
  int64_t stage_chunks = 1;                                         // stages of each rank
  std::vector<int64_t> stage_ranks = {};                            // ranks of each stage, where they differ; the axis
                                                                    // then has all, the others are of one stage
  std::vector<int64_t> stage_data = {};                             // and of them those with batches of their own
  int64_t accumulation = 1;                                         // micro-batches of a step
  std::string accumulate_mode = "reduce_each";
  std::string param = "none", reduce = "none";  // dtypes that parameters are gathered and gradients reduced in
  std::optional<double> clip;                   // largest norm of the gradient
  bool norm = false;                            // computed although nothing is clipped
  bool momentum = true;                         // sgd has a buffer
};

// Error: a mesh without the shard axis or the tensor axis, one axis as both, a value that a pass refuses.
Result<std::vector<PassCall>> StandardPipeline(const StandardOptions& options);

}  // namespace interlace
