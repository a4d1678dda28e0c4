// split.cc — a micro-batch runs as several parts of it side by side: while the activations of one part travel between
// ranks, another one is computed.
//   before: %34: f32[32,64] = aten.mm(%33, %32)        after (parts=2): %34: f32[16,64] = aten.mm(%33, %32)
//           %77: f32[64,64] = aten.mm(%76, %33)                         %35: f32[16,64] = aten.mm(%43, %32)
//                                                                       %77: f32[64,64] = aten.mm(%76, %33)
//                                                                       %78: f32[64,64] = aten.mm(%86, %43)
//                                                                       %79: f32[64,64] = aten.add.Tensor(%77, %78)
// It is the propagation of tensor.cc over an axis whose ranks are copies in one program: inputs are cut along the
// batch, a mean over the batch is a sum of the parts' sums over their count, gradients of weights are added up, and an
// op that knows no rows is run once, on all of them. So the loss is that of the whole micro-batch, to rounding.
// Options: parts. Error: parts that do not divide the micro-batch.
#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "ir/op_table.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"
#include "passes/tensor/cutter.h"

namespace interlace {
namespace {

constexpr std::string_view kCopies = "copies";  // the axis, while it exists

// One rank's program over an axis becomes all ranks' in one.
class Copies {
 public:
  Copies(Program& program, Phase& phase, int64_t parts) : program_(program), phase_(phase), parts_(parts) {
    for (int64_t k = 0; k < parts; ++k) maps_.emplace_back();
  }

  void Run() {
    std::vector<OpId> old = std::move(phase_.ops);
    phase_.ops.clear();
    varies_.assign(static_cast<size_t>(program_.num_values()), false);
    for (OpId id : old) {
      const Op& op = program_.op(id);
      const Arg* axis = op.Attr("axis");
      if (axis != nullptr && axis->text == kCopies) {
        Join(id);
        continue;
      }
      if (IsWait(op) && joined_.count(op.args[0].value) != 0) continue;
      if (Varies(op) && TraitsOf(op).family != OpFamily::kMark) {  // a gradient, an output: the parts' are alike
        Each(id);
      } else {
        phase_.ops.push_back(id);
      }
    }
  }

 private:
  static bool HasIndex(const Arg& arg) {
    if (arg.kind == Arg::Kind::kInt) return !arg.integer.is_const();
    return std::any_of(arg.list.begin(), arg.list.end(), HasIndex);
  }

  bool Varies(const Op& op) const {
    bool found = AnyOperand(op, [&](ValueId v) { return varies_[v] || varies_[program_.RootOf(v)]; });
    for (const Arg& arg : op.args) found = found || HasIndex(arg);
    for (ValueId result : op.results) found = found || (result != kNone && !program_.value(result).offset.is_const());
    return found;
  }

  ValueId Of(ValueId id, int64_t part) const {
    auto it = maps_[part].find(id);
    return it == maps_[part].end() ? id : it->second;
  }

  // The op for every part; the first keeps its values.
  void Each(OpId id) {
    const Op base = program_.op(id);
    std::vector<Value> values;
    for (ValueId result : base.results) {
      if (result == kNone) continue;
      varies_[result] = true;
      values.push_back(program_.value(result));
    }
    for (int64_t k = 0; k < parts_; ++k) {
      Op& op = k == 0 ? program_.op(id) : program_.AddOp(base.name);
      const OpId own = op.id;
      if (k > 0) {
        op = base;
        op.id = own;
        size_t at = 0;
        for (ValueId& result : op.results) {
          if (result == kNone) continue;
          const Value& from = values[at++];
          const ValueId fresh = program_.AddValue(ValueKind::kResult, from.type).id;
          Value& value = program_.value(fresh);
          const ValueId id_of = value.id;
          value = from;
          value.id = id_of;
          value.def = own;
          value.root = from.root == result ? id_of : Of(from.root, k);
          maps_[k][result] = id_of;
          result = id_of;
        }
      }
      ForEachOperand(op, [&](ValueId& v) { v = Of(v, k); });
      for (ValueId& written : op.writes) written = Of(written, k);
      for (Arg& arg : op.args) Index(arg, k);
      for (ValueId result : op.results) {
        if (result != kNone) Index(program_.value(result).offset, k);
      }
      phase_.ops.push_back(own);
    }
  }

