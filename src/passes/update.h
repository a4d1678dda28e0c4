// update.h — adds the phase `update`: the optimizer step of every unit that has a gradient, on its shard or on the
// whole.
//   before: group 0 adamw                      states u0.shard, u0.grad
//   after:  state %8: f32[512] u0.exp_avg persistent   (and exp_avg_sq; momentum for sgd)
//           phase update once takes () gives () {
//             %9: i64[68] = norm.partial(%grad, ...) {upd units=[u0,...]}       with clip=
//             %10: i64[68] = all_reduce.start(%9) {upd axis=dp}                 when every rank has a part only
//             all_reduce.wait(%10) {upd}
//             %11: f64[3] = norm.coef(%10) {upd max_norm=1.0 scale=0.5}
//             update.adamw(%shard, %grad, %8, %7, %11) {upd units=[u0] scale=0.5 ranges=[0,1000,0]}
//           }
// A program with the buffer "interlace.loss_scale" has gradients that are so many times too large: norm.coef takes it
// too. scale = 1 / (ranks * micro-batches) makes the mean of the summed gradients. After zero1 each rank updates its
// own part of u0.full and the parts are gathered in place. Runs after accumulate; a program without open symbols is
// scheduled then.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: clip=X|none (none), norm=auto|always (auto: only when clipping), momentum=true|false (true: sgd gets a
// buffer). Error: no units, an update phase already, a trainable parameter without a group, a unit with two kinds of
// optimizer.
Result<bool> Update(Program& program, const PassOptions& options = {});

}  // namespace interlace
