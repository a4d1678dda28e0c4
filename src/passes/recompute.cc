// recompute.cc — activation checkpointing: forward ops run again in the backward part, so that what they made need not
// live from one to the other.
//   before: %5 = aten.mm(%4, %w) {fwd m3}                  after: %5 = aten.mm(%4, %w) {fwd m3}
//           %6 = aten.relu(%5) {fwd m3}                           %6 = aten.relu(%5) {fwd m3}
//           ... the other blocks and the loss ...                 ... %5 and %6 have ended, %4 is kept ...
//           %9 = aten.threshold_backward(%8, %6, 0) {bwd m3}      %10 = aten.mm(%4, %w) {bwd m3}
//                                                                 %11 = aten.relu(%10) {bwd m3}
//                                                                 %9 = aten.threshold_backward(%8, %11, 0) {bwd m3}
// A block is an element of a list of modules (model.layers.3). What leaves a block is kept for the next one; what is
// made inside may be made again, by the same op from the same operands, just before the first backward op that needs
// it: the recomputed values of one block live at a time, and no bit changes: a random op draws the same numbers again,
// from its key. Never run twice: ops that write, opaque modules, other libraries' ops, ops that read what is written
// before the backward part has read it, and random ops where numbers come in the order of eager's (rng=compat).
//
// Runs on a captured program after canonicalize and before shard, zero1 or replicate: shard then counts the uses again
// as uses of the backward stretch, so one gather serves recomputation and backward. The line `meta recompute` says what
// was chosen. Sources: SimpleFSDP section 3.3, Chen et al. "Training Deep Nets with Sublinear Memory Cost".
//
// Options: mode=full: everything inside blocks; selective: all but the results of the ops in `save` (names joined by
// "+"; products, convolutions and attention, but for attention's scores, unless it is given), and everything inside the
// blocks in `whole`; keep=second: of a block's products only the first, third, ... are kept (torchtitan's policy),
// keep=all: all but attention's scores and what is made of them (Megatron's); budget: as little time as possible, until
// what is kept for the backward part has at most `bytes` (times by the kernel model of `cluster`). `blocks`: paths of
// modules joined by "+" instead of the elements of lists, each a block. Error: the program has units or was recomputed
// already, no such module, blocks that overlap, a budget below the least possible (which it says), budget with sizes
// that are not numbers.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/scan.h"
#include "cost/cluster.h"
#include "passes/inspect.h"
#include "passes/passes.h"
#include "passes/recompute_choice.h"

namespace interlace {
namespace {

// Matrix products, convolutions and attention: what a kernel's time is spent on.
constexpr std::string_view kExpensive =
    "aten.mm+aten.addmm+aten.bmm+aten.baddbmm+aten._grouped_mm+aten.convolution+aten._scaled_dot_product_flash_"
    "attention+"
    "aten._scaled_dot_product_flash_attention_for_cpu+aten._scaled_dot_product_efficient_attention+"
    "aten._scaled_dot_product_cudnn_attention";

std::vector<std::string> Names(const std::string& text) {
  std::vector<std::string> names;
  for (std::string_view name : Split(text, '+')) {
    if (!name.empty()) names.emplace_back(name);
  }
  return names;
}

// Writes the ops that run again before the backward op that needs them first.
class Rewriter {
 public:
  Rewriter(Program& program, Phase& phase, RecomputeChoice& choice)
      : program_(program), phase_(phase), choice_(choice), stand_in_(program.num_values(), kNone) {}

  int64_t Run() {
    // The choice knows the values of the old program only, so it is asked before the first edit.
    int32_t begin = choice_.first_backward(), end = static_cast<int32_t>(phase_.ops.size());
    std::vector<std::vector<int32_t>> needed;
    for (int32_t i = begin; i < end; ++i) needed.push_back(choice_.Needed(i));
    std::vector<OpId> ops(phase_.ops.begin(), phase_.ops.begin() + begin);
    for (int32_t i = begin; i < end; ++i) {
      for (int32_t original : needed[i - begin]) ops.push_back(Again(phase_.ops[original]));
      Op& op = program_.op(phase_.ops[i]);
      Substitute(op);
      // A view made by a backward op follows its storage.
      for (ValueId id : op.results) {
        if (id != kNone && program_.RootOf(id) != id) program_.value(id).root = Now(program_.RootOf(id));
      }
      ops.push_back(op.id);
    }
    phase_.ops = std::move(ops);
    return again_;
  }

