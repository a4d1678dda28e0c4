// The program as a whole: phases and levels, names, symbols, the layout of units, constants.
#include <algorithm>
#include <map>
#include <set>

#include "base/append.h"
#include "base/suggest.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

class Whole {
 public:
  Whole(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  // False: the run order does not hold.
  bool Run() {
    const bool runs = Phases();
    Names();
    Dims();
    Stage();
    Units();
    Cuts();
    Consts();
    return runs;
  }

 private:
  bool Phases() {
    if (program_.phases.empty())
      report_.AtProgram("the program has no phase; if it came from a file, the file seems to be cut");
    if (program_.inputs.size() % static_cast<size_t>(program_.width) != 0) {
      report_.AtProgram("a run of " + std::to_string(program_.width) +
                        " micro-batches has inputs for each of them, not " + std::to_string(program_.inputs.size()));
    }
    int64_t micro_batch_phases = 0;
    for (const Phase& phase : program_.phases) micro_batch_phases += phase.kind == PhaseKind::kMicroBatch;
    const bool whole = program_.phases.size() == 1 || program_.stage;  // a stage has its parts of a micro-batch apart
    if (program_.level == Level::kCaptured &&
        (micro_batch_phases != static_cast<int64_t>(program_.phases.size()) || !whole)) {
      for (size_t i = 1; i < program_.phases.size(); ++i) {
        report_.AtPhase(program_.phases[i], "a captured program has one phase, that of a micro-batch; " +
                                                InQuotes(program_.phases[i].name) + " comes with later passes");
      }
      if (micro_batch_phases == 0 && !program_.phases.empty())
        report_.AtPhase(program_.phases[0], "a captured program's phase is of a micro-batch, not 'once' a step");
      return false;
    }
    if (program_.order.empty() && micro_batch_phases > 1) {
      report_.AtPhase(program_.phases[0],
                      "with several micro-batch phases the run order must be said: lines such as "
                      "'run " +
                          program_.phases[0].name + " 0' behind 'step'");
      return false;
    }
    return Order();
  }

  // Every phase runs, every micro-batch is run, and none twice by one phase.
  bool Order() {
    std::map<const Phase*, std::set<int64_t>> done;
    std::set<int64_t> all;
    bool sound = true;
    for (size_t i = 0; i < program_.order.size(); ++i) {
      const OrderEntry& run = program_.order[i];
      const Phase* phase = program_.FindPhase(run.phase);
      if (phase == nullptr) {
        std::vector<std::string_view> known;
        for (const Phase& p : program_.phases) known.push_back(p.name);
        report_.AtRun(i, "there is no phase " + InQuotes(run.phase) + DidYouMean(run.phase, known));
        return false;
      }
      if ((phase->kind == PhaseKind::kStep) != (run.first == kNone)) {
        report_.AtRun(
            i, phase->kind == PhaseKind::kStep
                   ? "phase " + InQuotes(run.phase) + " runs once a step and has no micro-batch"
                   : "phase " + InQuotes(run.phase) + " runs for a micro-batch; say which: 'run " + run.phase + " 0'");
        return false;
      }
      if (run.first == kNone) {
        if (!done.try_emplace(phase).second) {
          report_.AtRun(i, "phase " + InQuotes(run.phase) + " runs twice in a step");
          return false;
        }
        continue;
      }
      const int64_t end = run.first + run.count * program_.width;
      if (run.first % program_.width != 0 || end > program_.accumulation) {
        report_.AtRun(i, "micro-batches " + std::to_string(run.first) + " to " + std::to_string(end - 1) +
                             " are not runs of a step of " + std::to_string(program_.accumulation) +
                             (program_.width > 1 ? " by " + std::to_string(program_.width) : ""));
        return false;
      }
      for (int64_t m = run.first; m < end; m += program_.width) {
        all.insert(m);
        if (done[phase].insert(m).second) continue;
        report_.AtRun(i, "phase " + InQuotes(run.phase) + " runs micro-batch " + std::to_string(m) + " twice");
        return false;
      }
    }
    if (program_.order.empty()) return true;
    for (const Phase& phase : program_.phases) {
      if (done.count(&phase) > 0) continue;
      sound = false;
      report_.AtPhase(phase, "phase " + InQuotes(phase.name) + " is never run; add a line 'run " + phase.name +
                                 (phase.kind == PhaseKind::kStep ? "'" : " 0'"));
    }
    for (int64_t m = 0; m < program_.accumulation; m += program_.width) {
      if (all.count(m) > 0) continue;
      report_.AtProgram("micro-batch " + std::to_string(m) + " of " + std::to_string(program_.accumulation) +
                        " is never run; add it to a 'run' line");
      return false;
    }
    return sound;
  }

  void Names() {
    std::set<std::string_view> names;
    for (const Param& param : program_.params) {
      if (!names.insert(param.name).second)
        report_.AtValue(param.value, "two parameters are named " + InQuotes(param.name));
      for (const std::string& alias : param.aliases) {
        if (!names.insert(alias).second) report_.AtValue(param.value, "two parameters are named " + InQuotes(alias));
      }
    }
    std::set<std::pair<UnitId, std::string_view>> roles;
    for (const State& state : program_.states) {
      if (!roles.emplace(state.unit, state.role).second) {
        report_.AtValue(state.value, "two states have the role " + InQuotes(state.role) +
                                         (state.unit == kNone ? "" : " of unit u" + std::to_string(state.unit)));
      }
    }
  }

  // Symbols must be declared, and none but ranks is left in a scheduled program.
  void Dims() {
    if (program_.level == Level::kScheduled && !program_.symbols.empty()) {
      report_.AtProgram("a scheduled program has numbers only, but symbol " + InQuotes(program_.symbols[0].name) +
                        " is still open; bind it");
    }
    std::set<std::string> known;
    for (const Symbol& symbol : program_.symbols) known.insert(symbol.name);
    for (const Axis& axis : program_.mesh) known.insert("rank_" + axis.name);
    std::vector<bool> checked;
    auto unknown = [&](const Dim& dim) -> std::string {
      if (dim.is_const()) return "";
      if (checked.size() <= static_cast<size_t>(dim.expr)) checked.resize(dim.expr + 1, false);
      if (checked[dim.expr]) return "";
      for (const std::string& name : program_.dims.SymbolsOf(dim)) {
        if (known.count(name) == 0) return name;
      }
      checked[dim.expr] = true;
      return "";
    };
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (!program_.HasValue(id)) continue;
      const Value& value = program_.value(id);
      std::string name = unknown(value.offset);
      for (const Dim& dim : value.type.sizes) name = name.empty() ? unknown(dim) : name;
      for (const Dim& dim : value.type.strides) name = name.empty() ? unknown(dim) : name;
      if (name.empty()) continue;
      std::string what = "symbol " + InQuotes(name) + " is not declared";
      if (value.def != kNone) {
        report_.AtOp(program_.op(value.def), what, id);
      } else {
        report_.AtValue(id, what);
      }
    }
  }

