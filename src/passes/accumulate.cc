// accumulate.cc — gradient accumulation: the phase micro_batch becomes micro_batch.first, .middle (steps > 2) and
// .last.
//
//   reduce_each, in middle and last:                       reduce_last, in middle and last:
//     %r: f32[512] = reduce.start(%g) {units=[u0]}           %dw: f32[..] = aten.mm(...)
//     reduce.wait(%r)    release(%g)                         %v in %full_grad+0 = view(%full_grad)
//     %a in %grad+0 = aten.add_.Tensor(%grad, %r)            %a in %full_grad+0 = aten.add_.Tensor(%v, %dw)
//   in first the shard is reduced into the state;          in first the gradient is placed in the state u0.full_grad;
//   every micro-batch has its own flat buffer %g.          only last reduces it.
// Where the gradient is a matrix product that nothing else reads, the product adds it (aten.addmm_(%v, ..)): one pass
// over the gradient less, and no storage for it. Under reduce_each that is so with one rank only. After replicate only
// `last` gathers the summed gradient. With one rank gradients are added in the state in either mode. The two modes
// round differently: the mode is part of a program's meaning (ZeRO-2/3 memory, or DDP traffic).
//
// Of a stage of a pipeline each phase that makes gradients has these variants.
//
// Options: steps, mode=reduce_each|reduce_last. Runs after shard, replicate or zero1 and before update.
// Error: not so, or the program accumulates already.
#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "ir/op_table.h"
#include "ir/text.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// Where the gradients of a unit are put together: its flat buffer or, with one rank, its state `grad`.
struct Landing {
  UnitId unit = kNone;
  ValueId full_grad = kNone;  // reduce_last: the state that replaces the flat buffer
  bool narrow = false;        // the flat buffer is narrower than the unit: gradients are widened to be added up
  std::vector<ValueId> contributions;  // values that ops place there
};

struct Plan {
  bool reduce_last = false;
  std::unordered_map<ValueId, Landing> landings;   // by root
  std::unordered_map<ValueId, UnitId> grad_state;  // the states `grad`
  std::unordered_set<ValueId> narrow_parts;        // reduced shards of narrow flat buffers
  std::unordered_set<ValueId> sums;      // views of landings that further micro-batches of the run are added to
  std::unordered_set<ValueId> read;      // landings in which more is read than the whole and its sums
  std::unordered_set<ValueId> products;  // contributions that a matrix product makes and nothing else reads
};

enum class Variant { kFirst, kMiddle, kLast };

bool IsCollective(const Op& op) {
  return TraitsOf(op).family == OpFamily::kUnit;
}

// Writes one variant of the micro-batch phase: clones ops and values, and changes what concerns gradients.
class VariantWriter {
 public:
  VariantWriter(Program& program, const Plan& plan, Variant variant, int32_t old_values)
      : program_(program), plan_(plan), variant_(variant), new_(old_values, kNone) {}

  Result<Phase> Write(const Phase& from, std::string name) {
    phase_.name = std::move(name);
    for (ValueId id : from.takes) {
      INTERLACE_TRY(CloneValue(id, kNone, 0));
      phase_.takes.push_back(new_[id]);
    }
    for (const Carried& load : from.loads) {
      INTERLACE_TRY(CloneValue(load.value, kNone, 0));
      phase_.loads.push_back({load.name, new_[load.value]});
    }
    for (OpId id : from.ops) INTERLACE_TRY(WriteOp(program_.op(id)));
    for (ValueId id : from.gives) phase_.gives.push_back(Map(id));
    for (const Carried& save : from.saves) phase_.saves.push_back({save.name, Map(save.value)});
    return std::move(phase_);
  }

 private:
  bool Adds() const { return variant_ != Variant::kFirst; }
  bool Each() const { return !plan_.reduce_last; }

  const Landing* LandingOf(ValueId root) const {
    auto found = plan_.landings.find(root);
    return found == plan_.landings.end() ? nullptr : &found->second;
  }
  // Whether the gradients that land in `landing` are added one by one here (a flat buffer under reduce_each is reduced
  // first).
  bool AddsInto(const Landing* landing, ValueId root) const {
    return landing != nullptr && Adds() && (plan_.reduce_last || plan_.grad_state.count(root) > 0);
  }

