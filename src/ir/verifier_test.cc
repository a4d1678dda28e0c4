// Each case is a valid program with a few replacements; what the verifier says about all of them is one golden file,
// read in review: tests/golden/ir_verifier_errors.txt.
#include "ir/verifier.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "ir/testing/golden.h"
#include "ir/text.h"

namespace interlace {
namespace {

constexpr char kCaptured[] = R"(interlace 1 captured
step 1 reduce_each
group 0 adamw
module 0 "" "Net"
param %0: f32[4,8] "w" trainable group 0
param %1: f32[4] "frozen" frozen
buffer %2: f32[4] "stats" persistent
input %3: f32[2,8] "x"
const %4: f32[2] "c" = [1.0, 2]
phase micro_batch takes () gives () {
  %10: f32[8,4]{1,8} in %0+0 = aten.t(%0) {fwd m0}
  %11: f32[2,4] = aten.mm(%3, %10) {fwd m0}
  %12: f32[2,4] = aten.add.Tensor(%11, %1) {fwd}
  %13: f32[4] = aten.sum.dim_IntList(%12, [0]) {fwd}
  assign(%2, %13) {fwd}
  %14: f32[] = aten.sum(%12) {fwd}
  output(%14) {fwd name="loss"}
  %15: f32[4,8] = aten.ones_like(%0) {bwd}
  grad(%0, %15) {bwd}
}
)";

constexpr char kSharded[] = R"(interlace 1 sharded
mesh dp 2
step 1 reduce_each
group 0 adamw
unit u0 dp f32 numel 128 shard 64
unit u1 dp f32 numel 64 shard 32
param %0: f32[6,10] "w" trainable group 0 unit u0+0
param %1: f32[40] "v" trainable group 0 unit u0+64
param %2: f32[10] "r" trainable group 0 unit u1+0
input %3: f32[6,10] "x"
state %4: f32[64] u0.shard persistent
state %5: f32[64] u0.exp_avg persistent
state %6: f32[64] u0.exp_avg_sq persistent
state %7: f32[64] u0.grad step
state %8: f32[64] u1.full persistent
phase micro_batch takes () gives () {
  %10: f32[128] = gather.start(%4) {fwd units=[u0]}
  %11: f32[6,10] = aten.neg(%3) {fwd}
  gather.wait(%10) {fwd}
  %12: f32[6,10] in %10+0 = view(%10) {fwd}
  %13: f32[6,10] = aten.mul.Tensor(%12, %11) {fwd}
  release(%10) {fwd}
  %14: f32[] = aten.sum(%13) {fwd}
  output(%14) {fwd name="loss"}
  %15: f32[128] = grad.begin() {bwd units=[u0] zero=true}
  %16: f32[6,10] into %15+0 = aten.mul.Tensor(%11, 2.0) {bwd}
  %17: f32[64] into %7+0 = reduce.start(%15) {bwd units=[u0]}
  reduce.wait(%17) {bwd}
  %18: f32[10] in %8+0 = view(%8) {bwd}
  %19: f32[32] in %8+32*rank_dp = view(%8) {bwd}
  %20: f32[64] into %8+0 = gather.start(%19) {bwd units=[u1]}
  gather.wait(%20) {bwd}
}
phase update once takes () gives () {
  %30: i64[68] = norm.partial(%7) {upd units=[u0]}
  %31: i64[68] = all_reduce.start(%30) {upd axis=dp}
  all_reduce.wait(%31) {upd}
  %32: f64[3] = norm.coef(%31) {upd max_norm=1.0 scale=0.5}
  update.adamw(%4, %7, %5, %6, %32) {upd units=[u0] scale=0.5 ranges=[0, 60, 0, 64, 104, 0]}
}
)";

// Three micro-batches; the weights gathered at the end of one phase are waited for in the next.
constexpr char kPhases[] = R"(interlace 1 sharded
mesh dp 2
step 3 reduce_each
run micro_batch.first 0
run micro_batch.middle 1
run micro_batch.last 2
run update
unit u0 dp f32 numel 64 shard 32
param %0: f32[64] "w" frozen unit u0+0
state %1: f32[32] u0.shard persistent
phase micro_batch.first takes (%10: f32[64]) gives (%10) {
  gather.wait(%10) {fwd}
}
phase micro_batch.middle takes (%20: f32[64]) gives (%22) {
  release(%20) {fwd}
  %21: f32[64] = gather.start(%1) {fwd units=[u0]}
  gather.wait(%21) {fwd}
  %22: f32[64] = aten.neg(%21) {fwd}
}
phase micro_batch.last takes (%30: f32[64]) gives (%31) {
  %31: f32[64] = gather.start(%1) {fwd units=[u0]}
}
phase update once takes (%40: f32[64]) gives (%40) {
}
)";