 private:
  ValueId Now(ValueId id) const {
    bool old = id < static_cast<ValueId>(stand_in_.size()) && stand_in_[id] != kNone;
    return old ? stand_in_[id] : id;
  }

  void Substitute(Op& op) {
    ForEachOperand(op, [&](ValueId& id) { id = Now(id); });
  }

  OpId Again(OpId id) {
    Op& op = program_.AddOp(program_.op(id).name);
    const Op& original = program_.op(id);
    CopyTags(original, op);
    op.part = Part::kBackward;
    op.args = original.args;
    op.named = original.named;
    op.lane = original.lane;
    op.attrs = original.attrs;
    op.rng = original.rng;
    Substitute(op);
    for (ValueId result : original.results) {
      if (result == kNone) {
        op.results.push_back(kNone);
        continue;
      }
      ValueId root = program_.RootOf(result);
      Type type = program_.value(result).type;
      Dim offset = program_.value(result).offset;
      ValueId fresh = root == result ? program_.AddResult(op, std::move(type))
                                     : program_.AddView(op, std::move(type), Now(root), offset);
      // What is kept is used as before, whatever else the op makes again.
      if (choice_.Dropped(root)) stand_in_[result] = fresh;
    }
    ++again_;
    return op.id;
  }

  Program& program_;
  Phase& phase_;
  RecomputeChoice& choice_;
  std::vector<ValueId> stand_in_;  // by value of the forward part
  int64_t again_ = 0;
};

Status Choose(RecomputeChoice& choice, const std::string& mode, const PassOptions& options) {
  INTERLACE_TRY(choice.FindBlocks(Names(options.Text("blocks", ""))));
  for (const char* name : {"save", "whole", "keep"}) {
    if (options.Find(name) != nullptr && mode != "selective")
      return MakeError("option ", name, " needs mode=selective; mode=", mode, " does not read it");
  }
  INTERLACE_ASSIGN(std::optional<int64_t> bytes, options.Bytes("bytes"));
  if (bytes && mode != "budget") return MakeError("option bytes needs mode=budget; mode=", mode, " does not read it");
  if (mode == "full") {
    choice.DropAll();
  } else if (mode == "selective") {
    INTERLACE_ASSIGN(std::string keep, options.Choice("keep", {"products", "second", "all"}));
    const bool asked = options.Find("save") != nullptr;
    if (asked && keep != "products") return MakeError("option save says what is kept; keep=", keep, " does, too");
    INTERLACE_TRY(choice.DropAllBut(Names(options.Text("save", kExpensive)), asked, keep));
    INTERLACE_TRY(choice.DropBlocks(Names(options.Text("whole", ""))));
  } else {
    if (!bytes) return MakeError("mode=budget needs bytes=N: what may be kept for the backward part");
    INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(options.Text("cluster", "local-1"), "option cluster"));
    INTERLACE_TRY(choice.DropToBudget(*bytes, cluster));
  }
  return Ok{};
}

}  // namespace

Result<bool> Recompute(Program& program, const PassOptions& options) {
  if (const std::string* before = program.Meta("recompute")) {
    return MakeError("the program has been through recompute already (", *before, "); run it once, with one mode");
  }
  INTERLACE_ASSIGN(std::string mode, options.Choice("mode", {"full", "selective", "budget"}));
  Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the program has no phase micro_batch");
  RecomputeChoice choice(program, *phase);
  INTERLACE_TRY(Choose(choice, mode, options));
  std::optional<int64_t> before = choice.SavedBytesOfAll(), after = choice.SavedBytes();
  int64_t again = Rewriter(program, *phase, choice).Run();
  if (again == 0) return false;
  std::string note = mode + ": " + std::to_string(again) + " ops run again";
  if (before && after) note += "; kept for backward " + BytesText(*after) + " instead of " + BytesText(*before);
  program.SetMeta("recompute", note);
  return true;
}

}  // namespace interlace
