#include "passes/host_update.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "ir/pending.h"
#include "ir/residency.h"
#include "ir/touches.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// An op of the step: `line` counts over all phases in run order.
struct Spot {
  int32_t phase = -1, index = -1, line = -1;
};

struct Uses {
  std::optional<Spot> first, last,
      last_write;         // of all but the update; a transfer uses its source, and writes its result, until its wait
  bool placed = false;    // the first of them writes there, and reads nothing
  bool filled = false;    // and it writes all of it
  bool restless = false;  // a transfer of it goes on into another phase
};

struct HostStep {
  OpId update = kNone;
  UnitId unit = kNone;
  Spot spot;
  ValueId weights = kNone, grad = kNone;
  std::vector<ValueId> states;
  bool begin = false;   // several results fill the gradient: padding between them must become zero
  std::string why_not;  // empty: it can be made on the host
};

class HostSteps {
 public:
  explicit HostSteps(const Program& program) : program_(program) {
    std::map<const Phase*, int64_t> runs;
    for (const auto& [phase, count] : program.RunOrder()) {
      phases_.push_back(phase);
      runs[phase] += count;
    }
    for (const Phase* phase : phases_) repeated_.push_back(runs[phase] > 1);  // of a pipeline's stage in several places
    for (const State& state : program.states) states_[state.value] = &state;
    ReadUses();
    for (HostStep& c : candidates_) c.why_not = WhyNot(c);
  }

  const std::vector<HostStep>& all() const { return candidates_; }
  const Uses& UsesOf(ValueId root) const {
    static const Uses none{};
    const auto found = uses_.find(root);
    return found == uses_.end() ? none : found->second;
  }
  // Where a step first needs the weights, as an index in the line of its ops.
  int32_t Need(const HostStep& c) const {
    const Uses& uses = UsesOf(c.weights);
    return uses.first ? uses.first->line : INT32_MAX;
  }
  const Phase& phase(int32_t index) const { return *phases_[static_cast<size_t>(index)]; }
  int32_t num_phases() const { return static_cast<int32_t>(phases_.size()); }

 private:
  void ReadUses() {
    int32_t line = 0;
    for (int32_t p = 0; p < num_phases(); ++p) {
      const Phase& phase = *phases_[static_cast<size_t>(p)];
      for (size_t i = 0; i < phase.ops.size(); ++i) {
        const Op& op = program_.op(phase.ops[i]);
        const auto index = static_cast<int32_t>(i);
        if (IsUpdate(op)) {
          candidates_.push_back(
              {op.id, op.units.empty() ? kNone : op.units[0], {p, index, line + index}, kNone, kNone, {}, false, {}});
        } else if (MoveOf(op) != nullptr) {
          ForEachOperand(op, [&](ValueId id) { moves_.insert(id); });
        }
      }
      const auto skip = [](const Op& op) { return op.kind == OpKind::kView || IsUpdate(op) || MoveOf(op) != nullptr; };
      ForEachTouch(program_, phase, skip, [&](const Touch& touch) {
        using How = Touch::How;
        Uses& uses = uses_[touch.root];
        if (touch.how == How::kLeaves) {
          uses.restless = true;
          return;
        }
        const Value& value = program_.value(touch.value);
        const bool makes = touch.how == How::kMakes;
        if (makes && !uses.first) {
          uses.placed = true;
          uses.filled =
              value.root == value.id || (value.offset == Dim(0) && value.type == program_.value(value.root).type);
        }
        const Spot here{p, touch.at, line + touch.at};
        if (!uses.first) uses.first = here;
        uses.last = here;
        const bool brings = IsWait(program_.op(phase.ops[touch.at])) && touch.how == How::kReads &&
                            (value.placed || value.root == value.id);
        if (makes || touch.how == How::kWrites || brings) uses.last_write = here;
      });
      line += static_cast<int32_t>(phase.ops.size());
      for (const std::vector<ValueId>* handed : {&phase.takes, &phase.gives}) {
        for (ValueId id : *handed) uses_[program_.RootOf(id)].restless = true;
      }
    }
  }

  bool Repeated(const std::optional<Spot>& spot) const { return spot && repeated_[static_cast<size_t>(spot->phase)]; }

