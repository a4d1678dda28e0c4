// Structural rules. Meaning is checked only in a program whose structure holds, so the other parts may follow ids
// without asking.
#include "ir/verifier.h"

#include <algorithm>

#include "base/append.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

class Structure {
 public:
  Structure(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  // False when ids are so broken that the program cannot even be printed; `fatal` says what.
  bool Printable(std::string& fatal) const {
    std::vector<bool> seen(program_.num_ops(), false);
    for (const Phase& phase : program_.phases) {
      for (OpId id : phase.ops) {
        if (id < 0 || id >= program_.num_ops()) {
          fatal = "phase '" + phase.name + "' lists op " + std::to_string(id) + ", which does not exist";
          return false;
        }
        if (seen[id]) {
          fatal = "op " + std::to_string(id) + " (" + program_.op(id).name + ") stands in the phases twice";
          return false;
        }
        seen[id] = true;
        if (program_.op(id).id != id) {
          fatal = "op " + std::to_string(id) + " has the wrong id " + std::to_string(program_.op(id).id);
          return false;
        }
      }
    }
    return TablesHold(fatal);
  }

  void Run() {
    Tables();
    available_.assign(program_.num_values(), kNever);
    released_by_.assign(program_.num_values(), kNone);
    phase_of_value_.assign(program_.num_values(), nullptr);
    std::vector<OpId> definitions(program_.num_values(), kNone);
    for (const Phase& phase : program_.phases) {
      for (ValueId id : phase.Incoming()) {
        if (phase_of_value_[id] != nullptr) report_.AtPhase(phase, "%" + std::to_string(id) + " is taken twice");
        phase_of_value_[id] = &phase;
      }
      for (OpId op : phase.ops) {
        for (ValueId id : program_.op(op).results) {
          if (id == kNone || !program_.HasValue(id)) continue;
          phase_of_value_[id] = &phase;
          if (definitions[id] != kNone) report_.AtOp(program_.op(op), Joined("%", id, " is defined twice"), id);
          definitions[id] = op;
        }
      }
    }
    for (size_t i = 0; i < program_.phases.size(); ++i) RunPhase(program_.phases[i], static_cast<int32_t>(i));
  }

 private:
  static constexpr int32_t kNever = -2, kAlways = -1;  // otherwise the index of the phase that made it available

  bool TablesHold(std::string& fatal) const {
    auto check = [&](ValueId id, ValueKind kind, std::string_view table) {
      if (program_.HasValue(id) && program_.value(id).kind == kind) return true;
      fatal = "the table of " + std::string(table) + " names %" + std::to_string(id) + ", which is none";
      return false;
    };
    for (const Param& p : program_.params) {
      if (!check(p.value, ValueKind::kParam, "parameters")) return false;
    }
    for (const Buffer& b : program_.buffers) {
      if (!check(b.value, ValueKind::kBuffer, "buffers")) return false;
    }
    for (const Input& i : program_.inputs) {
      if (!check(i.value, ValueKind::kInput, "inputs")) return false;
    }
    for (const Const& c : program_.consts) {
      if (!check(c.value, ValueKind::kConst, "constants")) return false;
    }
    for (const State& s : program_.states) {
      if (!check(s.value, ValueKind::kState, "states")) return false;
    }
    for (const Phase& phase : program_.phases) {
      for (ValueId id : phase.Incoming()) {
        if (!check(id, ValueKind::kTake, "takes and loads")) return false;
      }
    }
    return true;
  }

  void Tables() {
    auto table = [&](const auto& entries) {
      for (const auto& entry : entries) Declared(entry.value);
    };
    table(program_.params);
    table(program_.buffers);
    table(program_.inputs);
    table(program_.consts);
    table(program_.states);
    for (const Phase& phase : program_.phases) {
      for (ValueId id : phase.Incoming()) Declared(id);
    }
    int32_t next = 0;
    for (const Unit& unit : program_.units) {
      if (unit.id != next++) report_.AtUnit(next - 1, "unit ids count up from 0");
    }
    for (const Param& p : program_.params) {
      bool unit_ok = p.unit == kNone || (p.unit >= 0 && p.unit < static_cast<UnitId>(program_.units.size()));
      if (!unit_ok) report_.AtValue(p.value, "this parameter's unit u" + std::to_string(p.unit) + " does not exist");
      bool group_ok = p.group == kNone || (p.group >= 0 && p.group < static_cast<int32_t>(program_.groups.size()));
      if (!group_ok) report_.AtValue(p.value, "this parameter's group " + std::to_string(p.group) + " does not exist");
    }
    for (const State& s : program_.states) {
      bool unit_ok = s.unit == kNone || (s.unit >= 0 && s.unit < static_cast<UnitId>(program_.units.size()));
      if (!unit_ok) report_.AtValue(s.value, "this state's unit u" + std::to_string(s.unit) + " does not exist");
    }
  }

  // The root, or the value itself where the root does not exist (which is reported at its definition).
  ValueId SafeRoot(ValueId id) const {
    ValueId root = program_.RootOf(id);
    return program_.HasValue(root) ? root : id;
  }

  // Types and places that do not depend on order.
  std::string TypeProblem(const Value& value) const {
    if (value.type.sizes.size() != value.type.strides.size()) return "another number of strides than of sizes";
    for (const Dim& size : value.type.sizes) {
      if (size.is_const() && size.value < 0) return "the size " + std::to_string(size.value) + " is negative";
    }
    Result<int64_t> bytes = program_.StorageBytes(value.type);
    if (!bytes.ok() && bytes.error().message.find("bind") == std::string::npos) return bytes.error().message;
    return "";
  }
  std::string PlaceProblem(const Value& value) const {
    if (value.root == value.id) return value.placed ? "a value cannot be placed into itself" : "";
    if (!program_.HasValue(value.root)) return "its storage %" + std::to_string(value.root) + " does not exist";
    if (program_.RootOf(value.root) != value.root) {
      return "a place must name the root of a storage; %" + std::to_string(value.root) + " is itself placed in %" +
             std::to_string(program_.RootOf(value.root));
    }
    Status fits = CheckPlace(program_, value);
    return fits.ok() ? "" : fits.error().message;
  }

  void Declared(ValueId id) {
    const Value& value = program_.value(id);
    std::string problem = TypeProblem(value);
    if (problem.empty()) problem = PlaceProblem(value);
    if (problem.empty() && value.placed)
      problem = "'into' is for results of ops; a declared value lies 'in' its storage";
    if (!problem.empty()) {
      report_.AtValue(id, problem);
      return;
    }
    if (value.root == id) return;
    ValueKind kind = program_.value(value.root).kind;
    if (value.kind != ValueKind::kTake && kind != ValueKind::kState) {
      report_.AtValue(id, "a declared value can lie in a state only; %" + std::to_string(value.root) + " is none");
    }
  }

  void RunPhase(const Phase& phase, int32_t index) {
    const bool micro_batch = phase.kind == PhaseKind::kMicroBatch;
    auto always = [&](const auto& table) {
      for (const auto& entry : table) available_[entry.value] = kAlways;
    };
    if (index == 0) {
      always(program_.params);
      always(program_.buffers);
      always(program_.consts);
      always(program_.states);
    }
    for (const Input& input : program_.inputs) available_[input.value] = micro_batch ? index : kNever;
    phase_ = &phase;
    index_ = index;
    const std::vector<ValueId> incoming = phase.Incoming();
    for (ValueId id : incoming) available_[id] = index;
    for (ValueId id : incoming) {
      const Value& root = program_.value(SafeRoot(id));
      if (available_[root.id] != kAlways && available_[root.id] != index) {
        report_.AtPhase(phase, Joined("%", id, " lies in %", root.id, ", which must be taken too"));
      }
    }
    for (OpId id : phase.ops) RunOp(program_.op(id));
    for (ValueId id : phase.gives) {
      if (!program_.HasValue(id)) {
        report_.AtPhase(phase, "%" + std::to_string(id) + " is given but nothing defines it");
      } else if (std::string problem = UseProblem(id); !problem.empty()) {
        report_.AtPhase(phase, "given: " + problem);
      }
    }
    for (const Carried& save : phase.saves) {
      if (!program_.HasValue(save.value)) {
        report_.AtPhase(phase, "%" + std::to_string(save.value) + " is saved but nothing defines it");
      } else if (std::string problem = UseProblem(save.value); !problem.empty()) {
        report_.AtPhase(phase, "saved as " + save.name + ": " + problem);
      }
    }
  }

  std::string UseProblem(ValueId id) const {
    std::string name = "%" + std::to_string(id);
    if (available_[id] != kAlways && available_[id] != index_) {
      if (program_.value(id).kind == ValueKind::kInput)
        return name + " is an input; only micro-batch phases see inputs";
      const Phase* other = phase_of_value_[id];
      if (other == nullptr) return name + " is used but nothing defines it";
      if (other == phase_) return name + " is used before its definition";
      return name + " belongs to phase '" + other->name + "'; hand it over by gives and takes";
    }
    OpId release = released_by_[SafeRoot(id)];
    if (release != kNone) return Joined(name, " is used after its storage %", program_.RootOf(id), " was released");
    return "";
  }

  void RunOp(const Op& op) {
    if (op.module != kNone && (op.module < 0 || op.module >= static_cast<int32_t>(program_.modules.size()))) {
      report_.AtOp(op, "module " + std::to_string(op.module) + " is not declared");
    }
    if (op.source != kNone && (op.source < 0 || op.source >= static_cast<int32_t>(program_.sources.size()))) {
      report_.AtOp(op, "source " + std::to_string(op.source) + " is not declared");
    }
    for (UnitId unit : op.units) {
      if (unit < 0 || unit >= static_cast<UnitId>(program_.units.size())) {
        report_.AtOp(op, "unit u" + std::to_string(unit) + " is not declared");
      }
    }
    operand_roots_.clear();
    auto use = [&](ValueId id) {
      if (!program_.HasValue(id)) {
        report_.AtOp(op, "%" + std::to_string(id) + " is used but nothing defines it", id);
        return;
      }
      operand_roots_.push_back(SafeRoot(id));
      if (std::string problem = UseProblem(id); !problem.empty()) report_.AtOp(op, problem, id);
    };
    ForEachOperand(op, use);
    for (ValueId id : op.writes) use(id);
    for (const NamedArg& attr : op.attrs) NoValues(op, attr.arg);
    for (size_t i = 0; i < op.results.size(); ++i) RunResult(op, i);
    if (op.kind == OpKind::kRelease) Release(op);
  }

  // Values in attributes would escape renaming and liveness.
  void NoValues(const Op& op, const Arg& arg) {
    if (arg.kind == Arg::Kind::kValue)
      report_.AtOp(op, "an attribute cannot hold a value; make it an argument", arg.value);
    for (const Arg& item : arg.list) NoValues(op, item);
  }

  void RunResult(const Op& op, size_t index) {
    ValueId id = op.results[index];
    if (id == kNone) return;
    if (!program_.HasValue(id)) return report_.AtOp(op, "result %" + std::to_string(id) + " does not exist");
    const Value& value = program_.value(id);
    if (value.kind != ValueKind::kResult || value.def != op.id || value.result_index != static_cast<int32_t>(index)) {
      return report_.AtOp(op, "result %" + std::to_string(id) + " does not point back to this op", id);
    }
    available_[id] = index_;
    std::string problem = TypeProblem(value);
    if (problem.empty()) problem = PlaceProblem(value);
    if (problem.empty() && value.root != id) {
      problem = UseProblem(value.root);
      bool shares = std::find(operand_roots_.begin(), operand_roots_.end(), value.root) != operand_roots_.end();
      if (problem.empty() && !value.placed && !shares) {
        problem = "%" + std::to_string(id) + " is a view of %" + std::to_string(value.root) +
                  ", but no operand of the op shares that storage ('into' places a computed result)";
      }
    }
    if (!problem.empty()) report_.AtOp(op, problem, id);
  }

  void Release(const Op& op) {
    ForEachOperand(op, [&](ValueId id) {
      if (!program_.HasValue(id)) return;
      const Value& value = program_.value(id);
      if (value.root != id) {
        report_.AtOp(op, Joined("release takes the root of a storage; %", id, " lies in %", value.root), id);
      } else if (value.kind != ValueKind::kResult && value.kind != ValueKind::kTake) {
        report_.AtOp(op, "%" + std::to_string(id) + " cannot be released; only results and takes can", id);
      } else if (released_by_[id] == kNone) {
        released_by_[id] = op.id;
      }
    });
  }

  const Program& program_;
  VerifyReport& report_;
  const Phase* phase_ = nullptr;
  int32_t index_ = 0;
  std::vector<int32_t> available_;            // by value
  std::vector<OpId> released_by_;             // by root
  std::vector<const Phase*> phase_of_value_;  // of results and takes
  std::vector<ValueId> operand_roots_;        // of the op at hand
};

}  // namespace