// Activations along two axes, and a ring.
constexpr char kActivations[] = R"(interlace 1 sharded
mesh dp 2
mesh tp 3
symbol b 1 8
step 1 reduce_each
input %0: f32[6,b,12] "x"
phase micro_batch takes () gives () {
  %1: f32[6,b,36] = all_gather.start(%0) {fwd axis=tp dim=2}
  all_gather.wait(%1) {fwd}
  %2: f32[6,b,12] = reduce_scatter.start(%1) {fwd axis=tp dim=2}
  reduce_scatter.wait(%2) {fwd}
  %3: f32[18,b,4] = all_to_all.start(%2) {fwd axis=tp dim=2 to=0}
  all_to_all.wait(%3) {fwd}
  %4: f32[18,b,4] = broadcast.start(%3) {fwd axis=dp root=1}
  broadcast.wait(%4) {fwd}
  %5: f32[18,b,4] = all_reduce.start(%4) {fwd axis=dp}
  all_reduce.wait(%5) {fwd}
  %6: b8[0] = send.start(%5) {fwd axis=tp peer=(rank_tp+1)%3}
  %7: f32[18,b,4] = recv.start() {fwd axis=tp peer=(rank_tp+2)%3}
  send.wait(%6) {fwd}
  recv.wait(%7) {fwd}
}
)";

// Two micro-batches, both forward before both backward.
constexpr char kCarried[] = R"(interlace 1 sharded
mesh dp 2
step 2 reduce_each
run forward 0
run forward 1
run backward 0
run backward 1
unit u0 dp f32 numel 64 shard 32
param %0: f32[64] "w" frozen unit u0+0
input %1: f32[4,8] "x"
state %2: f32[32] u0.shard persistent
phase forward takes () gives () saves (%10 as h, %12 as y) {
  %10: f32[4,8] = aten.tanh(%1) {fwd}
  %11: f32[8,4]{1,8} in %10+0 = aten.t(%10) {fwd}
  %12: f32[4,4] = aten.mm(%10, %11) {fwd}
}
phase backward takes () gives () loads (%20: f32[4,8] of h, %21: f32[4,4] of y) {
  %22: f32[4,8] = aten.mm(%21, %20) {bwd}
}
)";

using Edits = std::vector<std::pair<std::string, std::string>>;

struct BadEdit {
  const char* what;
  const char* base;
  Edits edits;
};