  std::string WhyNot(HostStep& c) {
    const Op& op = program_.op(c.update);
    const bool pending = IsPending(op);
    if (StepsOnHost(op)) return "it is made on the host already";
    if (op.args.size() < FlatOperands(op) || c.unit == kNone) return "its op is not complete";
    if (Repeated(c.spot)) return "it runs more than once";
    const auto name = [](ValueId id) { return "%" + std::to_string(id); };
    for (size_t i = 0; i < FlatOperands(op); ++i) {
      const ValueId id = op.args[i].value;
      if (program_.RootOf(id) != id) return name(id) + " is a part of a larger storage";
      if (moves_.contains(id)) return name(id) + " leaves memory in this program already";
      const auto state = states_.find(id);
      const Uses& uses = UsesOf(id);
      if (uses.restless) return name(id) + " is in a transfer, or handed on, from one phase to the next";
      if (Repeated(uses.first) || Repeated(uses.last_write) || Repeated(uses.last))
        return name(id) + " is first or last used in a phase that repeats";
      const bool later = uses.last && uses.last->line > c.spot.line;
      if (!pending && later) return name(id) + " is used after the optimizer step";
      if (i == 1) {
        c.grad = id;
        if (state != states_.end() && state->second->persistent) return "its gradient lasts from step to step";
        if (state == states_.end() && (pending || program_.value(id).kind != ValueKind::kResult))
          return "its gradient is no state of the step";
        if (state == states_.end() && phase(c.spot.phase).kind == PhaseKind::kStep)
          return "its gradient is made by the optimizer step itself";
        if (!uses.first || !uses.last_write || !uses.placed) return "its gradient is read before it is written";
        const Type& type = program_.value(id).type;
        c.begin = !uses.filled;
        if (c.begin && !(type == FlatType(type.dtype, program_.units[static_cast<size_t>(c.unit)].numel)))
          return "its gradient is made in parts";
        continue;
      }
      if (state == states_.end() || !state->second->persistent || state->second->out)
        return name(id) + " is no state that lies in memory";
      if (i == 0) {
        c.weights = id;
      } else {
        c.states.push_back(id);
        if (uses.first) return name(id) + " is used by more than the optimizer step";
      }
    }
    return "";
  }

  const Program& program_;
  std::vector<const Phase*> phases_;
  std::vector<bool> repeated_;
  std::unordered_map<ValueId, const State*> states_;
  std::unordered_map<ValueId, Uses> uses_;
  std::unordered_set<ValueId> moves_;
  std::vector<HostStep> candidates_;
};

// Puts the moves in, phase by phase.
class HostWriter {
 public:
  HostWriter(Program& program, const HostSteps& steps, std::vector<const HostStep*> chosen)
      : program_(program), steps_(steps), chosen_(std::move(chosen)) {
    std::stable_sort(chosen_.begin(), chosen_.end(),
                     [&](const HostStep* a, const HostStep* b) { return steps_.Need(*a) < steps_.Need(*b); });
  }

  void Run() {
    Updates();
    Weights();
    for (const HostStep* c : chosen_) Gradient(*c);
    for (auto& [phase, editor] : editors_) editor.Finish();
    for (State& state : program_.states) {
      for (const HostStep* c : chosen_) {
        const bool its = state.value == c->weights || state.value == c->grad ||
                         std::find(c->states.begin(), c->states.end(), state.value) != c->states.end();
        state.out = state.out || its;
      }
    }
  }

 private:
  // Pending ones at the head of the step, in the order of need; the others wait for their gradient, and in a
  // micro-batch stand where the next one was, so that the copy has time.
  void Updates() {
    std::map<int32_t, std::vector<const HostStep*>> by_phase;
    for (const HostStep* c : chosen_) by_phase[c->spot.phase].push_back(c);
    for (auto& [phase, list] : by_phase) {
      PhaseEditor& editor = Of(phase);
      const bool pending = IsPending(program_.op(list[0]->update));
      const bool streams = !pending && steps_.phase(phase).kind == PhaseKind::kMicroBatch;
      if (!pending) std::sort(list.begin(), list.end(), [](auto* a, auto* b) { return a->spot.line < b->spot.line; });
      for (size_t k = 0; k < list.size(); ++k) {
        const HostStep& c = *list[k];
        program_.op(c.update).lane = Lane::kHost;
        editor.Remove(c.spot.index);
        const int32_t next = k + 1 < list.size() ? list[k + 1]->spot.index : editor.size();
        const int32_t at = pending ? 0 : streams ? next : c.spot.index;
        if (!pending) Put(editor, at, Move(OpKind::kOffloadWait, c.grad, c.unit, Part::kUpdate));
        Put(editor, at, c.update);
      }
    }
  }

  // Here from before their first use to their last. The copy starts one unit ahead.
  void Weights() {
    std::optional<Spot> before;
    for (const HostStep* c : chosen_) {
      const std::optional<Spot>& first = steps_.UsesOf(c->weights).first;
      if (!first) continue;
      const bool same = before && before->phase == first->phase;
      Of(first->phase)
          .Before(same ? before->index : 0, Move(OpKind::kReloadStart, c->weights, c->unit, PartAt(*first)));
      before = first;
    }
    for (const HostStep* c : chosen_) {
      const Uses& uses = steps_.UsesOf(c->weights);
      if (!uses.first) continue;
      Before(*uses.first, OpKind::kReloadWait, c->weights, c->unit);
      After(*uses.last, OpKind::kOffloadStart, c->weights, c->unit, "clean");
      After(*uses.last, OpKind::kOffloadWait, c->weights, c->unit);
    }
  }

