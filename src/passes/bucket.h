// bucket.h — gathers and reductions of several units become one call each (SimpleFSDP 3.2.1 and 3.3).
//
//   before: gather.start(u0)  gather.start(u1)  ...  reduce.start(u1)  reduce.start(u0)
//   after:  gather.start(u0, u1)  ...                reduce.start(u1, u0)
//
// mode=manual, modules=a+b: a bucket is what one listed module owns, in forward, backward and reductions alike. A
// module is a path as in the names of parameters (model.layers.0); `*` stands for any one component, so model.layers.*
// makes each layer a bucket. What no listed module owns stays as it is. A tied parameter belongs to the first of its
// names that a listed module owns.
//
// mode=greedy: the paper's Algorithm 1. It takes the gathers of one part of a phase in order of use; gather i joins the
// open bucket m iff
//   forward:   T_AG(m + i) <= Tc               and Mc + Mc_i <= limit
//   backward:  T_RS(last) + T_AG(m + i) <= Tc  and Mc + Mc_i <= limit
//   Tc          compute of the bucket before m, during which m is gathered (so the first gather stays alone)
//   Mc_i, Mc    the largest op (operands, results, workspace) between the first use of i and that of the next gather;
//               the sum of these in m
//   T_RS(last)  time of reducing the gradients of the bucket before that one
// Reductions of units that were gathered together in the backward part are merged as well. time=faithful: T = alpha +
// beta * n, one latency and n bytes of the buffers at the rate of the links between nodes, or within one when there is
// only one; time=model: this repository's cost model, with topology and measured times.
//
// pack=flat: one coalesced call, no copies. pack=copy: one call on one buffer, with copies in and out
// (baselines/bucket_copies.h), as peers do it. Runs after shard and accumulate, before reorder. Errors: modules that
// match nothing or overlap, a unit of two modules, reductions that cannot wait for one another.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

Result<bool> Bucket(Program& program, const PassOptions& options);

}  // namespace interlace