  // Whether such gradients have a storage of their own here.
  bool Fresh(const Landing* landing, ValueId root) const { return AddsInto(landing, root) || Widens(landing); }
  bool Widens(const Landing* landing) const { return landing != nullptr && plan_.reduce_last && landing->narrow; }

  ValueId Map(ValueId id) const { return id == kNone || new_[id] == kNone ? id : new_[id]; }

  Status WriteOp(const Op& op) {
    if (op.kind == OpKind::kGradBegin) return WriteBegin(op);
    if (op.kind == OpKind::kRelease) return WriteRelease(op);
    if (IsCollective(op)) {
      if (!Runs(op)) return Ok{};
      if (op.kind == OpKind::kReduceStart) Narrow(op);
      INTERLACE_TRY(Clone(op));
      if (op.kind == OpKind::kReduceWait && Each() && Adds()) {
        ForEachOperand(op, [&](ValueId part) {
          const Value& value = program_.value(part);
          if (plan_.grad_state.count(value.root) > 0)
            new_[part] = AddInto(value, value.root, value.offset, new_[part], op);
        });
      }
      return Ok{};
    }
    // A copy into the buffer: its operand can be added as it is.
    ValueId only = op.results.size() == 1 ? op.results[0] : kNone;
    if (plan_.products.count(only) > 0) {
      const Value& value = program_.value(only);
      const Landing* landing = LandingOf(value.root);
      if (AddsInto(landing, value.root) && !Widens(landing)) {
        new_[only] = AddProduct(value, Target(value.root), op);
        return Ok{};
      }
    }
    if (op.kind == OpKind::kCopy && only != kNone && program_.value(only).placed) {
      const Value& value = program_.value(only);
      // One that is read as well keeps a storage of its own.
      if (Fresh(LandingOf(value.root), value.root) && plan_.read.count(value.root) == 0) {
        new_[only] = Contribute(value, Map(op.args[0].value), op);
        return Ok{};
      }
      // Widens a reduced shard; nothing was reduced before the last micro-batch.
      if (plan_.reduce_last && plan_.narrow_parts.count(op.args[0].value) > 0 && variant_ != Variant::kLast)
        return Ok{};
    }
    return Clone(op);
  }

  // A flat buffer is new in every micro-batch; a state that gradients are added up in begins once, in the first.
  Status WriteBegin(const Op& op) {
    ValueId flat = op.results[0];
    bool of_state = program_.value(flat).placed;
    if (!of_state && Each()) return Clone(op);
    ValueId state = of_state ? program_.RootOf(flat) : LandingOf(flat)->full_grad;
    if (variant_ == Variant::kFirst) {
      Op& begin = NewOp(op.kind, op);
      begin.units = op.units;
      begin.attrs = op.attrs;
      program_.AddPlaced(begin, program_.value(state).type, state, Dim(0));
    }
    new_[flat] = state;
    return Ok{};
  }

  // Under reduce_last only the last micro-batch communicates; a summed gradient is gathered in the last one only.
  bool Runs(const Op& op) const {
    if (variant_ == Variant::kLast) return true;
    bool runs = true;
    auto check = [&](ValueId id) {
      bool of_gradient = plan_.grad_state.count(program_.RootOf(id)) > 0;
      if (of_gradient && (plan_.reduce_last || TraitsOf(op).exchange == Exchange::kGather)) runs = false;
      if (plan_.reduce_last && plan_.narrow_parts.count(id) > 0) runs = false;
    };
    for (ValueId id : op.results) check(id);
    ForEachOperand(op, check);
    return runs;
  }

  Status WriteRelease(const Op& op) {
    std::vector<Arg> kept;
    for (const Arg& arg : op.args) {
      const Landing* landing = plan_.reduce_last ? LandingOf(arg.value) : nullptr;
      if (landing == nullptr || (landing->narrow && variant_ == Variant::kLast)) kept.push_back(arg);
    }
    if (kept.empty()) return Ok{};
    INTERLACE_TRY(Clone(op));
    Op& release = program_.op(phase_.ops.back());
    for (Arg& arg : kept) arg.value = Map(arg.value);
    release.args = std::move(kept);
    return Ok{};
  }

