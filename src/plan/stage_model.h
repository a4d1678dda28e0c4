// stage_model.h — time and memory of one pipeline stage under a strategy, and the best strategies of a stage.
//
// Time: Mist's overlap-centric template (5.1, Fig. 7). A micro-batch is a forward and a backward; the first forward
// also updates each layer just before it runs, the last backward also reduces. Beside a layer's compute run the weights
// of the next layer coming in and being gathered, the gradients of the previous one being reduced, and copies of both:
//
//   phase               device-device                            host to device        device to host
//   forward, first      gather if ZeRO >= 1                      in(O) + in(G)         out(O) + out(W) + out(act)
//   forward, others     gather if ZeRO 3                         in(W)                 out(act)
//   backward, others    gather if ZeRO 3, scatter if ZeRO >= 2   in(W)+in(G)+in(act)   out(G)
//   backward, last      gather if ZeRO 3, scatter or all-reduce  in(W)+in(G)+in(act)   out(G)
//
// The layer that opens a phase has nothing before it, so its gather and copies in are exposed; so are the copies out
// and the reduction of the layer that closes one. Everything else overlaps by the cluster's interference factors
// (Mist, Algorithm 1), all blocks of a stage together (recomputed blocks are spread evenly among kept ones), embedding
// and head each with their own compute. An embedding needs no weights in backward. Collectives of tensor parallelism
// are on the critical path: nothing hides them.
//
// Memory: weights, gradients and states by shard and offload ratios, buffers of two neighbouring layers for what is
// gathered or comes from the host, p micro-batches of saved activations, the layer's own peak, and a buffer to each
// neighbour stage.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "cost/cluster.h"
#include "plan/layer_cost.h"
#include "plan/strategy.h"

namespace interlace::plan {

// What a stage may use and choose. Defaults: the full space.
struct StageOptions {
  int64_t global_batch = 1;
  int64_t device_bytes = 0;                                  // of a device, after reserve and margin
  int64_t host_bytes = std::numeric_limits<int64_t>::max();  // of a node, for all its devices together
  int32_t weight_bytes = 2, gradient_bytes = 2,
          state_bytes = 12;                             // a parameter: bf16, bf16, fp32 master and two moments
  bool overlap = true;                                  // false: what would overlap is added up
  std::array<bool, 4> zero = {true, true, true, true};  // allowed levels; 0 whenever dp is 1
  bool selective = true, full = true;                   // allowed recomputation
  bool uniform_recompute = false;                       // all blocks alike
  bool only_full = false;                               // every block recomputed wholly
  bool weights_out = true, gradients_out = true, states_out = true, activations_out = true;
  std::vector<int32_t> micro_batches = {};    // allowed b; empty: any that divides
  std::vector<int32_t> tensor_parallel = {};  // allowed tp; empty: any that divides
  std::vector<float> ratios = {};             // allowed offload ratios; empty: any, traced
  bool as_run = false;  // memory and transfers as this runtime has them (run_layer.h), not the template's; with tensor
                        // parallel the template's
  int32_t weights = 0;  // 0: the whole Pareto set; else what so many weights of t against d choose (Mist, equation 4)

  // What the runtime plans to leave memory, it plans for whole models that nobody shares.
  bool offloads(bool whole, int32_t tp) const { return !as_run || (whole && tp == 1); }

  static StageOptions Paper();     // Mist's Table 2: full recomputation only
  static StageOptions Artifact();  // its artifact: b in {1, 2, 4}, ZeRO 1 to 3, seven ratios, 30 weights
};

// Where the bytes and the time of a strategy go; `peak` and `us` add up to the larger peak and to the phases' times.
struct Explanation {
  struct Bytes {
    std::string name;
    int64_t device = 0, host = 0;
  };
  struct Phase {
    std::string name;
    // Alone: compute, device-device, host to device, device to host; what tensor parallelism adds; exposed at the ends.
    std::array<double, 4> alone_us{};
    double tensor_parallel_us = 0, exposed_us = 0, total_us = 0;
  };
  std::vector<Bytes> bytes;
  bool peak_in_forward = false;
  std::array<Phase, 4> phases;  // first forward, forward, backward, last backward
};

class StageModel {
 public:
  // Layer costs of every (b, dp, tp) that the options and the cluster allow. Error: nothing is allowed; a batch that no
  // b and dp divide; a layer's cost that cannot be had.
  static Result<StageModel> Create(const LayerSource& layers, const ClusterSpec& cluster, const StageOptions& options);
  StageModel(StageModel&&) noexcept;
  StageModel& operator=(StageModel&&) noexcept;
  ~StageModel();
  struct State;  // stage_parts.h
  const State& state() const { return *state_; }

  const StageOptions& options() const;

  // Error: a strategy outside what Create prepared, more recomputed blocks than blocks, a ratio outside 0 to 1.
  Status Check(const Strategy& strategy) const;
  // For a strategy that passes Check.
  StageCost CostOf(const Strategy& strategy) const;
  PassTimes PassesOf(const Strategy& strategy) const;
  Explanation Explain(const Strategy& strategy) const;

  // The strategies that no other beats in both t and t + d. The step's time, (G-1) max t + max_i (t_i + d_i + sum of
  // later t), grows with both and with nothing else, so this part of the Pareto set of (t, d) loses no plan. Empty:
  // nothing fits. Points with t above `longest_us` are left out (and cost no time to find).
  Frontier FrontierOf(const StageKey& key, double longest_us = std::numeric_limits<double>::infinity()) const;
  // Least t and least t + d of what may fit in a key with 1, 2, ... layers, as if nothing needed to be offloaded or
  // recomputed (but where the space always recomputes); infinite where nothing can fit.
  struct Bound {
    double stable_us = std::numeric_limits<double>::infinity(), total_us = std::numeric_limits<double>::infinity();
  };
  void BoundsOf(const StageKey& key, std::span<Bound> bounds) const;

 private:
  explicit StageModel(std::unique_ptr<const State> state);
  std::unique_ptr<const State> state_;
};

}  // namespace interlace::plan
