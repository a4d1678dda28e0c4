// breadth_first.cc — several micro-batches run side by side, layer by layer, so that the transfers of a step hide
// behind all of them: gathers behind the forward parts of the first ones, reductions behind the backward parts of the
// last ones. It costs their activations.
//
//   captured        breadth_first(micro_batches=2)      reads of parameters cut the list of ops into pieces; a piece
//   runs %5 = mm(%x, %w)      %5 = mm(%x, %w)             for one micro-batch after the other %6 = relu(%5)        %6 =
//   relu(%5) %7 = mm(%6, %v)      %25 = mm(%22, %w) {micro=1}
//   ...                  %26 = relu(%25) {micro=1}
//   grad(%w, %9)         %7 = mm(%6, %v) ...  grad(%w, %9)  grad(%w, %29) {micro=1}
//
// The header says `step 2 reduce_last by 2`; `accumulate(steps=8)` then makes four runs of two. What is the same in
// every micro-batch (casts and views of parameters, constants) is made once. Gradients are added up in the order of the
// micro-batches, so bits are those of accumulate(mode=reduce_last). Named breadth-first accumulation in Lamy-Poirier,
// "Breadth-First Pipeline Parallelism" (2022), section 3.
//
// Option: micro_batches. Runs on a captured program, after canonicalize, precision and recompute and before shard.
// Errors: not so; the model changes buffers or runs Python, random numbers in program order (rng=compat), gradients
// narrower than their parameter.
#include <algorithm>
#include <vector>

#include "ir/op_table.h"
#include "ir/text.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

Status CheckCaptured(const Program& program) {
  if (program.width > 1) {
    return MakeError("the program runs ", program.width, " micro-batches side by side already; run breadth_first once");
  }
  if (program.MicroBatchPhase() == nullptr) return MakeError("the program has no single micro-batch phase");
  return Ok{};
}

// Whether micro-batches have nothing to do with one another but for the sums of their gradients.
Status CheckIndependent(const Program& program, const Phase& phase) {
  const std::string* rng = program.Meta("rng");
  const bool in_order = rng != nullptr && *rng == "compat";
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    const auto refuse = [&](const std::string& why) { return Error{why, PrintOp(program, op)}; };
    if (op.kind == OpKind::kCallPython)
      return refuse("a module that runs in Python keeps what its backward needs for one micro-batch only");
    if (op.rng && in_order)
      return refuse("random numbers come in the order of the program (rng=compat); use rng=keyed");
    for (ValueId written : WrittenOperands(program, op)) {
      if (program.value(program.RootOf(written)).kind == ValueKind::kResult) continue;
      return refuse("the model changes %" + std::to_string(written) +
                    ", which the next micro-batch reads: one must end before the next");
    }
    if (op.kind != OpKind::kGrad) continue;
    const Type &of = program.value(op.args[0].value).type, &given = program.value(op.args[1].value).type;
    if (of.dtype != given.dtype) {
      return refuse(
          "gradients are narrower than their parameters; they are added up wide by accumulate, after each micro-batch");
    }
  }
  return Ok{};
}

class BreadthFirstWriter {
 public:
  BreadthFirstWriter(Program& program, Phase& phase, int64_t count)
      : program_(program),
        phase_(phase),
        count_(count),
        same_(program.num_values(), 0),
        weight_(program.num_values(), 0) {}

  void Run() {
    FindSame();
    AddInputs();
    std::vector<OpId> ops;
    std::vector<OpId> piece;
    const auto flush = [&] {
      ops.insert(ops.end(), piece.begin(), piece.end());
      for (int64_t micro = 1; micro < count_; ++micro) {
        for (OpId id : piece) {
          if (!same_op_[id]) ops.push_back(Copy(program_.op(id), micro));
        }
      }
      piece.clear();
    };
    Part part = Part::kNone;
    for (OpId id : std::vector<OpId>(phase_.ops)) {
      const Op& op = program_.op(id);
      if (op.part != part || (!same_op_[id] && ReadsWeight(op))) flush();
      part = op.part;
      piece.push_back(id);
    }
    flush();
    phase_.ops = std::move(ops);
  }