  void Index(Dim& dim, int64_t part) {
    if (dim.is_const()) return;
    dim = *program_.dims.Substitute(dim, {{"rank_" + std::string(kCopies), part}});
  }
  void Index(Arg& arg, int64_t part) {
    if (arg.kind == Arg::Kind::kInt) Index(arg.integer, part);
    for (Arg& item : arg.list) Index(item, part);
  }

  // What a collective gives, made of all parts here.
  void Join(OpId id) {
    const Op start = program_.op(id);
    for (size_t i = 0; i < start.results.size(); ++i) {
      const ValueId operand = start.args[i].value, result = start.results[i];
      joined_.insert(result);
      if (start.kind == OpKind::kAllGatherStart) {
        Op& op = NewOp(start, "aten.cat");
        std::vector<Arg> parts;
        for (int64_t k = 0; k < parts_; ++k) parts.push_back(Arg::Of(Of(operand, k)));
        op.args = {Arg::List(std::move(parts)), *start.Attr("dim")};
        Gives(op, result);
        continue;
      }
      const Type whole = program_.value(operand).type;
      ValueId sum = operand;
      for (int64_t k = 1; k < parts_; ++k) {
        Op& op = NewOp(start, "aten.add.Tensor", {sum, Of(operand, k)});
        const bool last = k + 1 == parts_ && start.kind == OpKind::kAllReduceStart;
        if (last) {
          Gives(op, result);
        } else {
          sum = program_.AddResult(op, whole);
          varies_.resize(static_cast<size_t>(program_.num_values()));
        }
      }
      if (start.kind != OpKind::kReduceScatterStart) continue;
      const int64_t dim = start.Attr("dim")->integer.value;
      varies_[result] = true;
      for (int64_t k = 0; k < parts_; ++k) {
        Op& slice = NewOp(start, "view", {sum});
        Type type = program_.value(result).type;
        const int64_t step = type.sizes[dim].value * whole.strides[dim].value;
        type.strides = whole.strides;
        const ValueId mine = program_.AddView(slice, type, sum, Dim(k * step));
        Op& copy = NewOp(start, "copy", {mine});
        if (k == 0) {
          Gives(copy, result);
        } else {
          maps_[k][result] = program_.AddResult(copy, program_.value(result).type);
        }
        varies_.resize(static_cast<size_t>(program_.num_values()));
      }
    }
  }

  Op& NewOp(const Op& like, std::string name, std::initializer_list<ValueId> operands = {}) {
    Op& op = AddLike(program_, like, std::move(name), operands);
    phase_.ops.push_back(op.id);
    return op;
  }

  void Gives(Op& op, ValueId result) {
    op.results = {result};
    program_.value(result).def = op.id;
    program_.value(result).result_index = 0;
  }

  Program& program_;
  Phase& phase_;
  int64_t parts_;
  std::vector<std::map<ValueId, ValueId>> maps_;  // by part: the first part's values to its own
  std::vector<bool> varies_;
  std::set<ValueId> joined_;
};

}  // namespace

Result<bool> Split(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const int64_t parts, options.Int("parts", 2, 1));
  if (parts == 1) return false;
  Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the program has no single micro-batch phase");
  if (!program.symbols.empty())
    return MakeError("size '", program.symbols[0].name, "' is not a number yet; bind it first");
  int64_t rows = 0;
  if (const std::string* text = program.Meta("micro_batch"))
    std::from_chars(text->data(), text->data() + text->size(), rows);
  if (rows < 1)
    return MakeError("the program does not say how many samples a micro-batch has (meta line \"micro_batch\")");
  if (rows % parts != 0)
    return MakeError("a micro-batch of ", rows, " samples cannot be split into ", parts,
                     " equal parts; give it a multiple of them, or leave split out");
  program.mesh.push_back({std::string(kCopies), parts});
  tensor::CutterOptions way;
  way.axis = std::string(kCopies);
  way.sequence = false;
  way.sums_behind = false;
  way.flops_per_byte = 20;  // nothing travels: bytes are copied
  tensor::Cutter cutter(program, *phase, way);
  for (const Input& input : program.inputs) {
    const std::vector<Dim>& sizes = program.value(input.value).type.sizes;
    if (!sizes.empty() && sizes[0] == Dim(rows)) cutter.CutInput(input.value);
  }
  INTERLACE_TRY(cutter.Run());
  Copies(program, *phase, parts).Run();
  program.mesh.pop_back();
  program.Compact();
  return true;
}

}  // namespace interlace