  // The sum of wide gradients is rounded to what is reduced.
  void Narrow(const Op& reduce) {
    ForEachOperand(reduce, [&](ValueId flat) {
      const Landing* landing = LandingOf(flat);
      if (!Widens(landing)) return;
      Op& copy = NewOp(OpKind::kCopy, reduce, {landing->full_grad});
      new_[flat] = program_.AddResult(copy, program_.value(flat).type);
    });
  }

  // Puts the gradient `source` to its place: adds it to what is there or, in the first micro-batch, widens it.
  ValueId Contribute(const Value& place, ValueId source, const Op& tags) {
    ValueId state = Target(place.root);
    if (Adds()) return AddInto(place, state, place.offset, source, tags);
    Op& copy = NewOp(OpKind::kCopy, tags, {source});
    Type type = place.type;
    type.dtype = program_.value(state).type.dtype;
    return program_.AddPlaced(copy, std::move(type), state, place.offset);
  }

  // The state that gradients landing in `root` are added to.
  ValueId Target(ValueId root) const {
    const Landing* landing = LandingOf(root);
    return plan_.reduce_last && landing->full_grad != kNone ? landing->full_grad : root;
  }

  // Adds `source` to the part of the state that `place` describes; returns that part.
  ValueId AddInto(const Value& place, ValueId state, Dim offset, ValueId source, const Op& tags) {
    return WriteSum("aten.add_.Tensor", {Arg::Of(source)}, place.type, state, offset, tags);
  }

  // Adds the product that `mm` makes to the part of the state that `place` describes; returns that part.
  ValueId AddProduct(const Value& place, ValueId state, const Op& mm) {
    return WriteSum("aten.addmm_", {Arg::Of(Map(mm.args[0].value)), Arg::Of(Map(mm.args[1].value))}, place.type, state,
                    place.offset, mm);
  }

  // `name`(part, operands...), written in place.
  ValueId WriteSum(const char* name, std::vector<Arg> operands, Type type, ValueId state, Dim offset, const Op& tags) {
    type.dtype = program_.value(state).type.dtype;
    ValueId part = state;
    if (!(offset == Dim(0)) || !(type == program_.value(state).type)) {
      Op& view = NewOp(OpKind::kView, tags, {state});
      part = program_.AddView(view, type, state, offset);
    }
    Op& add = NewOp(name, tags);
    add.args = std::move(operands);
    add.args.insert(add.args.begin(), Arg::Of(part));
    add.writes = {part};
    program_.AddView(add, type, state, offset);
    return part;
  }

  template <typename KindOrName>
  Op& NewOp(KindOrName what, const Op& tags, std::initializer_list<ValueId> operands = {}) {
    Op& op = AddLike(program_, tags, what, operands);
    phase_.ops.push_back(op.id);
    return op;
  }

