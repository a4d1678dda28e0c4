// forward_only.h — what the outputs need and nothing else: the program that evaluates a model on the parameters of a
// training run.
//
//   micro_batch: gather u0  fwd  release u0  gather u1  fwd  output(%loss)  bwd  reduce ..    update: update(u0) ..
//   ->           gather u0  fwd  release u0  gather u1  fwd  output(%loss)  release u1        update:
//
// Units and states that last stay declared, so the program runs on the memory of the one that trains; those of one step
// go. Buffers do not change. Runs after `update`, before the schedule passes.
//
// Option: out=u0.exp_avg+u3.exp_avg (or all): these states, as far as nothing here uses them, lie in the tier, as they
// may between steps of the program that trains. Errors: several micro-batch phases, values that are under way between
// steps, no such state.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

Result<bool> ForwardOnly(Program& program, const PassOptions& options = {});

}  // namespace interlace
