// Printing: plain string building, since programs have tens of thousands of ops.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/scan.h"
#include "ir/op_table.h"
#include "ir/print_rule.h"
#include "ir/text.h"

namespace interlace {
namespace {

constexpr std::string_view kLevels[] = {"captured", "sharded", "scheduled"};

class Printer {
 public:
  explicit Printer(const Program& program) : program_(program) {}

  PrintedProgram Run() {
    result_.op_line.assign(program_.num_ops(), 0);
    result_.value_line.assign(program_.num_values(), 0);
    out_.reserve(static_cast<size_t>(program_.num_ops()) * 112 + 4096);
    Header();
    Declarations();
    for (size_t i = 0; i < program_.funcs.size(); ++i) {
      out_ += PrintFunc(*program_.funcs[i].body, "f" + std::to_string(i));
      line_ += static_cast<int32_t>(program_.funcs[i].body->phases[0].ops.size()) + 2;
    }
    for (const Phase& phase : program_.phases) PrintPhase(phase);
    result_.text = std::move(out_);
    return std::move(result_);
  }

  void PrintOp(const Op& op) {
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (i > 0) out_ += ", ";
      if (op.results[i] == kNone) {
        out_ += '_';
      } else {
        Decl(op.results[i]);
      }
    }
    if (!op.results.empty()) out_ += " = ";
    out_ += op.name;
    out_ += '(';
    Listed(op.args, [&](const Arg& arg) { Literal(arg); });
    bool first = op.args.empty();
    for (const NamedArg& named : op.named) {
      if (!first) out_ += ", ";
      first = false;
      out_ += named.name;
      out_ += '=';
      Literal(named.arg);
    }
    out_ += ')';
    Tail(op);
  }

  void PrintType(const Type& type) {
    out_ += DTypeName(type.dtype);
    out_ += '[';
    DimList(type.sizes);
    out_ += ']';
    if (!HasDefaultStrides(type)) {
      out_ += '{';
      DimList(type.strides);
      out_ += '}';
    }
  }

  std::string Take() { return std::move(out_); }

 private:
  void Int(int64_t value) {
    char buffer[24];
    auto [end, problem] = std::to_chars(buffer, buffer + sizeof(buffer), value);
    out_.append(buffer, end);
  }

  void PrintDim(const Dim& dim) {
    if (dim.is_const()) {
      Int(dim.value);
    } else {
      out_ += program_.dims.ToString(dim);
    }
  }