  // Stages of unlike ranks: the axis has all of them, and the other axes have this stage's.
  void Stage() {
    if (!program_.stage || !program_.stage->unlike()) return;
    const StageOf& stage = *program_.stage;
    int64_t all = 0, own = 1;
    for (const int64_t ranks : stage.ranks) all += ranks;
    for (const Axis& axis : program_.mesh) {
      if (axis.name != stage.axis && __builtin_mul_overflow(own, axis.size, &own)) own = 0;
    }
    const int64_t said = stage.ranks[static_cast<size_t>(stage.index)];
    if (all != program_.AxisSize(stage.axis)) {
      report_.AtProgram(Joined("its stages have ", all, " ranks, and axis ", stage.axis, " has ",
                               program_.AxisSize(stage.axis), "; write 'mesh ", stage.axis, " ", all, "'"));
    }
    if (own != said) {
      report_.AtProgram(Joined("stage ", stage.index, " has ", said, " ranks, and its other axes have ", own));
    }
  }

  // ---- units ----
  // Axes exist, each once, and those of one list are neighbours in the mesh.
  void UnitAxes(const Unit& unit) {
    std::set<std::string_view> seen;
    for (const std::string* axes : {&unit.axis, &unit.replicas}) {
      size_t before = program_.mesh.size();
      for (std::string_view axis : AxesOf(*axes)) {
        size_t at = 0;
        while (at < program_.mesh.size() && program_.mesh[at].name != axis) ++at;
        if (at == program_.mesh.size()) {
          report_.AtUnit(unit.id, "axis " + InQuotes(axis) + " is not in the mesh");
        } else if (!seen.insert(axis).second) {
          report_.AtUnit(unit.id, "axis " + InQuotes(axis) + " is named twice");
        } else if (before < program_.mesh.size() && at != before + 1) {
          report_.AtUnit(unit.id,
                         "axes written together must follow one another in the mesh, and " + *axes + " do not");
        }
        before = at;
      }
    }
  }

