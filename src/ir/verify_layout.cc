// The program as a whole: phases and levels, names, symbols, the layout of units, constants.
#include <algorithm>
#include <map>
#include <set>

#include "base/suggest.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

class Whole {
 public:
  Whole(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  void Run() {
    Phases();
    Names();
    Dims();
    Units();
    Consts();
  }

 private:
  void Phases() {
    const std::vector<std::string_view> known = {"micro_batch", "micro_batch.first", "micro_batch.middle",
                                                 "micro_batch.last", "update"};
    if (program_.phases.empty())
      report_.AtProgram("the program has no phase; if it came from a file, the file seems to be cut");
    bool accumulates = program_.Runs() > 1;
    const std::string runs =
        std::to_string(program_.Runs()) + (program_.width > 1 ? " runs of micro-batches" : " micro-batches");
    if (program_.inputs.size() % static_cast<size_t>(program_.width) != 0) {
      report_.AtProgram("a run of " + std::to_string(program_.width) +
                        " micro-batches has inputs for each of them, not " + std::to_string(program_.inputs.size()));
    }
    for (const Phase& phase : program_.phases) {
      if (std::find(known.begin(), known.end(), phase.name) == known.end()) {
        report_.AtPhase(phase, "unknown phase " + InQuotes(phase.name) + DidYouMean(phase.name, known));
      } else if (program_.level == Level::kCaptured && phase.name != "micro_batch") {
        report_.AtPhase(phase, "a captured program has the phase micro_batch only, not " + InQuotes(phase.name));
      } else if (phase.name != "update" && (phase.name != "micro_batch") != accumulates) {
        report_.AtPhase(phase, "with " + runs + " a step, the phases are " +
                                   (accumulates ? "micro_batch.first, .middle, .last" : "micro_batch alone") +
                                   ", not " + InQuotes(phase.name));
      }
    }
    if (program_.FindPhase("micro_batch.first") == nullptr && program_.FindPhase("micro_batch.last") == nullptr) return;
    std::vector<std::string> needed = {"micro_batch.first", "micro_batch.last"};
    if (program_.Runs() > 2) needed.push_back("micro_batch.middle");
    for (const std::string& name : needed) {
      if (program_.FindPhase(name) == nullptr) {
        report_.AtPhase(program_.phases[0], "phase " + InQuotes(name) + " is missing: a step has " + runs);
      }
    }
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

  // ---- units ----
  void Units() {
    if (program_.level == Level::kCaptured && !program_.units.empty()) {
      report_.AtUnit(0, "a captured program has no units; its level is sharded");
    }
    for (const Unit& unit : program_.units) {
      int64_t axis = program_.AxisSize(unit.axis), total = 0;
      bool known =
          std::any_of(program_.mesh.begin(), program_.mesh.end(), [&](const Axis& a) { return a.name == unit.axis; });
      if (!known) report_.AtUnit(unit.id, "axis " + InQuotes(unit.axis) + " is not in the mesh");
      if (unit.shard < 0 || unit.shard % kUnitAlignment != 0) {
        report_.AtUnit(unit.id, "the shard of u" + std::to_string(unit.id) + ", " + std::to_string(unit.shard) +
                                    " elements, must be a multiple of " + std::to_string(kUnitAlignment));
      }
      if (__builtin_mul_overflow(unit.shard, axis, &total) || total != unit.numel) {
        report_.AtUnit(unit.id, "numel of u" + std::to_string(unit.id) + " must be shard times the size of " +
                                    unit.axis + ", " + std::to_string(unit.shard) + " * " + std::to_string(axis) +
                                    ", not " + std::to_string(unit.numel));
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
      if (count && *count != unit.shard && *count != unit.numel) {
        report_.AtValue(state.value, "a state of u" + std::to_string(unit.id) + " has " + std::to_string(unit.shard) +
                                         " (its shard) or " + std::to_string(unit.numel) + " elements, not " +
                                         std::to_string(*count));
      }
    }
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
        report_.AtValue(param->value, name + " starts at element " + std::to_string(param->unit_offset) + " of u" +
                                          std::to_string(unit.id) + "; it must be a multiple of " +
                                          std::to_string(kUnitAlignment));
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
        report_.AtValue(param->value, name + " ends beyond u" + std::to_string(unit.id) + ", which has " +
                                          std::to_string(unit.numel) + " elements");
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

void VerifyLayout(const Program& program, VerifyReport& report) {
  Whole(program, report).Run();
}

}  // namespace interlace