  Status Clone(const Op& op) {
    Op& out = program_.AddOp(op.name);
    OpId id = out.id;
    out = op;
    out.id = id;
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (op.results[i] == kNone) continue;
      INTERLACE_TRY(CloneValue(op.results[i], id, static_cast<int32_t>(i)));
      out.results[i] = new_[op.results[i]];
    }
    ForEachOperand(out, [&](ValueId& v) { v = Map(v); });
    for (ValueId& v : out.writes) v = Map(v);
    if (op.kind == OpKind::kView && LandingOf(op.args[0].value) != nullptr)
      out.args = {Arg::Of(program_.RootOf(out.results[0]))};
    phase_.ops.push_back(id);
    for (ValueId result : op.results) {
      if (result == kNone) continue;
      const Value& value = program_.value(result);
      if (value.placed && !IsCollective(op) && Fresh(LandingOf(value.root), value.root)) {
        Contribute(value, new_[result], op);
      }
    }
    return Ok{};
  }

  Status CloneValue(ValueId old, OpId def, int32_t index) {
    const Value& from = program_.value(old);
    Value& to = program_.AddValue(from.kind, from.type);
    new_[old] = to.id;
    to.def = def;
    to.result_index = index;
    if (from.root == old) return Ok{};
    const Landing* landing = LandingOf(from.root);
    // What is added to the state afterwards is fresh.
    if (from.placed && def != kNone) {
      const Op& op = program_.op(def);
      if (IsCollective(op) ? IsAddedPart(from, op) : Fresh(landing, from.root)) return Ok{};
    }
    to.root = Map(from.root);
    to.offset = from.offset;
    to.placed = from.placed;
    if (from.placed || plan_.sums.count(old) > 0 || !Fresh(landing, from.root)) return Ok{};
    // A view of a gradient that has a storage of its own here. Which one, says where the first rank's lies: each rank's
    // part of a whole gradient, where a parameter that is cut has the same, lies in one.
    const Result<int64_t> at = program_.dims.Evaluate(from.offset, FirstRank(program_.mesh));
    for (ValueId id : landing->contributions) {
      const Value& whole = program_.value(id);
      int64_t bytes = DTypeBytes(from.type.dtype), whole_bytes = DTypeBytes(whole.type.dtype);
      if (!at.ok() || !whole.offset.is_const() || (bytes != whole_bytes && !from.offset.is_const())) continue;
      int64_t start = *at * bytes - whole.offset.value * whole_bytes;
      Dim count = program_.NumElements(whole.type);
      if (start < 0 || start >= count.value * whole_bytes || start % bytes != 0 || new_[id] == kNone) continue;
      to.root = new_[id];
      to.offset = from.offset.is_const() ? Dim(start / bytes) : program_.dims.Sub(from.offset, whole.offset);
      return Ok{};
    }
    return MakeError("%", old, ": ", PrintType(program_, from.type),
                     " views more than one gradient; accumulate cannot tell which");
  }

  // A reduced part that goes to the state `grad` in the first micro-batch and is added in the others.
  bool IsAddedPart(const Value& value, const Op& op) const {
    return op.kind == OpKind::kReduceStart && Each() && Adds() && plan_.grad_state.count(value.root) > 0;
  }

  Program& program_;
  const Plan& plan_;
  Variant variant_;
  std::vector<ValueId> new_;  // by old value
  Phase phase_;
};

// What is read of the landings; in the others contributions by aten.mm are products.
void FindRead(const Program& program, const Phase& phase, Plan& plan) {
  auto reads = [&](ValueId id) {
    const ValueId root = program.RootOf(id);
    if (id != root && plan.sums.count(id) == 0) plan.read.insert(root);
  };
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    if (!IsCollective(op)) ForEachOperand(op, reads);
  }
  for (ValueId id : phase.gives) reads(id);
  for (const auto& [root, landing] : plan.landings) {
    if (plan.read.count(root) > 0) continue;
    for (ValueId id : landing.contributions) {
      const Op& op = program.op(program.value(id).def);
      if (IsProduct(op)) plan.products.insert(id);
    }
  }
}

Plan MakePlan(Program& program, const Phase& phase, bool reduce_last) {
  Plan plan;
  plan.reduce_last = reduce_last;
  for (const State& state : program.states) {
    if (state.role == "grad") plan.grad_state[state.value] = state.unit;
  }
  std::vector<UnitId> with_full_grad;
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    if (op.kind == OpKind::kGradBegin && !program.value(op.results[0]).placed) {
      Landing& landing = plan.landings[op.results[0]];
      landing.unit = op.units[0];
      landing.narrow = program.value(op.results[0]).type.dtype != program.units[op.units[0]].dtype;
    }
    if (op.kind == OpKind::kReduceStart) {
      for (size_t i = 0; i < op.args.size(); ++i) {
        auto landing = plan.landings.find(op.args[i].value);
        if (landing != plan.landings.end() && landing->second.narrow) plan.narrow_parts.insert(op.results[i]);
      }
    }
    const bool adds = op.name == "aten.add_.Tensor" || op.name == "aten.addmm_";
    if (program.width > 1 && adds && op.args[0].kind == Arg::Kind::kValue) {
      plan.sums.insert(op.args[0].value);
      plan.sums.insert(op.results.begin(), op.results.end());
    }
    // A reduced shard is widened, and added up only when it is reduced in every micro-batch.
    if (reduce_last && op.kind == OpKind::kCopy && plan.narrow_parts.count(op.args[0].value) > 0) continue;
    if (IsCollective(op) || op.kind == OpKind::kGradBegin) continue;
    for (ValueId result : op.results) {
      if (result == kNone || !program.value(result).placed) continue;
      ValueId root = program.RootOf(result);
      auto state = plan.grad_state.find(root);
      if (state != plan.grad_state.end()) plan.landings[root].unit = state->second;
      auto landing = plan.landings.find(root);
      if (landing != plan.landings.end()) landing->second.contributions.push_back(result);
    }
  }
  FindRead(program, phase, plan);
  if (!reduce_last) return plan;
  std::vector<std::pair<UnitId, Landing*>> flats;
  for (auto& [root, landing] : plan.landings) {
    if (plan.grad_state.count(root) == 0) flats.emplace_back(landing.unit, &landing);
  }
  std::sort(flats.begin(), flats.end());
  for (auto& [id, landing] : flats) {
    const Unit& unit = program.units[id];
    landing->full_grad = program.AddState(id, "full_grad", FlatType(unit.dtype, unit.numel), /*persistent=*/false);
  }
  return plan;
}

}  // namespace