  void Units() {
    if (program_.level == Level::kCaptured && !program_.units.empty()) {
      report_.AtUnit(0, "a captured program has no units; its level is sharded");
    }
    for (const Unit& unit : program_.units) {
      int64_t axis = program_.AxisSize(unit.axis), total = 0;
      UnitAxes(unit);
      if (unit.shard < 0 || unit.shard % kUnitAlignment != 0) {
        report_.AtUnit(unit.id, "the shard of u" + std::to_string(unit.id) + ", " + std::to_string(unit.shard) +
                                    " elements, must be a multiple of " + std::to_string(kUnitAlignment));
      }
      if (__builtin_mul_overflow(unit.shard, axis, &total) || total != unit.numel) {
        report_.AtUnit(unit.id, Joined("numel of u", unit.id, " must be shard times the size of ", unit.axis, ", ",
                                       unit.shard, " * ", axis, ", not ", unit.numel));
      }
      const int64_t copies = program_.AxisSize(unit.replicas);
      if (unit.part != 0 && (unit.part % kUnitAlignment != 0 || unit.part != unit.shard / copies ||
                             unit.part * copies != unit.shard || copies < 2)) {
        report_.AtUnit(unit.id, Joined("the part of u", unit.id, " must be its shard over the replicas, ", unit.shard,
                                       " / ", copies, ", in multiples of ", kUnitAlignment, ", not ", unit.part));
      }
    }
    std::map<UnitId, std::vector<const Param*>> layout;
    for (const Param& param : program_.params) {
      if (param.unit != kNone) layout[param.unit].push_back(&param);
    }
    for (auto& [id, params] : layout) Layout(program_.units[id], params);
    for (const State& state : program_.states) {
      if (state.unit == kNone) continue;
      const Unit& unit = program_.units[state.unit];
      auto count = NumericElements(program_.value(state.value).type);
      if (count && *count != unit.shard && *count != unit.numel && *count != unit.own()) {
        report_.AtValue(state.value, Joined("a state of u", unit.id, " has ", unit.shard, " (its shard) or ",
                                            unit.numel, " elements, not ", *count));
      }
    }
  }

  // ---- cuts ----

  void Cuts() {
    std::map<UnitId, const Param*> first;  // of a unit
    for (const Param& param : program_.params) {
      std::set<std::string_view> axes;
      for (const Cut& cut : param.cuts) {
        const bool first_over_axis = axes.insert(cut.axis).second;
        if (const std::string problem = CutProblem(param, cut); !problem.empty()) {
          report_.AtValue(param.value, "parameter '" + param.name + "' " + problem);
        } else if (!first_over_axis) {
          report_.AtValue(param.value, "parameter '" + param.name + "' is cut over " + cut.axis + " twice");
        }
      }
      if (param.unit == kNone) continue;
      const Param& other = *first.try_emplace(param.unit, &param).first->second;
      std::set<std::string_view> others;
      for (const Cut& cut : other.cuts) others.insert(cut.axis);
      if (axes == others) continue;
      report_.AtValue(param.value, Joined("parameters '", other.name, "' and '", param.name, "' of u", param.unit,
                                          " are cut over different axes; give them units of their own, so that a norm "
                                          "counts each element once"));
    }
  }