const std::vector<BadEdit>& BadEdits() {
  static const std::vector<BadEdit> cases = {
      // structure
      {"used before its definition", kCaptured, {{"aten.add.Tensor(%11, %1)", "aten.add.Tensor(%13, %1)"}}},
      {"place is a view of a view",
       kCaptured,
       {{"  %14: f32[] = aten.sum(%12) {fwd}\n", "  %14: f32[] in %10+0 = view(%10)\n"}}},
      {"place outside the storage", kCaptured, {{"in %0+0", "in %0+1"}}},
      {"place without an operand of that storage",
       kCaptured,
       {{"%12: f32[2,4] = aten.add", "%12: f32[2,4] in %3+0 = aten.add"}}},
      {"value of another phase", kSharded, {{"norm.partial(%7)", "norm.partial(%15)"}}},
      {"input in the update", kSharded, {{"norm.partial(%7)", "norm.partial(%3)"}}},
      {"used after release", kSharded, {{"aten.sum(%13)", "aten.sum(%12)"}}},
      {"released twice", kSharded, {{"  %14: f32[] =", "  release(%10)\n  %14: f32[] ="}}},
      {"release of a view", kSharded, {{"release(%10)", "release(%12)"}}},
      {"release of a state", kSharded, {{"release(%10)", "release(%4)"}}},
      {"value in an attribute", kCaptured, {{"{fwd name=\"loss\"}", "{fwd name=\"loss\" x=%13}"}}},
      {"declared in something that is no state",
       kCaptured,
       {{"param %1: f32[4] \"frozen\"", "param %1: f32[4] in %2+0 \"frozen\""}}},
      {"declared into", kSharded, {{"state %5: f32[64]", "state %5: f32[64] into %4+0"}}},
      {"given but released", kPhases, {{"gives (%22) {\n  release(%20)", "gives (%20) {\n  release(%20)"}}},
      {"take lies in something that is not taken",
       kPhases,
       {{"takes (%20: f32[64])", "takes (%20: f32[64] in %10+0)"}}},
      // levels
      {"no phase", kCaptured, {{kCaptured + std::string(kCaptured).find("phase"), ""}}},
      {"captured with an update", kCaptured, {{"phase micro_batch ", "phase update once "}}},
      {"captured with two phases",
       kCaptured,
       {{"phase micro_batch takes", "phase other takes () gives () {\n}\nphase micro_batch takes"}}},
      {"run of an unknown phase", kPhases, {{"run micro_batch.middle 1", "run micro_batch.midle 1"}}},
      {"several phases without an order",
       kPhases,
       {{"run micro_batch.first 0\nrun micro_batch.middle 1\nrun micro_batch.last 2\nrun update\n", ""}}},
      {"run without its micro-batch", kPhases, {{"run micro_batch.middle 1", "run micro_batch.middle"}}},
      {"update with a micro-batch", kPhases, {{"run update", "run update 0"}}},
      {"update twice", kPhases, {{"run update", "run update\nrun update"}}},
      {"micro-batch beyond the step", kPhases, {{"run micro_batch.last 2", "run micro_batch.last 1 x3"}}},
      {"micro-batch twice", kPhases, {{"run micro_batch.last 2", "run micro_batch.last 2\nrun micro_batch.first 0"}}},
      {"micro-batch left out", kPhases, {{"run micro_batch.middle 1", "run micro_batch.middle 2"}}},
      {"phase never run", kPhases, {{"run update\n", ""}}},
      {"grad above the captured level", kCaptured, {{"interlace 1 captured", "interlace 1 sharded"}}},
      {"gather in a captured program", kCaptured, {{"  %15: f32[4,8]", "  gather.wait(%14)\n  %15: f32[4,8]"}}},
      {"sharded parameter used directly", kSharded, {{"aten.mul.Tensor(%12, %11)", "aten.mul.Tensor(%0, %11)"}}},
      {"symbol in a scheduled program", kSharded, {{"1 sharded", "1 scheduled"}, {"step 1", "symbol b 1 2\nstep 1"}}},
      // units
      {"shard not aligned", kSharded, {{"numel 64 shard 32", "numel 60 shard 30"}}},
      {"numel is not shard times axis", kSharded, {{"numel 64 shard 32", "numel 96 shard 32"}}},
      {"parameter not aligned", kSharded, {{"unit u0+64", "unit u0+65"}}},
      {"parameters overlap", kSharded, {{"unit u0+64", "unit u0+32"}}},
      {"parameter beyond the unit", kSharded, {{"unit u0+64", "unit u0+96"}}},
      {"parameter of another dtype", kSharded, {{"param %1: f32[40]", "param %1: bf16[40]"}}},
      {"state of another size", kSharded, {{"state %5: f32[64]", "state %5: f32[63]"}}},
      {"two states of one role", kSharded, {{"u0.exp_avg_sq", "u0.exp_avg"}}},
      {"two parameters of one name",
       kSharded,
       {{"\"v\" trainable group 0 unit u0+64", "\"v\" trainable group 0 unit u0+64 alias \"w\""}}},
      // cuts
      {"cut over no axis of the dimension",
       kSharded,
       {{"mesh dp 2\n", "mesh dp 2\nmesh tp 2\n"}, {"unit u1+0\n", "unit u1+0 cut tp 1\n"}}},
      {"cut over the shard axis", kSharded, {{"unit u1+0\n", "unit u1+0 cut dp 0\n"}}},
      {"cut over the replicas",
       kSharded,
       {{"mesh dp 2\n", "mesh tp 2\nmesh dp 2\n"},
        {"unit u1 dp f32", "unit u1 dp replicas tp f32"},
        {"unit u1+0\n", "unit u1+0 cut tp 0\n"}}},
      {"a part that is not the shard's over the replicas",
       kSharded,
       {{"mesh dp 2\n", "mesh tp 2\nmesh dp 2\n"},
        {"unit u1 dp f32 numel 64 shard 32", "unit u1 dp replicas tp f32 numel 64 shard 32 part 32"}}},
      {"a part without replicas", kSharded, {{"numel 64 shard 32", "numel 64 shard 32 part 16"}}},
      {"a gather of parts that there are not",
       kSharded,
       {{"gather.start(%4) {fwd units=[u0]", "gather.start(%4) {fwd units=[u0] parts=true"}}},
      {"cut over an axis twice",
       kSharded,
       {{"mesh dp 2\n", "mesh dp 2\nmesh tp 2\n"}, {"unit u1+0\n", "unit u1+0 cut tp 0 cut tp 0\n"}}},
      {"cut of blocks that do not fit",
       kSharded,
       {{"mesh dp 2\n", "mesh dp 2\nmesh tp 2\n"}, {"unit u1+0\n", "unit u1+0 cut tp 0 blocks 3\n"}}},
      {"a unit of cut and whole parameters",
       kSharded,
       {{"mesh dp 2\n", "mesh dp 2\nmesh tp 2\n"}, {"unit u0+0\n", "unit u0+0 cut tp 0\n"}}},
      {"a norm over cut and whole units",
       kSharded,
       {{"mesh dp 2\n", "mesh dp 2\nmesh tp 2\n"},
        {"unit u1+0\n", "unit u1+0 cut tp 0\n"},
        {"norm.partial(%7) {upd units=[u0]}", "norm.partial(%7, %8) {upd units=[u0, u1]}"}}},
      // carried by micro-batch
      {"loaded before it is saved",
       kCarried,
       {{"run forward 1\nrun backward 0\nrun backward 1", "run backward 1\nrun backward 0\nrun forward 1"}}},
      {"loaded under another name", kCarried, {{"of y)", "of z)"}}},
      {"loaded twice", kCarried, {{"f32[4,4] of y)", "f32[4,4] of y, %23: f32[4,8] of h)"}}},
      {"loaded by two phases",
       kCarried,
       {{"run backward 1\n", "run backward 1\nrun again 0\nrun again 1\n"},
        {"phase backward", "phase again takes () gives () loads (%30: f32[4,8] of h) {\n}\nphase backward"}}},
      {"saved twice",
       kCarried,
       {{"run forward 1\n", "run forward 1\nrun other 1\n"},
        {"phase backward",
         "phase other takes () gives () saves (%30 as h) {\n  %30: f32[4,8] = aten.neg(%1)\n}\nphase backward"}}},
      {"saved and never loaded", kCarried, {{", %21: f32[4,4] of y", ""}, {"aten.mm(%21, %20)", "aten.neg(%20)"}}},
      {"loaded as another type", kCarried, {{"%21: f32[4,4] of y", "%21: f32[4,5] of y"}}},
      {"saved under two names", kCarried, {{"%12 as y", "%12 as y, %10 as g"}}},
      {"two values of one name", kCarried, {{"%12 as y", "%12 as h"}}},
      {"saved as a view", kCarried, {{"%10 as h", "%11 as h"}}},
      {"saved although it is declared", kCarried, {{"%10 as h", "%1 as h"}}},
      {"saved although nothing defines it", kCarried, {{"%10 as h", "%20 as h"}}},
      {"saved and given",
       kCarried,
       {{"gives () saves", "gives (%10) saves"}, {"phase backward takes ()", "phase backward takes (%29: f32[4,8])"}}},
      {"saved while a transfer is under way",
       kCarried,
       {{"%10 as h", "%13 as h"},
        {"  %12: f32[4,4]", "  %13: f32[4,8] = all_reduce.start(%10) {fwd axis=dp}\n  %12: f32[4,4]"}}},
      {"saved after its release",
       kCarried,
       {{"aten.mm(%10, %11) {fwd}\n", "aten.mm(%10, %11) {fwd}\n  release(%10)\n"}}},
      {"saved by a phase that runs once a step",
       kCarried,
       {{"run backward 1\n", "run backward 1\nrun update\n"},
        {"phase backward", "phase update once takes () gives () loads (%30: f32[4,8] of h) {\n}\nphase backward"}}},
      // single ops
      {"unknown own op", kSharded, {{"gather.wait(%10)", "gather.weit(%10)"}}},
      {"unknown op without a namespace", kCaptured, {{"aten.ones_like(%0)", "ones(%0)"}}},
      {"own op misspelt in its family", kSharded, {{"grad.begin()", "grda.begin()"}}},
      {"gather of the wrong size",
       kSharded,
       {{"%10: f32[128] = gather", "%10: f32[127] = gather"}, {"in %10+0 = view", "in %10+1 = view"}}},
      {"gather without units", kSharded, {{"gather.start(%4) {fwd units=[u0]}", "gather.start(%4) {fwd}"}}},
      {"gather changes the dtype", kSharded, {{"%10: f32[128] = gather", "%10: f64[128] = gather"}}},
      {"reduce of the wrong size", kSharded, {{"reduce.start(%15)", "reduce.start(%11)"}}},
      {"all_reduce along no axis", kSharded, {{"axis=dp", "axis=tp"}}},
      {"grad.begin without a unit",
       kSharded,
       {{"grad.begin() {bwd units=[u0] zero=true}", "grad.begin() {bwd zero=1}"}}},
      {"norm of the wrong type", kSharded, {{"%30: i64[68]", "%30: i64[66]"}}},
      {"norm.coef without scale", kSharded, {{"{upd max_norm=1.0 scale=0.5}", "{upd max_norm=true}"}}},
      {"update with too few operands", kSharded, {{"(%4, %7, %5, %6, %32)", "(%4, %7, %5)"}}},
      {"update with operands of two sizes",
       kSharded,
       {{"(%4, %7, %5, %6, %32)", "(%4, %15, %5, %6, %32)"},
        {"phase update once takes () gives () {",
         "phase update once takes () gives () {\n  %15: f32[128] = grad.begin() {units=[u0]}"},
        {"%15: f32[128] = grad.begin() {bwd", "%29: f32[128] = grad.begin() {bwd"},
        {"into %15+0", "into %29+0"},
        {"reduce.start(%15)", "reduce.start(%29)"}}},
      {"ranges out of order", kSharded, {{"ranges=[0, 60, 0, 64, 104, 0]", "ranges=[64, 104, 0, 0, 60, 0]"}}},
      {"ranges of an unknown group", kSharded, {{"ranges=[0, 60, 0, 64, 104, 0]", "ranges=[0, 60, 3]"}}},
      {"ranges that are no triples", kSharded, {{"ranges=[0, 60, 0, 64, 104, 0]", "ranges=[0, 60]"}}},
      {"view without a place", kSharded, {{"%18: f32[10] in %8+0 = view", "%18: f32[10] = view"}}},
      {"grad of a frozen parameter", kCaptured, {{"grad(%0, %15)", "grad(%1, %13)"}}},
      {"grad of another shape", kCaptured, {{"grad(%0, %15)", "grad(%0, %13)"}}},
      {"two gradients", kCaptured, {{"grad(%0, %15) {bwd}", "grad(%0, %15) {bwd}\n  grad(%0, %15) {bwd}"}}},
      {"loss that is no scalar", kCaptured, {{"output(%14)", "output(%13)"}}},
      {"output without a name", kCaptured, {{" name=\"loss\"", ""}}},
      {"assign to a result", kCaptured, {{"assign(%2, %13)", "assign(%12, %13)"}}},
      {"constant of the wrong length", kCaptured, {{"[1.0, 2]", "[1.0]"}}},
      {"constant of words", kCaptured, {{"[1.0, 2]", "[1.0, two]"}}},
      {"python call without its module", kCaptured, {{"aten.ones_like(%0)", "call.python(%0)"}}},
      // transfers
      {"touched between gather.start and its wait",
       kSharded,
       {{"aten.neg(%3) {fwd}\n  gather.wait(%10)", "aten.neg(%10) {fwd}\n  gather.wait(%10)"},
        {"%11: f32[6,10] = aten.neg", "%11: f32[128] = aten.neg"}}},
      {"never waited for", kSharded, {{"  gather.wait(%20) {bwd}\n", ""}}},
      {"waited for twice",
       kSharded,
       {{"  gather.wait(%20) {bwd}\n", "  gather.wait(%20) {bwd}\n  gather.wait(%20) {bwd}\n"}}},
      {"waited for with the wrong op", kSharded, {{"reduce.wait(%17)", "gather.wait(%17)"}}},
      {"source written during a reduction",
       kSharded,
       {{"  reduce.wait(%17)", "  %40: f32[60] into %15+0 = aten.neg(%11)\n  reduce.wait(%17)"}}},
      {"source released during a reduction", kSharded, {{"  reduce.wait(%17)", "  release(%15)\n  reduce.wait(%17)"}}},
      {"result read during a reduction",
       kSharded,
       {{"  reduce.wait(%17)", "  %40: f32[64] = aten.neg(%7)\n  reduce.wait(%17)"}}},
      {"full buffer read during a gather in place",
       kSharded,
       {{"  gather.wait(%20)", "  %40: f32[10] = aten.neg(%18)\n  gather.wait(%20)"}}},
      {"gather of activations along no axis", kActivations, {{"{fwd axis=tp dim=2}", "{fwd axis=tq dim=2}"}}},
      {"gather of activations without an axis", kActivations, {{"{fwd axis=tp dim=2}", "{fwd dim=2}"}}},
      {"gather along no dimension", kActivations, {{"{fwd axis=tp dim=2}", "{fwd axis=tp dim=3}"}}},
      {"gather without its dimension", kActivations, {{"{fwd axis=tp dim=2}", "{fwd axis=tp}"}}},
      {"gather along another dimension", kActivations, {{"{fwd axis=tp dim=2}", "{fwd axis=tp dim=1}"}}},
      {"gather that changes the dtype", kActivations, {{"%1: f32[6,b,36] =", "%1: bf16[6,b,36] ="}}},
      {"gather into a strided result", kActivations, {{"%1: f32[6,b,36] =", "%1: f32[6,b,36]{36*b,1,b} ="}}},
      {"gather with too many results", kActivations, {{"%1: f32[6,b,36] =", "%1: f32[6,b,36], %9: f32[4] ="}}},
      {"part of a dimension that cannot be cut",
       kActivations,
       {{"reduce_scatter.start(%1) {fwd axis=tp dim=2}", "reduce_scatter.start(%1) {fwd axis=tp dim=1}"}}},
      {"part of the wrong size", kActivations, {{"%2: f32[6,b,12] =", "%2: f32[6,b,18] ="}}},
      {"all_to_all without a dimension to", kActivations, {{"dim=2 to=0", "dim=2"}}},
      {"all_to_all with results of the wrong size", kActivations, {{"dim=2 to=0", "dim=0 to=2"}}},
      {"all_to_all of what cannot be cut", kActivations, {{"dim=2 to=0", "dim=1 to=0"}}},
      {"broadcast from a rank that is not there", kActivations, {{"root=1", "root=2"}}},
      {"broadcast that changes the sizes", kActivations, {{"%4: f32[18,b,4] =", "%4: f32[18,b,2] ="}}},
      {"sum of another dtype", kActivations, {{"%5: f32[18,b,4] =", "%5: f64[18,b,4] ="}}},
      {"send without a token", kActivations, {{"%6: b8[0] =", "%6: f32[18,b,4] ="}}},
      {"send to nobody", kActivations, {{"axis=tp peer=(rank_tp+1)%3", "axis=tp"}}},
      {"send beyond the axis", kActivations, {{"peer=(rank_tp+1)%3", "peer=rank_tp+1"}}},
      {"receive from a rank that is not there", kActivations, {{"peer=(rank_tp+2)%3", "peer=3"}}},
      {"peer of another axis", kActivations, {{"peer=(rank_tp+2)%3", "peer=rank_dp"}}},
      {"receive along no axis", kActivations, {{"axis=tp peer=(rank_tp+2)%3", "peer=0"}}},
      {"receive with an operand", kActivations, {{"recv.start()", "recv.start(%5)"}}},
      {"received value used before its wait",
       kActivations,
       {{"  send.wait(%6)", "  %9: f32[18,b,4] = aten.neg(%7) {fwd}\n  send.wait(%6)"}}},
      {"sent value written before its wait",
       kActivations,
       {{"  send.wait(%6)", "  %9: f32[18,b,4] into %5+0 = aten.neg(%4) {fwd}\n  send.wait(%6)"}}},
      {"sent value released before its wait", kActivations, {{"  send.wait(%6)", "  release(%5)\n  send.wait(%6)"}}},
      {"message never waited for", kActivations, {{"  send.wait(%6) {fwd}\n", ""}}},
      {"message waited for as another", kActivations, {{"send.wait(%6)", "recv.wait(%6)"}}},
      {"phases that do not fit together", kPhases, {{"takes (%30: f32[64])", "takes (%30: f32[63])"}}},
      {"phases with different counts",
       kPhases,
       {{"phase update once takes (%40: f32[64])", "phase update once takes ()"}, {"gives (%40) {", "gives () {"}}},
      {"in flight into a phase that does not wait", kPhases, {{"  gather.wait(%10) {fwd}\n", ""}}},
      {"wait for what no phase started", kPhases, {{"  release(%20) {fwd}\n", "  gather.wait(%20) {fwd}\n"}}},
  };
  return cases;
}