Result<bool> Accumulate(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(int64_t steps, options.Int("steps", std::nullopt, 1));
  INTERLACE_ASSIGN(std::string mode, options.Choice("mode", {"reduce_each", "reduce_last"}));
  if (program.accumulation != program.width) {
    return MakeError("the program accumulates ", program.accumulation, " micro-batches already; run accumulate once");
  }
  if (program.UpdatePhase() != nullptr) {
    return MakeError("run accumulate before update, whose mean depends on the number of micro-batches");
  }
  if (program.width > 1) {
    if (mode != "reduce_last") {
      return MakeError(
          "micro-batches that run side by side are reduced together; use mode=reduce_last, or no breadth_first");
    }
    if (steps % program.width != 0) {
      return MakeError("steps=", steps, " micro-batches cannot run by ", program.width,
                       "; choose a multiple, or another breadth_first");
    }
  }
  if (steps == program.width) {
    bool changed = program.accumulate_mode != mode;
    program.accumulate_mode = mode;
    return changed;
  }
  const int64_t runs = steps / program.width;
  const bool single = program.MicroBatchPhase() != nullptr && program.order.empty();
  std::vector<const Phase*> path;  // that a micro-batch goes by
  for (const auto& run : program.RunsOfStep()) path.push_back(run.phase);
  // By phase: that of the first, of a middle and of the last micro-batch; one that has nothing to do with gradients is
  // the same for all.
  std::vector<Phase> phases;
  std::map<std::string, std::array<std::string, 3>> variants;
  const std::vector<Phase> old = program.phases;
  for (const Phase& phase : old) {
    const Plan plan = MakePlan(program, phase, mode == "reduce_last");
    if (plan.landings.empty() && !single) {
      variants[phase.name].fill(phase.name);
      phases.push_back(phase);
      continue;
    }
    const int32_t old_values = program.num_values();
    for (auto [variant, suffix] : {std::pair{Variant::kFirst, ".first"}, std::pair{Variant::kMiddle, ".middle"},
                                   std::pair{Variant::kLast, ".last"}}) {
      if (variant == Variant::kMiddle && runs == 2) continue;
      INTERLACE_ASSIGN(Phase written,
                       VariantWriter(program, plan, variant, old_values).Write(phase, phase.name + suffix));
      variants[phase.name][static_cast<size_t>(variant)] = written.name;
      phases.push_back(std::move(written));
    }
  }
  std::vector<OrderEntry> order;
  for (int64_t run = 0; run < runs; ++run) {
    const size_t variant = run == 0 ? 0 : run == runs - 1 ? 2 : 1;
    for (const Phase* phase : path) {
      const std::string& name = variants[phase->name][variant];
      if (!order.empty() && order.back().phase == name) {
        ++order.back().count;
      } else {
        order.push_back({name, run * program.width, 1});
      }
    }
  }
  program.order = std::move(order);
  program.phases = std::move(phases);
  program.accumulation = steps;
  program.accumulate_mode = mode;
  return true;
}

}  // namespace interlace
