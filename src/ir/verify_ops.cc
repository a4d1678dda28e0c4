// Each op of our own by itself: operand counts, sizes, attributes, the level it belongs to. Transfers:
// verify_transfers.cc.
#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "base/append.h"
#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

class Meaning : OpChecks {
 public:
  Meaning(const Program& program, VerifyReport& report) : OpChecks(program, report) {}

  void Run() {
    param_of_.assign(program_.num_values(), nullptr);
    for (const Param& param : program_.params) param_of_[param.value] = &param;
    for (const Phase& phase : program_.phases) {
      graded_.clear();
      outputs_.clear();
      for (OpId id : phase.ops) RunOp(program_.op(id));
    }
  }

 private:
  void RunOp(const Op& op) {
    if (op.kind == OpKind::kLibrary || op.kind == OpKind::kUnknown) {
      Unknown(op);
    } else {
      CheckKind(op);
      if (IsStart(op)) VerifyTransfer(program_, op, dims_, report_);
      const OpTraits& traits = TraitsOf(op);
      if (traits.side == Side::kWait || traits.frees != kNoOperand || traits.family == OpFamily::kTier) {
        if (op.args.empty()) report_.AtOp(op, op.name + " needs at least one operand");
        if (!op.results.empty()) report_.AtOp(op, op.name + " has no results");
        ValueOperands(op);
      }
      if (program_.level == Level::kCaptured && traits.sharded_only) {
        report_.AtOp(op, op.name + " belongs to the sharded level, but this program is captured");
      }
    }
    if (op.lane == Lane::kHost && !StepsOnHost(op)) {
      report_.AtOp(op, "lane=host is for optimizer steps (update.*) on storages that are out; " + op.name +
                           " runs on the device");
    }
    if (op.Attr("on_shard") != nullptr) OnShard(op);
    if (op.Attr(kMicroBatch) != nullptr) OfMicroBatch(op);
    if (program_.level != Level::kCaptured) DirectUse(op);
  }

  void CheckKind(const Op& op) {
    switch (op.kind) {
      case OpKind::kView:
        return View(op);
      case OpKind::kGrad:
        return Grad(op);
      case OpKind::kOutput:
        return Output(op);
      case OpKind::kAssign:
        return Assign(op);
      case OpKind::kCopy:
        return Copy(op);
      case OpKind::kGradBegin:
        return GradBegin(op);
      case OpKind::kNormPartial:
        return NormPartial(op);
      case OpKind::kNormCoef:
        return NormCoef(op);
      case OpKind::kUpdateAdamW:
      case OpKind::kUpdateAdam:
      case OpKind::kUpdateSgd:
      case OpKind::kUpdateRule:
        return Update(op);
      case OpKind::kCall:
        return VerifyCall(program_, op, report_);
      case OpKind::kCallPython:
        return CallPython(op);
      default:
        return;
    }
  }

  // A cast that `precision` marked: of a whole parameter, element by element in its order.
  void OnShard(const Op& op) {
    if (program_.level != Level::kCaptured) {
      return report_.AtOp(op, "on_shard belongs to the captured level; shard replaces the cast by one of the shard");
    }
    bool cast = op.name == "aten._to_copy" && op.args.size() == 1 && op.args[0].kind == Arg::Kind::kValue &&
                op.results.size() == 1 && op.results[0] != kNone && program_.RootOf(op.results[0]) == op.results[0];
    const Value* from = cast ? &program_.value(op.args[0].value) : nullptr;
    if (from == nullptr || param_of_[from->root] == nullptr || !(from->offset == Dim(0)) ||
        from->type.sizes != TypeOf(op.results[0]).sizes || from->type.strides != TypeOf(op.results[0]).strides) {
      report_.AtOp(op, "on_shard needs an aten._to_copy of a whole parameter that keeps its sizes and strides");
    }
  }