  // Memory from its first write on; out as soon as it is whole.
  void Gradient(const HostStep& c) {
    const Uses& uses = steps_.UsesOf(c.grad);
    if (program_.value(c.grad).kind == ValueKind::kState) {
      Before(*uses.first, OpKind::kReloadStart, c.grad, c.unit, "fresh");
      Before(*uses.first, OpKind::kReloadWait, c.grad, c.unit);
      if (c.begin) {
        Op& begin = program_.AddOp(OpKind::kGradBegin);
        begin.units = {c.unit};
        begin.part = PartAt(*uses.first);
        program_.AddPlaced(begin, program_.value(c.grad).type, c.grad, Dim(0));
        Of(uses.first->phase).Before(uses.first->index, begin.id);
      }
    }
    After(*uses.last_write, OpKind::kOffloadStart, c.grad, c.unit);
    if (IsPending(program_.op(c.update)))
      Of(steps_.num_phases() - 1).AtEnd(Move(OpKind::kOffloadWait, c.grad, c.unit, Part::kUpdate));
  }

  PhaseEditor& Of(int32_t phase) {
    auto found = editors_.find(phase);
    if (found == editors_.end())
      found = editors_.try_emplace(phase, program_, *program_.FindPhase(steps_.phase(phase).name)).first;
    return found->second;
  }
  static void Put(PhaseEditor& editor, int32_t index, OpId op) {
    index < editor.size() ? editor.Before(index, op) : editor.AtEnd(op);
  }
  void Before(Spot at, OpKind kind, ValueId root, UnitId unit, const char* how = nullptr) {
    Of(at.phase).Before(at.index, Move(kind, root, unit, PartAt(at), how));
  }
  void After(Spot at, OpKind kind, ValueId root, UnitId unit, const char* how = nullptr) {
    Of(at.phase).After(at.index, Move(kind, root, unit, PartAt(at), how));
  }
  Part PartAt(Spot spot) { return Of(spot.phase).op(spot.index).part; }
  OpId Move(OpKind kind, ValueId root, UnitId unit, Part part, const char* how = nullptr) {
    Op& op = program_.AddOp(kind);
    op.args = {Arg::Of(root)};
    op.units = {unit};
    op.part = part;
    if (how != nullptr) op.SetAttr(how, Arg::Bool(true));
    return op.id;
  }

  Program& program_;
  const HostSteps& steps_;
  std::vector<const HostStep*> chosen_;  // in the order in which a step needs their weights
  std::map<int32_t, PhaseEditor> editors_;
};

}  // namespace

Result<std::vector<HostUnit>> HostUnits(const Program& program) {
  const HostSteps steps(program);
  std::vector<const HostStep*> able;
  for (const HostStep& c : steps.all()) {
    if (c.why_not.empty()) able.push_back(&c);
  }
  std::stable_sort(able.begin(), able.end(),
                   [&](const HostStep* a, const HostStep* b) { return steps.Need(*a) < steps.Need(*b); });
  std::vector<HostUnit> units;
  for (const HostStep* c : able) {
    HostUnit& unit = units.emplace_back(HostUnit{c->unit, 0});
    std::vector<ValueId> storages = c->states;
    storages.push_back(c->weights);
    for (ValueId id : storages) {
      INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(id).type));
      unit.bytes += bytes;
    }
  }
  return units;
}

std::vector<UnitId> LastUnits(const std::vector<HostUnit>& units, double share) {
  double all = 0, sum = 0;
  for (const HostUnit& unit : units) all += static_cast<double>(unit.bytes);
  std::vector<UnitId> out;
  for (size_t i = units.size(); i-- > 0;) {
    const auto bytes = static_cast<double>(units[i].bytes);
    if (sum + bytes / 2 > share * all) break;
    sum += bytes;
    out.push_back(units[i].unit);
  }
  return out;
}

Status StepOnHost(Program& program, const std::vector<UnitId>& units) {
  const HostSteps steps(program);
  std::vector<const HostStep*> chosen;
  for (UnitId unit : units) {
    const auto found =
        std::find_if(steps.all().begin(), steps.all().end(), [&](const HostStep& c) { return c.unit == unit; });
    if (found == steps.all().end()) return MakeError("u", unit, " has no optimizer step");
    if (!found->why_not.empty())
      return MakeError("the optimizer step of u", unit, " cannot be made on the host: ", found->why_not);
    chosen.push_back(&*found);
  }
  HostWriter(program, steps, chosen).Run();
  std::string text = std::to_string(chosen.size()) + " of " + std::to_string(steps.all().size()) + " units:";
  for (const HostStep* c : chosen) text += " u" + std::to_string(c->unit);
  program.SetMeta("host_update", text);
  return Ok{};
}

Result<bool> HostUpdate(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::vector<HostUnit> able, HostUnits(program));
  INTERLACE_ASSIGN(const double share, options.Number("share", 1.0));
  if (share > 1) return MakeError("option share: ", share, " is more than all; give 0 to 1");
  const std::string list = options.Text("units", "all");
  std::vector<UnitId> units = LastUnits(able, share);
  if (list != "all") {
    INTERLACE_ASSIGN(units, ReadUnits(program, list, "option units"));
  }
  if (units.empty()) return false;
  INTERLACE_TRY(StepOnHost(program, units));
  return true;
}

}  // namespace interlace
