// Printing: plain string building, since programs have tens of thousands of ops.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/append.h"
#include "base/scan.h"
#include "ir/op_table.h"
#include "ir/print_rule.h"
#include "ir/text.h"

namespace interlace {
namespace {

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
    Listed(op.results, [&](ValueId result) {
      if (result == kNone) {
        out_ += '_';
      } else {
        Decl(result);
      }
    });
    if (!op.results.empty()) out_ += " = ";
    Put(op.name, '(');
    Listed(op.args, [&](const Arg& arg) { Literal(arg); });
    if (!op.args.empty() && !op.named.empty()) out_ += ", ";
    Listed(op.named, [&](const NamedArg& named) {
      Put(named.name, '=');
      Literal(named.arg);
    });
    out_ += ')';
    Tail(op);
  }

  void PrintType(const Type& type) {
    Put(DTypeName(type.dtype), '[');
    DimList(type.sizes);
    out_ += ']';
    if (HasDefaultStrides(type)) return;
    out_ += '{';
    DimList(type.strides);
    out_ += '}';
  }

  std::string Take() { return std::move(out_); }

 private:
  template <typename... Parts>
  void Put(const Parts&... parts) {
    Append(out_, parts...);
  }

  // Each item by `each`, with `between` between them.
  template <typename Items, typename Each>
  void Listed(const Items& items, Each each, std::string_view between = ", ") {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += between;
      each(items[i]);
    }
  }

  void PrintDim(const Dim& dim) {
    if (dim.is_const()) {
      Put(dim.value);
    } else {
      out_ += program_.dims.ToString(dim);
    }
  }

  void DimList(const std::vector<Dim>& list) {
    Listed(
        list, [&](const Dim& dim) { PrintDim(dim); }, ",");
  }
  void Numbers(const std::vector<int64_t>& list) {
    Listed(
        list, [&](int64_t number) { Put(number); }, ",");
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

  void ValueName(ValueId id) { Put('%', id); }

  void Decl(ValueId id) {
    ValueName(id);
    if (!program_.HasValue(id)) return;  // a broken program under inspection
    if (static_cast<size_t>(id) < result_.value_line.size()) result_.value_line[id] = line_;
    const Value& value = program_.value(id);
    out_ += ": ";
    PrintType(value.type);
    if (value.root != value.id) {
      Put(value.placed ? " into %" : " in %", value.root, '+');
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

  void Tail(const Op& op) {
    bool any = false;
    const auto entry = [&](const auto&... parts) {
      Put(any ? " " : " {", parts...);
      any = true;
    };
    if (op.part != Part::kNone) entry(kPartNames[static_cast<size_t>(op.part)]);
    if (op.module != kNone) entry('m', op.module);
    if (op.source != kNone) entry('s', op.source);
    if (op.lane) entry("lane=", LaneName(*op.lane));
    if (!op.units.empty()) {
      entry("units=[");
      Listed(op.units, [&](UnitId unit) { Put('u', unit); });
      out_ += ']';
    }
    if (op.rng) entry("rng=", *op.rng);
    if (!op.writes.empty()) {
      entry("writes=[");
      Listed(op.writes, [&](ValueId written) { ValueName(written); });
      out_ += ']';
    }
    for (const NamedArg& attr : op.attrs) {
      entry(attr.name, '=');
      Literal(attr.arg);
    }
    if (any) out_ += '}';
  }

  // A line of these parts, or the end of one.
  template <typename... Parts>
  void Line(const Parts&... parts) {
    Put(parts..., '\n');
    ++line_;
  }

  // `words`, text in quotes, and the end of the line.
  void QuotedLine(std::string_view words, std::string_view text) {
    Put(words, ' ');
    AppendQuoted(out_, text);
    Line();
  }

  void Header() {
    Line("interlace 1 ", kLevelNames[static_cast<size_t>(program_.level)]);
    for (const auto& [key, text] : program_.meta) QuotedLine("meta " + key, text);
    for (const Axis& axis : program_.mesh) Line("mesh ", axis.name, ' ', axis.size);
    if (program_.stage) {
      Put("stage ", program_.stage->axis, ' ', program_.stage->index);
      if (program_.stage->unlike()) out_ += " ranks ";
      Numbers(program_.stage->ranks);
      Line();
    }
    for (const Symbol& symbol : program_.symbols) Line("symbol ", symbol.name, ' ', symbol.min, ' ', symbol.max);
    Put("step ", program_.accumulation, ' ', program_.accumulate_mode);
    if (program_.width > 1) Put(" by ", program_.width);
    Line();
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
    for (const Group& group : program_.groups) PrintGroup(group);
    for (const Module& module : program_.modules) {
      Put("module ", module.id, ' ');
      AppendQuoted(out_, module.path);
      QuotedLine("", module.class_name);
    }
    for (const Source& source : program_.sources) QuotedLine("source " + std::to_string(source.id), source.place);
    for (const Unit& unit : program_.units) {
      result_.unit_line.push_back(line_);
      Put("unit u", unit.id, ' ', unit.axis);
      if (!unit.replicas.empty()) Put(" replicas ", unit.replicas);
      Put(' ', DTypeName(unit.dtype), " numel ", unit.numel, " shard ", unit.shard);
      if (unit.part > 0) Put(" part ", unit.part);
      Line();
    }
  }

  void PrintGroup(const Group& group) {
    Put("group ", group.id, ' ', group.optimizer);
    if (group.rule != kNone) Put(' ', group.rule);
    if (const std::optional<Orthogonal>& x = group.orthogonal; x) {
      Put(" orthogonal apply ", x->apply, " steps ", x->steps);
      Floats(" by", x->by);
      Floats(" eps", {&x->eps, 1});
      Put(" ratio ", x->ratio);
    }
    if (const std::optional<Factored>& x = group.factored; x) {
      Put(" factored average ", x->average, " apply ", x->apply);
      Floats(" eps", x->eps);
      Floats(" clip", {&x->clip, 1});
    }
    Line();
  }

  void PrintRun(const OrderEntry& run) {
    result_.run_line.push_back(line_);
    Put("run ", run.phase);
    if (run.first != kNone) Put(' ', run.first);
    if (run.first != kNone && run.count != 1) Put(" x", run.count);
    Line();
  }

  void Named(std::string_view word, ValueId value, std::string_view name) {
    out_ += word;
    Decl(value);
    out_ += ' ';
    AppendQuoted(out_, name);
  }

  void Declarations() {
    for (const Param& param : program_.params) PrintParam(param);
    for (const Buffer& buffer : program_.buffers) {
      Named("buffer ", buffer.value, buffer.name);
      Line(buffer.persistent ? " persistent" : " plain");
    }
    for (const Input& input : program_.inputs) {
      Named("input ", input.value, input.name);
      Line();
    }
    for (const Const& constant : program_.consts) {
      Named("const ", constant.value, constant.name);
      out_ += " = ";
      Literal(constant.data);
      Line();
    }
    for (const State& state : program_.states) {
      out_ += "state ";
      Decl(state.value);
      out_ += ' ';
      if (state.unit != kNone) Put('u', state.unit, '.');
      Line(state.role, state.persistent ? " persistent" : " step", state.out ? " out" : "");
    }
  }

  void PrintParam(const Param& param) {
    Named("param ", param.value, param.name);
    out_ += param.trainable ? " trainable" : " frozen";
    if (param.group != kNone) Put(" group ", param.group);
    if (param.unit != kNone) Put(" unit u", param.unit, '+', param.unit_offset);
    for (const Cut& cut : param.cuts) {
      Put(" cut ", cut.axis, ' ', cut.dim);
      if (cut.blocks != 1) Put(" blocks ", cut.blocks);
    }
    if (!param.shared.empty()) out_ += " shared ";
    Numbers(param.shared);
    for (const std::string& alias : param.aliases) {
      out_ += " alias ";
      AppendQuoted(out_, alias);
    }
    Line();
  }

  void PrintPhase(const Phase& phase) {
    result_.phase_line.push_back(line_);
    Put("phase ", phase.name, phase.kind == PhaseKind::kStep ? " once takes (" : " takes (");
    Listed(phase.takes, [&](ValueId value) { Decl(value); });
    out_ += ") gives (";
    Listed(phase.gives, [&](ValueId value) { ValueName(value); });
    out_ += ')';
    if (!phase.saves.empty()) {
      out_ += " saves (";
      Listed(phase.saves, [&](const Carried& save) { Put('%', save.value, " as ", save.name); });
      out_ += ')';
    }
    if (!phase.loads.empty()) {
      out_ += " loads (";
      Listed(phase.loads, [&](const Carried& load) {
        Decl(load.value);
        Put(" of ", load.name);
      });
      out_ += ')';
    }
    Line(" {");
    for (OpId id : phase.ops) {
      out_ += "  ";
      result_.op_line[id] = line_;
      PrintOp(program_.op(id));
      Line();
    }
    Line('}');
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
