// captured_layers.h — the costs of a model's layers from their captured programs (model_text.h): a LayerSource.
//
// Each role has three programs: as captured, with its selective recomputation and with its full one
// (passes/recompute.cc), each also cut for tensor parallelism (tensor_parallel.h). Memory is evaluated from expressions
// (layer_memory.h); times are the kernel and collective models' on bound sizes. Costs are kept per (role, micro-batch,
// tp), so a search may ask as often as it likes, from any thread.
#pragma once

#include <memory>
#include <string_view>

#include "base/result.h"
#include "cost/cluster.h"
#include "plan/layer_cost.h"

namespace interlace::plan {

// The layers of a model text at one sequence length on a cluster. Error: a text that cannot be read, a sequence that
// the model does not take.
Result<std::unique_ptr<LayerSource>> ReadLayers(std::string_view model_text, std::string_view file,
                                                const ClusterSpec& cluster, int64_t sequence);

}  // namespace interlace::plan