  void Unknown(const Op& op) {
    if (op.name.starts_with("aten.")) return;
    std::vector<std::string_view> known;
    for (const OpTraits& info : OpTable()) known.push_back(info.name);
    std::string hint = DidYouMean(op.name, known);
    // A library's op may look like ours; two letters apart is a typing error all the same.
    bool near =
        std::any_of(known.begin(), known.end(), [&](std::string_view k) { return EditDistance(op.name, k) <= 2; });
    if (op.kind == OpKind::kUnknown || near) {
      report_.AtOp(op, "unknown op " + InQuotes(op.name) +
                           (hint.empty() ? "; ops of a library are written namespace.name" : hint));
    }
  }

  void DirectUse(const Op& op) {
    ForEachOperand(op, [&](ValueId id) {
      const Param* param = param_of_[program_.RootOf(id)];
      if (param == nullptr || param->unit == kNone) return;
      report_.AtOp(op,
                   "parameter '" + param->name + "' is sharded and cannot be used directly; gather u" +
                       std::to_string(param->unit) + " and use a view of it",
                   id);
    });
  }

  bool IsNumber(const Arg& arg) const {
    return arg.kind == Arg::Kind::kFloat || (arg.kind == Arg::Kind::kInt && arg.integer.is_const());
  }
  bool Number(const Op& op, std::string_view name, bool or_none = false) {
    const Arg* arg = op.Attr(name);
    if (arg != nullptr && (IsNumber(*arg) || (or_none && arg->kind == Arg::Kind::kNone))) return true;
    report_.AtOp(op, op.name + " needs the attribute " + std::string(name) + "=NUMBER" + (or_none ? " or none" : ""));
    return false;
  }

  void View(const Op& op) {
    if (!Shape(op, 1, 1, 1)) return;
    const Value& value = program_.value(op.results[0]);
    if (value.root == value.id || value.placed)
      report_.AtOp(op, "the result of view must lie 'in' a storage", value.id);
  }

  // Which of the micro-batches that run side by side an op belongs to.
  void OfMicroBatch(const Op& op) {
    if (MicroBatchOf(op) >= 0 && MicroBatchOf(op) < program_.width) return;
    report_.AtOp(op, std::string(kMicroBatch) + "= must be a number below " + std::to_string(program_.width) +
                         ", the micro-batches of one run");
  }

  void Grad(const Op& op) {
    if (program_.level != Level::kCaptured) {
      report_.AtOp(op, "grad belongs to the captured level; sharding replaces it by a reduction");
      return;
    }
    if (!Shape(op, 2, 2, 0)) return;
    ValueId target = op.args[0].value, value = op.args[1].value;
    const Param* param = param_of_[target];
    if (param == nullptr || !param->trainable) {
      report_.AtOp(op, Joined("the first operand of grad must be a trainable parameter; %", target, " is none"),
                   target);
      return;
    }
    if (++graded_[target] > program_.width) {
      report_.AtOp(op,
                   "parameter '" + param->name + "' has " + (program_.width == 1 ? "two" : "too many") + " gradients",
                   target);
    }
    const Type& of = TypeOf(target);
    const Type& given = TypeOf(value);
    bool narrower = IsFloating(given.dtype) && DTypeBytes(given.dtype) < DTypeBytes(of.dtype);
    if ((given.dtype != of.dtype && !narrower) || given.sizes != of.sizes) {
      report_.AtOp(op,
                   "the gradient of '" + param->name + "' must be " + PrintType(program_, of) + ", or narrower, not " +
                       PrintType(program_, given),
                   value);
    }
  }

  void Output(const Op& op) {
    if (!Shape(op, 1, 1, 0)) return;
    const Arg* name = op.Attr("name");
    if (name == nullptr || name->kind != Arg::Kind::kString) {
      report_.AtOp(op, "output needs the attribute name=\"...\"");
      return;
    }
    if (++outputs_[name->text] > program_.width) {
      report_.AtOp(
          op, (program_.width == 1 ? "two" : "too many") + std::string(" outputs are named ") + InQuotes(name->text));
    }
    if (name->text == "loss") Elements(op, op.args[0].value, 1, "the loss is a scalar");
  }