TEST(Verifier, BasesAreValid) {
  for (const char* base : {kCaptured, kSharded, kPhases, kActivations, kCarried}) {
    Result<Program> program = Parse(base);
    ASSERT_TRUE(program.ok()) << program.error().ToString();
    EXPECT_EQ(Print(*program), base);
    for (const Error& error : VerifyAll(*program)) ADD_FAILURE() << error.ToString();
  }
}

TEST(Verifier, Messages) {
  std::string text;
  for (const BadEdit& test : BadEdits()) {
    std::string edited = test.base;
    for (const auto& [from, to] : test.edits) {
      size_t at = edited.find(from);
      ASSERT_NE(at, std::string::npos) << test.what << ": " << from;
      edited.replace(at, from.size(), to);
    }
    Result<Program> program = Parse(edited);
    ASSERT_TRUE(program.ok()) << test.what << ": " << program.error().ToString();
    std::vector<Error> errors = VerifyAll(*program);
    EXPECT_FALSE(errors.empty()) << test.what;
    text += "== " + std::string(test.what) + "\n";
    for (const Error& error : errors) text += error.ToString() + "\n";
  }
  testing::ExpectGolden("ir_verifier_errors.txt", text);
}

TEST(Verifier, FirstFiveAsOneError) {
  std::string text = "interlace 1 captured\nstep 1 reduce_each\nphase micro_batch takes () gives () {\n";
  for (int i = 0; i < 7; ++i) text += "  bad" + std::to_string(i) + "()\n";
  Result<Program> program = Parse(text + "}\n");
  ASSERT_TRUE(program.ok());
  std::string message = Verify(*program).error().ToString();
  EXPECT_TRUE(message.starts_with(
      "line 4: unknown op 'bad0'; ops of a library are written namespace.name\n  bad0()\n  ^\nline 5: "))
      << message;
  EXPECT_TRUE(message.ends_with("\n(2 more)")) << message;
}

