// run_layer.h — what one kind of layer takes of a device when this runtime trains it, counted on the program that the
// trainer's own passes make of the layer: replicate, zero1 or shard, then accumulate. Inside the room only.
//
// Mist's template moves whole layers and has buffers of two of them; the runtime moves parameters one by one. So beside
// the layer's own values live, by op: the flat gradient that is being made, the one before it that is being reduced,
// what that reduction receives into, and under ZeRO 3 the parameters in use and those of the next step. Two of these
// cross from layer to layer:
//
//   forward    ... last step of layer i ──┬─ first step of layer i+1 ...    its parameters are gathered a step ahead
//   backward   ... last gradient of i+1 ──┴─ first gradient of layer i ...  its reduction is waited for a gradient later
#pragma once

#include <array>

#include "base/result.h"
#include "ir/program.h"
#include "plan/layer_cost.h"
#include "plan/layer_memory.h"

namespace interlace::plan {

// One way of recomputing a layer of one role under one way of training.
struct RunLayer {
  // Candidates of the peak, by what of a neighbour is alive beside them. kGathering: the first step of the layer that
  // runs next; kReducing (backward only): the last gradient of the layer that ran before.
  enum Beside { kNothing = 0, kGathering = 1, kReducing = 2, kBoth = 3 };
  std::array<Candidates, 2> forward;
  std::array<Candidates, 4> backward;
  int64_t first_forward = 0, first_backward = 0;  // bytes that the layer's own first step gathers
  int64_t last_reduced = 0;                       // bytes that its last reduction holds
  DimTable dims;                                  // of the candidates

  // The largest candidate of a part with these bytes of neighbours. Error: an unbound symbol, 64 bits.
  Result<int64_t> Forward(const Binding& binding, int64_t gathering) const;
  Result<int64_t> Backward(const Binding& binding, int64_t gathering, int64_t reducing) const;
};

// Elements that a rank holds of a layer between its ops, padding of units included.
struct RunHolds {
  int64_t weights = 0, gradients = 0, states = 0, units = 0;
};

// `layer`: captured, canonical, recomputed already. `tied`: the parameter of embedding and head whose gradient is
// complete in the embedding's backward only, or "". Error: what the passes say of it.
Result<RunLayer> RunLayerOf(const Program& layer, Role role, const RunSetting& setting, const std::string& tied);
Result<RunHolds> RunHoldsOf(const Program& layer, Role role, const RunSetting& setting, const std::string& tied);

}  // namespace interlace::plan