  void Assign(const Op& op) {
    if (!Shape(op, 2, 2, 0)) return;
    ValueId dst = op.args[0].value, src = op.args[1].value;
    ValueKind kind = program_.value(program_.RootOf(dst)).kind;
    if (kind != ValueKind::kBuffer && kind != ValueKind::kState) {
      report_.AtOp(op, "assign writes buffers and states only; %" + std::to_string(dst) + " is neither", dst);
    }
    if (TypeOf(dst).sizes != TypeOf(src).sizes) {
      report_.AtOp(op,
                   "assign needs equal sizes; %" + std::to_string(dst) + " is " + PrintType(program_, TypeOf(dst)) +
                       " and %" + std::to_string(src) + " is " + PrintType(program_, TypeOf(src)),
                   src);
    }
  }

  void Copy(const Op& op) {
    if (!Shape(op, 1, 1, 1)) return;
    if (TypeOf(op.args[0].value).sizes != TypeOf(op.results[0]).sizes) {
      report_.AtOp(op, "copy keeps the sizes of its operand", op.results[0]);
    }
  }

  void GradBegin(const Op& op) {
    if (!Shape(op, 0, 0, 1)) return;
    if (op.units.size() != 1) return report_.AtOp(op, "grad.begin needs units=[u] with one unit");
    Elements(op, op.results[0], program_.units[op.units[0]].numel, "numel of u" + std::to_string(op.units[0]));
    const Arg* zero = op.Attr("zero");
    if (zero != nullptr && zero->kind != Arg::Kind::kBool) report_.AtOp(op, "zero= must be true or false");
  }

  bool IsType(ValueId id, DType dtype, int64_t count) const {
    const Type& type = TypeOf(id);
    return type.dtype == dtype && type.sizes.size() == 1 && type.sizes[0] == Dim(count);
  }

  // Of an operand of norm.partial.
  std::vector<std::string_view> ElementAxes(const Op& op, size_t i) const {
    const Unit& unit = program_.units[op.units[i]];
    return program_.AxesOfElements(unit, NumericElements(TypeOf(op.args[i].value)));
  }

  void NormPartial(const Op& op) {
    if (!Shape(op, 1, op.args.size(), 1)) return;
    const size_t of_units = std::min(op.units.size(), op.args.size());
    const std::vector<std::string_view> axes = of_units > 0 ? ElementAxes(op, 0) : std::vector<std::string_view>();
    for (size_t i = 1; i < of_units; ++i) {
      if (ElementAxes(op, i) == axes) continue;
      report_.AtOp(op,
                   "the elements of u" + std::to_string(op.units[i]) + " differ along other axes than those of u" +
                       std::to_string(op.units[0]) + "; make one norm.partial for each such set of units",
                   op.args[i].value);
      break;
    }
    if (!IsType(op.results[0], DType::kI64, kNormLimbs))
      report_.AtOp(op, "the result of norm.partial is i64[68]", op.results[0]);
  }

  void NormCoef(const Op& op) {
    if (!Shape(op, 1, 2, 1)) return;
    if (op.args.size() == 2) {
      Elements(op, op.args[1].value, 1, "what the loss was multiplied by");
      if (!IsFloating(TypeOf(op.args[1].value).dtype)) {
        report_.AtOp(op, "the second operand of norm.coef is a floating scalar", op.args[1].value);
      }
    }
    if (!IsType(op.args[0].value, DType::kI64, kNormLimbs))
      report_.AtOp(op, "the operand of norm.coef is i64[68]", op.args[0].value);
    if (!IsType(op.results[0], DType::kF64, 3)) report_.AtOp(op, "the result of norm.coef is f64[3]", op.results[0]);
    Number(op, "max_norm", /*or_none=*/true);
    Number(op, "scale");
  }

