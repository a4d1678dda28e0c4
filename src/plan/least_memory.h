// least_memory.h — the plan of a space that needs the least memory of a device: how far a limit is from any plan at
// all, and a plan to begin with where there is no time to search.
//
// The plans it looks at: every number of stages with equal devices and layers as equal as can be, every tensor-parallel
// degree, the smallest micro-batch, all ZeRO levels, each kind of offload at none or the most that is allowed, all
// blocks recomputed in one way or none. A plan of uneven stages may need a little less.
#pragma once

#include <cstdint>
#include <optional>

#include "base/result.h"
#include "plan/baselines.h"

namespace interlace::plan {

struct LeastMemory {
  Plan plan;
  int64_t device_bytes = 0;  // the largest peak of its stages
  int64_t host_bytes = 0;    // of a node
};

// Among equals in memory the fastest. nullopt: the batch has no micro-batch for any layout, or host memory is too
// small.
Result<std::optional<LeastMemory>> FindLeastMemory(const LayerSource& layers, const ClusterSpec& cluster,
                                                   const TuneOptions& options);
// Over the spaces of a baseline; `options.space` is not looked at.
Result<std::optional<LeastMemory>> LeastMemoryOf(const Baseline& baseline, const LayerSource& layers,
                                                 const ClusterSpec& cluster, TuneOptions options);

// The least batch from this one on that some accumulation, micro-batch and data parallelism of the baseline divide; 0:
// none soon.
int64_t DivisibleBatch(const Baseline& baseline, const LayerSource& layers, const ClusterSpec& cluster, int64_t batch);

}  // namespace interlace::plan