  void DimList(const std::vector<Dim>& list) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (i > 0) out_ += ',';
      PrintDim(list[i]);
    }
  }

  // The strides Program::ContiguousStrides gives, compared without interning into the program.
  bool HasDefaultStrides(const Type& type) {
    if (type.strides.size() != type.sizes.size()) return false;
    Dim next = 1;
    for (size_t i = type.sizes.size(); i-- > 0;) {
      if (!(type.strides[i] == next)) return false;
      const Dim& size = type.sizes[i];
      if (size.is_const() && size.value <= 1) continue;
      if (next.is_const() && size.is_const()) {
        int64_t product;
        if (__builtin_mul_overflow(next.value, size.value, &product)) return i == 0;
        next = product;
      } else if (i > 0) {
        if (!have_dims_) dims_ = program_.dims;
        have_dims_ = true;
        next = dims_.Mul(next, size);
      }
    }
    return true;
  }

  void ValueName(ValueId id) {
    out_ += '%';
    Int(id);
  }

  void Decl(ValueId id) {
    ValueName(id);
    if (!program_.HasValue(id)) return;  // a broken program under inspection
    if (static_cast<size_t>(id) < result_.value_line.size()) result_.value_line[id] = line_;
    const Value& value = program_.value(id);
    out_ += ": ";
    PrintType(value.type);
    if (value.root != value.id) {
      out_ += value.placed ? " into " : " in ";
      ValueName(value.root);
      out_ += '+';
      PrintDim(value.offset);
    }
  }

  void Floats(std::string_view word, std::span<const double> values) {
    out_ += word;
    for (const double value : values) {
      out_ += ' ';
      Float(value);
    }
  }

  void Float(double value) {
    if (std::isnan(value)) {
      out_ += "nan";
      return;
    }
    char buffer[40];
    auto [end, problem] = std::to_chars(buffer, buffer + sizeof(buffer), value);
    std::string_view text(buffer, end - buffer);
    out_ += text;
    if (text.find_first_of(".ein") == std::string_view::npos) out_ += ".0";
  }

  void Literal(const Arg& arg) {
    switch (arg.kind) {
      case Arg::Kind::kNone:
        out_ += "none";
        break;
      case Arg::Kind::kValue:
        ValueName(arg.value);
        break;
      case Arg::Kind::kInt:
        PrintDim(arg.integer);
        break;
      case Arg::Kind::kFloat:
        Float(arg.real);
        break;
      case Arg::Kind::kBool:
        out_ += arg.boolean ? "true" : "false";
        break;
      case Arg::Kind::kString:
        AppendQuoted(out_, arg.text);
        break;
      case Arg::Kind::kWord:
        out_ += arg.text;
        break;
      case Arg::Kind::kList:
        out_ += '[';
        Listed(arg.list, [&](const Arg& item) { Literal(item); });
        out_ += ']';
        break;
    }
  }

  // Blanks between the entries of a tail, and its opening brace before the first.
  void TailGap(bool& any) {
    out_ += any ? " " : " {";
    any = true;
  }

  void Tail(const Op& op) {
    bool any = false;
    if (op.part != Part::kNone) {
      TailGap(any);
      out_ += op.part == Part::kForward ? "fwd" : op.part == Part::kBackward ? "bwd" : "upd";
    }
    if (op.module != kNone) {
      TailGap(any);
      out_ += 'm';
      Int(op.module);
    }
    if (op.source != kNone) {
      TailGap(any);
      out_ += 's';
      Int(op.source);
    }
    if (op.lane) {
      TailGap(any);
      out_ += "lane=";
      out_ += LaneName(*op.lane);
    }
    if (!op.units.empty()) {
      TailGap(any);
      out_ += "units=[";
      for (size_t i = 0; i < op.units.size(); ++i) {
        out_ += i > 0 ? ", u" : "u";
        Int(op.units[i]);
      }
      out_ += ']';
    }
    if (op.rng) {
      TailGap(any);
      out_ += "rng=";
      Int(*op.rng);
    }
    if (!op.writes.empty()) {
      TailGap(any);
      out_ += "writes=[";
      for (size_t i = 0; i < op.writes.size(); ++i) {
        if (i > 0) out_ += ", ";
        ValueName(op.writes[i]);
      }
      out_ += ']';
    }
    for (const NamedArg& attr : op.attrs) {
      TailGap(any);
      out_ += attr.name;
      out_ += '=';
      Literal(attr.arg);
    }
    if (any) out_ += '}';
  }

  void EndLine() {
    out_ += '\n';
    ++line_;
  }

  void Header() {
    out_ += "interlace 1 ";
    out_ += kLevels[static_cast<size_t>(program_.level)];
    EndLine();
    for (const auto& [key, text] : program_.meta) {
      out_ += "meta " + key + " ";
      AppendQuoted(out_, text);
      EndLine();
    }
    for (const Axis& axis : program_.mesh) {
      out_ += "mesh " + axis.name + " ";
      Int(axis.size);
      EndLine();
    }
    if (program_.stage) {
      out_ += "stage " + program_.stage->axis + " ";
      Int(program_.stage->index);
      for (size_t s = 0; s < program_.stage->ranks.size(); ++s) {
        out_ += s == 0 ? " ranks " : ",";
        Int(program_.stage->ranks[s]);
      }
      EndLine();
    }
    for (const Symbol& symbol : program_.symbols) {
      out_ += "symbol " + symbol.name + " ";
      Int(symbol.min);
      out_ += ' ';
      Int(symbol.max);
      EndLine();
    }
    out_ += "step ";
    Int(program_.accumulation);
    out_ += " " + program_.accumulate_mode;
    if (program_.width > 1) {
      out_ += " by ";
      Int(program_.width);
    }
    EndLine();
    const auto of_micro_batches = std::count_if(program_.phases.begin(), program_.phases.end(), [](const Phase& phase) {
      return phase.kind == PhaseKind::kMicroBatch;
    });
    if (of_micro_batches > 1 || program_.order != program_.DefaultOrder()) {
      for (const OrderEntry& run : program_.order) PrintRun(run);
    }
    for (const UpdateRule& rule : program_.rules) {
      const size_t begin = out_.size();
      PrintRule(rule, out_);
      line_ += static_cast<int32_t>(std::count(out_.begin() + static_cast<std::ptrdiff_t>(begin), out_.end(), '\n'));
    }
    for (const Group& group : program_.groups) {
      out_ += "group " + std::to_string(group.id) + " " + group.optimizer;
      if (group.rule != kNone) out_ += " " + std::to_string(group.rule);
      if (const std::optional<Orthogonal>& x = group.orthogonal; x) {
        out_ += " orthogonal apply " + std::to_string(x->apply) + " steps " + std::to_string(x->steps);
        Floats(" by", x->by);
        Floats(" eps", {&x->eps, 1});
        out_ += " ratio " + x->ratio;
      }
      if (const std::optional<Factored>& x = group.factored; x) {
        out_ += " factored average " + std::to_string(x->average) + " apply " + std::to_string(x->apply);
        Floats(" eps", x->eps);
        Floats(" clip", {&x->clip, 1});
      }
      EndLine();
    }
    for (const Module& module : program_.modules) {
      out_ += "module ";
      Int(module.id);
      out_ += ' ';
      AppendQuoted(out_, module.path);
      out_ += ' ';
      AppendQuoted(out_, module.class_name);
      EndLine();
    }
    for (const Source& source : program_.sources) {
      out_ += "source ";
      Int(source.id);
      out_ += ' ';
      AppendQuoted(out_, source.place);
      EndLine();
    }
    for (const Unit& unit : program_.units) {
      result_.unit_line.push_back(line_);
      out_ += "unit u";
      Int(unit.id);
      out_ += " " + unit.axis + (unit.replicas.empty() ? "" : " replicas " + unit.replicas) + " ";
      out_ += DTypeName(unit.dtype);
      out_ += " numel ";
      Int(unit.numel);
      out_ += " shard ";
      Int(unit.shard);
      EndLine();
    }
  }

  void PrintRun(const OrderEntry& run) {
    result_.run_line.push_back(line_);
    out_ += "run " + run.phase;
    if (run.first != kNone) {
      out_ += ' ';
      Int(run.first);
      if (run.count != 1) {
        out_ += " x";
        Int(run.count);
      }
    }
    EndLine();
  }

  void Named(std::string_view word, ValueId value, std::string_view name) {
    out_ += word;
    Decl(value);
    out_ += ' ';
    AppendQuoted(out_, name);
  }

  void Declarations() {
    for (const Param& param : program_.params) {
      Named("param ", param.value, param.name);
      out_ += param.trainable ? " trainable" : " frozen";
      if (param.group != kNone) {
        out_ += " group ";
        Int(param.group);
      }
      if (param.unit != kNone) {
        out_ += " unit u";
        Int(param.unit);
        out_ += '+';
        Int(param.unit_offset);
      }
      for (const Cut& cut : param.cuts) {
        out_ += " cut " + cut.axis + " ";
        Int(cut.dim);
        if (cut.blocks == 1) continue;
        out_ += " blocks ";
        Int(cut.blocks);
      }
      for (size_t i = 0; i < param.shared.size(); ++i) {
        out_ += i > 0 ? "," : " shared ";
        Int(param.shared[i]);
      }
      for (const std::string& alias : param.aliases) {
        out_ += " alias ";
        AppendQuoted(out_, alias);
      }
      EndLine();
    }
    for (const Buffer& buffer : program_.buffers) {
      Named("buffer ", buffer.value, buffer.name);
      out_ += buffer.persistent ? " persistent" : " plain";
      EndLine();
    }
    for (const Input& input : program_.inputs) {
      Named("input ", input.value, input.name);
      EndLine();
    }
    for (const Const& constant : program_.consts) {
      Named("const ", constant.value, constant.name);
      out_ += " = ";
      Literal(constant.data);
      EndLine();
    }
    for (const State& state : program_.states) {
      out_ += "state ";
      Decl(state.value);
      out_ += ' ';
      if (state.unit != kNone) {
        out_ += 'u';
        Int(state.unit);
        out_ += '.';
      }
      out_ += state.role;
      out_ += state.persistent ? " persistent" : " step";
      if (state.out) out_ += " out";
      EndLine();
    }
  }

  template <typename Items, typename Each>
  void Listed(const Items& items, Each each) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += ", ";
      each(items[i]);
    }
  }

  void PrintPhase(const Phase& phase) {
    result_.phase_line.push_back(line_);
    out_ += "phase " + phase.name + (phase.kind == PhaseKind::kStep ? " once takes (" : " takes (");
    Listed(phase.takes, [&](ValueId value) { Decl(value); });
    out_ += ") gives (";
    Listed(phase.gives, [&](ValueId value) { ValueName(value); });
    out_ += ')';
    for (size_t i = 0; i < phase.saves.size(); ++i) {
      out_ += i > 0 ? ", " : " saves (";
      ValueName(phase.saves[i].value);
      out_ += " as " + phase.saves[i].name;
    }
    if (!phase.saves.empty()) out_ += ')';
    for (size_t i = 0; i < phase.loads.size(); ++i) {
      out_ += i > 0 ? ", " : " loads (";
      Decl(phase.loads[i].value);
      out_ += " of " + phase.loads[i].name;
    }
    if (!phase.loads.empty()) out_ += ')';
    out_ += " {";
    EndLine();
    for (OpId id : phase.ops) {
      out_ += "  ";
      result_.op_line[id] = line_;
      PrintOp(program_.op(id));
      EndLine();
    }
    out_ += '}';
    EndLine();
  }

  const Program& program_;
  PrintedProgram result_;
  std::string out_;
  int32_t line_ = 1;
  DimTable dims_;  // a copy, made when a symbolic type asks for it
  bool have_dims_ = false;
};

}  // namespace

std::string Print(const Program& program) {
  return Printer(program).Run().text;
}

PrintedProgram PrintWithLines(const Program& program) {
  return Printer(program).Run();
}

std::string PrintOp(const Program& program, const Op& op) {
  Printer printer(program);
  printer.PrintOp(op);
  return printer.Take();
}

std::string PrintType(const Program& program, const Type& type) {
  Printer printer(program);
  printer.PrintType(type);
  return printer.Take();
}

}  // namespace interlace