 private:
  // Ops whose results are the same in every micro-batch: of parameters, buffers and constants alone, and written by
  // nobody.
  void FindSame() {
    std::vector<char> own(program_.num_values(), 0);  // by root: a storage that belongs to one micro-batch
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      for (ValueId written : WrittenOperands(program_, op)) own[program_.RootOf(written)] = 1;
      if (op.kind == OpKind::kGrad) own[program_.RootOf(op.args[1].value)] = 1;
    }
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (!program_.HasValue(id)) continue;
      const ValueKind kind = program_.value(id).kind;
      same_[id] = kind == ValueKind::kParam || kind == ValueKind::kBuffer || kind == ValueKind::kConst;
      weight_[id] = kind == ValueKind::kParam;
    }
    same_op_.assign(program_.num_ops(), 0);
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      const bool pure = op.kind == OpKind::kView || op.kind == OpKind::kCopy || !IsOwn(op);
      bool same = pure && !op.rng && !HasEffect(program_, op), weight = false;
      ForEachOperand(op, [&](ValueId v) {
        same = same && same_[v] && !own[program_.RootOf(v)];
        weight = weight || weight_[v];
      });
      for (ValueId v : op.results) same = same && v != kNone && !own[program_.RootOf(v)];
      if (!same) continue;
      same_op_[id] = 1;
      for (ValueId v : op.results) {
        same_[v] = 1;
        weight_[v] = weight;
      }
    }
  }

  bool ReadsWeight(const Op& op) const {
    return op.kind != OpKind::kGrad && AnyOperand(op, [&](ValueId v) { return weight_[v] != 0; });
  }

  void AddInputs() {
    new_.assign(count_, std::vector<ValueId>(program_.num_values(), kNone));
    const std::vector<Input> inputs = program_.inputs;
    for (int64_t micro = 1; micro < count_; ++micro) {
      for (const Input& input : inputs) {
        const ValueId id = program_.AddValue(ValueKind::kInput, program_.value(input.value).type).id;
        new_[micro][input.value] = id;
        program_.inputs.push_back({id, input.name});
      }
    }
  }

  OpId Copy(const Op& op, int64_t micro) {
    std::vector<ValueId>& now = new_[micro];
    const auto map = [&](ValueId v) { return v == kNone || now[v] == kNone ? v : now[v]; };
    Op& out = program_.AddOp(op.name);
    const OpId id = out.id;
    out = op;
    out.id = id;
    out.SetAttr(kMicroBatch, Arg::Int(Dim(micro)));
    for (size_t i = 0; i < op.results.size(); ++i) {
      const ValueId old = op.results[i];
      if (old == kNone) continue;
      Value& value = program_.AddValue(ValueKind::kResult, program_.value(old).type);
      const Value& from = program_.value(old);
      now[old] = value.id;
      value.def = id;
      value.result_index = static_cast<int32_t>(i);
      if (from.root != old) {
        value.root = map(from.root);
        value.offset = from.offset;
        value.placed = from.placed;
      }
      out.results[i] = value.id;
    }
    ForEachOperand(out, [&](ValueId& v) { v = map(v); });
    for (ValueId& v : out.writes) v = map(v);
    return id;
  }

  Program& program_;
  Phase& phase_;
  const int64_t count_;
  std::vector<char> same_,
      weight_;                 // by value: the same in every micro-batch; a parameter, or made of parameters alone
  std::vector<char> same_op_;  // by op
  std::vector<std::vector<ValueId>> new_;  // by micro-batch and old value
};

}  // namespace

Result<bool> BreadthFirst(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const int64_t count, options.Int("micro_batches", 2, 1));
  INTERLACE_TRY(CheckCaptured(program));
  constexpr int64_t kMost = 64;  // ops and inputs are written out for each
  if (count > kMost) return MakeError("micro_batches=", count, " is more than ", kMost);
  if (count == 1) return false;
  Phase& phase = *program.MicroBatchPhase();
  INTERLACE_TRY(CheckIndependent(program, phase));
  BreadthFirstWriter(program, phase, count).Run();
  program.width = program.accumulation = count;
  program.accumulate_mode = "reduce_last";
  return true;
}

}  // namespace interlace