  std::string CutProblem(const Param& param, const Cut& cut) const {
    if (std::none_of(program_.mesh.begin(), program_.mesh.end(), [&](const Axis& a) { return a.name == cut.axis; })) {
      return "is cut over " + InQuotes(cut.axis) + ", which is not an axis of the mesh";
    }
    if (param.unit != kNone) {
      const Unit& unit = program_.units[param.unit];
      for (const std::string* list : {&unit.axis, &unit.replicas}) {
        for (std::string_view axis : AxesOf(*list)) {
          if (axis != cut.axis) continue;
          return "is cut over " + cut.axis + ", but u" + std::to_string(unit.id) + " is " +
                 (list == &unit.axis ? "sharded" : "replicated") + " over it";
        }
      }
    }
    const std::vector<Dim>& sizes = program_.value(param.value).type.sizes;
    if (cut.dim < 0 || cut.dim >= static_cast<int64_t>(sizes.size())) {
      return "is cut along dimension " + std::to_string(cut.dim) + ", but has " + std::to_string(sizes.size()) +
             (sizes.size() == 1 ? " dimension" : " dimensions");
    }
    const Dim& size = sizes[static_cast<size_t>(cut.dim)];
    if (size.is_const() && size.value % cut.blocks != 0) {
      return "has " + std::to_string(size.value) + " elements along dimension " + std::to_string(cut.dim) +
             ", which are not pieces of " + std::to_string(cut.blocks) + " blocks";
    }
    return "";
  }

  void Layout(const Unit& unit, std::vector<const Param*>& params) {
    std::stable_sort(params.begin(), params.end(),
                     [](const Param* a, const Param* b) { return a->unit_offset < b->unit_offset; });
    int64_t used = 0;
    const Param* before = nullptr;
    for (const Param* param : params) {
      const Type& type = program_.value(param->value).type;
      std::string name = "parameter '" + param->name + "'";
      if (type.dtype != unit.dtype) report_.AtValue(param->value, name + " has another dtype than its unit");
      if (param->unit_offset % kUnitAlignment != 0 || param->unit_offset < 0) {
        report_.AtValue(param->value, Joined(name, " starts at element ", param->unit_offset, " of u", unit.id,
                                             "; it must be a multiple of ", kUnitAlignment));
      }
      auto count = NumericElements(type);
      if (!count) {
        report_.AtValue(param->value, name + " lies in a unit, so its sizes must be numbers");
        continue;
      }
      if (before != nullptr && param->unit_offset < used) {
        report_.AtValue(param->value, name + " overlaps '" + before->name + "' in u" + std::to_string(unit.id));
      }
      int64_t end = 0;
      if (__builtin_add_overflow(param->unit_offset, *count, &end) || end > unit.numel) {
        report_.AtValue(param->value, Joined(name, " ends beyond u", unit.id, ", which has ", unit.numel, " elements"));
        continue;
      }
      if (end > used) {
        used = end;
        before = param;
      }
    }
  }

  static bool CountNumbers(const Arg& arg, int64_t& count) {
    if (arg.kind == Arg::Kind::kList) {
      return std::all_of(arg.list.begin(), arg.list.end(), [&](const Arg& item) { return CountNumbers(item, count); });
    }
    ++count;
    return arg.kind == Arg::Kind::kFloat || arg.kind == Arg::Kind::kBool ||
           (arg.kind == Arg::Kind::kInt && arg.integer.is_const());
  }

  void Consts() {
    for (const Const& constant : program_.consts) {
      int64_t count = 0;
      auto wanted = NumericElements(program_.value(constant.value).type);
      if (!CountNumbers(constant.data, count)) {
        report_.AtValue(constant.value, "constant '" + constant.name + "' holds something other than numbers");
      } else if (!wanted || count != *wanted) {
        report_.AtValue(constant.value, "constant '" + constant.name + "' lists " + std::to_string(count) +
                                            " numbers; its type must have as many elements");
      }
    }
  }

  const Program& program_;
  VerifyReport& report_;
};

}  // namespace

bool VerifyLayout(const Program& program, VerifyReport& report) {
  return Whole(program, report).Run();
}

}  // namespace interlace