std::string VerifyStructure(const Program& body, VerifyReport& report) {
  Structure structure(body, report);
  std::string problem;
  if (!structure.Printable(problem)) return problem;
  structure.Run();
  const std::vector<Error> errors = report.Take();
  return errors.empty() ? "" : errors[0].message;
}

std::vector<Error> VerifyAll(const Program& program) {
  VerifyReport report(program);
  Structure structure(program, report);
  std::string fatal;
  if (!structure.Printable(fatal)) return {Error{fatal, ""}};
  structure.Run();
  if (report.empty()) {
    VerifyFuncs(program, report);
    const bool runs = VerifyLayout(program, report);
    VerifyOps(program, report);
    if (!runs) return report.Take();  // what follows walks the run order
    VerifyFlow(program, report);
    VerifyCarried(program, report);
    VerifyResidency(program, report);
    VerifyPending(program, report);
  }
  return report.Take();
}

Status Verify(const Program& program) {
  std::vector<Error> errors = VerifyAll(program);
  if (errors.empty()) return Ok{};
  constexpr size_t kShown = 5;
  Error out{errors[0].message, errors[0].where};
  for (size_t i = 1; i < std::min(errors.size(), kShown); ++i) out.message += "\n" + errors[i].ToString();
  if (errors.size() > kShown) out.message += "\n(" + std::to_string(errors.size() - kShown) + " more)";
  return out;
}

}  // namespace interlace