// Programs built in memory can be broken in ways a file cannot.
TEST(Verifier, BrokenTables) {
  auto broken = [](auto edit) {
    Result<Program> program = Parse(kCaptured);
    edit(*program);
    std::vector<Error> errors = VerifyAll(*program);
    return errors.empty() ? std::string("valid") : errors[0].ToString();
  };
  EXPECT_EQ(broken([](Program&) {}), "valid");
  EXPECT_EQ(broken([](Program& p) { p.phases[0].ops.push_back(99); }),
            "phase 'micro_batch' lists op 99, which does not exist");
  EXPECT_EQ(broken([](Program& p) { p.phases[0].ops.push_back(0); }), "op 0 (aten.t) stands in the phases twice");
  EXPECT_EQ(broken([](Program& p) { p.params[0].value = 3; }), "the table of parameters names %3, which is none");
  EXPECT_EQ(broken([](Program& p) { p.op(1).args[0].value = 1234; }),
            "line 12: %1234 is used but nothing defines it\n  %11: f32[2,4] = aten.mm(%1234, %10) {fwd m0}\n"
            "                          ^");
  EXPECT_EQ(broken([](Program& p) { p.value(11).def = 0; }),
            "line 12: result %11 does not point back to this op\n  %11: f32[2,4] = aten.mm(%3, %10) {fwd m0}\n  ^");
  EXPECT_EQ(broken([](Program& p) { p.op(0).module = 7; }),
            "line 11: module 7 is not declared\n  %10: f32[8,4]{1,8} in %0+0 = aten.t(%0) {fwd m7}\n"
            "                               ^");
  EXPECT_EQ(broken([](Program& p) { p.value(11).root = 77; }),
            "line 12: its storage %77 does not exist\n  %11: f32[2,4] in %77+0 = aten.mm(%3, %10) {fwd m0}\n  ^");
}

}  // namespace
}  // namespace interlace