  void Update(const Op& op) {
    size_t states = 2;
    if (op.kind == OpKind::kUpdateSgd) {
      const Arg* momentum = op.Attr("momentum");
      if (momentum != nullptr && momentum->kind != Arg::Kind::kBool)
        report_.AtOp(op, "momentum= must be true or false");
      states = momentum != nullptr && momentum->boolean ? 1 : 0;
    } else if (op.kind == OpKind::kUpdateRule) {
      const Arg* names = op.Attr("states");
      const bool words =
          names != nullptr && names->kind == Arg::Kind::kList && names->list.size() <= kMaxRuleStates &&
          std::all_of(names->list.begin(), names->list.end(), [](const Arg& a) { return a.kind == Arg::Kind::kWord; });
      if (!words) return report_.AtOp(op, "update.rule needs states=[name, ...], the names of its operands");
      states = names->list.size();
    }
    if (!Shape(op, 2 + states, 3 + states, 0)) return;
    if (op.units.size() != 1) return report_.AtOp(op, op.name + " needs units=[u] with one unit");
    const Unit& unit = program_.units[op.units[0]];
    auto flat = NumericElements(TypeOf(op.args[0].value));
    const bool whole = flat && *flat == unit.numel;
    const char* of = whole ? "numel of u" : unit.parted() ? "the part of u" : "the shard of u";
    for (size_t i = 0; i < 2 + states; ++i)
      Elements(op, op.args[i].value, whole ? unit.numel : unit.own(), of + std::to_string(unit.id));
    if (op.args.size() == 3 + states && !IsType(op.args.back().value, DType::kF64, 3)) {
      report_.AtOp(op, "the last operand of " + op.name + " is the f64[3] of norm.coef", op.args.back().value);
    }
    Number(op, "scale");
    Ranges(op, unit);
  }

  // start, end, group, ...: ascending, within the unit, of declared groups.
  void Ranges(const Op& op, const Unit& unit) {
    const Arg* ranges = op.Attr("ranges");
    bool numbers = ranges != nullptr && ranges->kind == Arg::Kind::kList && ranges->list.size() % 3 == 0 &&
                   std::all_of(ranges->list.begin(), ranges->list.end(),
                               [](const Arg& a) { return a.kind == Arg::Kind::kInt && a.integer.is_const(); });
    if (!numbers) return report_.AtOp(op, op.name + " needs ranges=[start, end, group, ...] of integers");
    int64_t before = 0;
    for (size_t i = 0; i < ranges->list.size(); i += 3) {
      int64_t start = ranges->list[i].integer.value, end = ranges->list[i + 1].integer.value;
      int64_t group = ranges->list[i + 2].integer.value;
      if (start < before || end < start || end > unit.numel) {
        report_.AtOp(op, Joined("range ", start, " to ", end, " must follow the one before it and lie within u",
                                unit.id, " (", unit.numel, " elements)"));
        return;
      }
      if (group < 0 || group >= static_cast<int64_t>(program_.groups.size())) {
        report_.AtOp(op, Joined("group ", group, " of range ", start, " to ", end, " is not declared"));
        return;
      }
      before = end;
      if (op.kind == OpKind::kUpdateRule && !OfStates(op, program_.groups[group])) {
        report_.AtOp(op, "group " + std::to_string(group) + " has no rule with the states of this op");
        return;
      }
    }
  }

  bool OfStates(const Op& op, const Group& group) const {
    if (group.rule < 0 || group.rule >= static_cast<int32_t>(program_.rules.size())) return false;
    return std::ranges::equal(program_.rules[group.rule].states, op.Attr("states")->list,
                              [](const std::string& name, const Arg& word) { return name == word.text; });
  }

  void CallPython(const Op& op) {
    const Arg* module = op.Attr("module");
    const Arg* part = op.Attr("part");
    if (module == nullptr || module->kind != Arg::Kind::kString) report_.AtOp(op, "call.python needs module=\"path\"");
    bool part_ok = part != nullptr && (part->kind == Arg::Kind::kString || part->kind == Arg::Kind::kWord) &&
                   (part->text == "forward" || part->text == "backward");
    if (!part_ok) report_.AtOp(op, "call.python needs part=\"forward\" or part=\"backward\"");
  }

  std::vector<const Param*> param_of_;  // by value
  std::map<ValueId, int64_t> graded_;   // grad ops of a parameter, in this phase
  std::map<std::string, int64_t> outputs_;
  DimTable dims_ = program_.dims;
};

}  // namespace

void VerifyOps(const Program& program, VerifyReport& report) {
  Meaning(program, report).Run();
}

}  // namespace interlace
