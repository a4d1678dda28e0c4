// borders.cc — pass `borders`: of stages with unlike ranks that cut products, what each has is settled while the
// program is still whole. Every op is noted with its stage, and what crosses is copied where it is made, for each stage
// that uses it; pass `tensor` has the copies whole on all ranks, whatever it cuts beside them.
//   before: %5 = mm(%x, %w)        after: %5 = mm(%x, %w) {stage=0}
//           %6 = mm(%5, %v)               %9 = copy(%5) {stage=0 message="fwd model.0 aten.mm 0"}
//                                         %6 = mm(%9, %v) {stage=1}
// So the programs of all stages send and receive the same, though `tensor` makes other ops of each. A weight that
// several stages use (tied) stays whole, and their parts of its gradient are such copies. Options: axis,
// at=auto|model|NAMES, chunks, data (as of `pipeline`), cluster, profile (for at=auto). Writes the borders to the meta
// line "stages.at", and how what crosses depends on rows to "stages.rows". Runs after mesh, before tensor; pass
// `pipeline` gets the same borders. Error: as of `pipeline`.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "passes/cost_options.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"
#include "passes/stages/balance.h"
#include "passes/stages/messages.h"
#include "passes/stages/recut.h"
#include "passes/tensor/plan.h"

namespace interlace {
namespace {

// Puts copies behind what makes their storages, and has the ops of other stages read these.
class Marker {
 public:
  Marker(Program& program, const stages::Flow& flow, const stages::Layout& layout, const Phase& phase)
      : program_(program), flow_(flow), layout_(layout), phase_(phase) {}

  // `apart`: parameters that several stages use.
  std::vector<OpId> Run(const std::set<ValueId>& apart) {
    for (const auto& [index, parts] : layout_.gradients) {
      if (!apart.contains(program_.RootOf(flow_.op(index).args[0].value))) continue;
      for (const stages::GradPart& part : parts) {
        for (const ValueId id : part.values) {
          if (program_.value(id).kind == ValueKind::kResult)
            parts_[program_.value(id).def].emplace_back(id, part.place.stage);
        }
      }
    }
    names_ = stages::NamesOf(program_, phase_, stages::CrossingRoots(program_, layout_));
    for (int32_t i = 0; i < flow_.size(); ++i) {
      const OpId id = flow_.op(i).id;
      const int32_t stage = layout_.stage[i];
      if (stage >= 0) {
        Note(program_.op(id), stage);
        ForEachOperand(program_.op(id), [&](ValueId& v) { v = SeenBy(layout_.RankOf(stage), v); });
      } else if (flow_.SumsFor(i) != kNone) {
        ForEachOperand(program_.op(id), [&](ValueId& v) {
          if (const auto whole = whole_.find(v); whole != whole_.end()) v = whole->second;
        });
      }
      ops_.push_back(id);
      CopyParts(id);
      for (const stages::Message& message : layout_.messages) {
        if (names_.contains(message.root) && flow_.LastWrite(message.root) == i) Copy(message);
      }
    }
    return std::move(ops_);
  }

 private:
  static void Note(Op& op, int32_t stage) { op.SetAttr(stages::kStage, Arg::Int(stage)); }

  Op& New(OpKind kind, const Op& like) {
    Op& op = program_.AddOp(kind);
    CopyTags(like, op);
    ops_.push_back(op.id);
    return op;
  }

  void Copy(const stages::Message& message) {
    const ValueId root = message.root;
    const Op& maker = program_.op(program_.value(root).def);
    const Type& type = program_.value(root).type;
    ValueId from = root;
    if (!program_.IsContiguous(type)) {  // as it lies in memory
      Op& flat = New(OpKind::kView, maker);
      flat.args = {Arg::Of(root)};
      from = program_.AddView(flat, Type{type.dtype, {program_.NumElements(type)}, {Dim(1)}}, root, Dim(0));
    }
    Op& copy = New(OpKind::kCopy, maker);
    copy.args = {Arg::Of(from)};
    copy.SetAttr(stages::kMark, Arg::String(names_.at(root)));
    copies_[{layout_.RankOf(message.to.stage), root}] = program_.AddResult(copy, program_.value(from).type);
  }

  // A stage's part of a gradient: whole on each of its ranks before others add theirs.
  void CopyParts(OpId maker) {
    const auto parts = parts_.find(maker);
    if (parts == parts_.end()) return;
    for (const auto& [part, stage] : parts->second) {
      Op& copy = New(OpKind::kCopy, program_.op(maker));
      copy.args = {Arg::Of(part)};
      copy.SetAttr(stages::kMark, Arg::String("gradient"));
      Note(copy, stage);
      const Type& type = program_.value(part).type;
      whole_[part] = program_.AddResult(copy, Type{type.dtype, type.sizes, program_.ContiguousStrides(type.sizes)});
    }
  }

  // What ops of a rank read in place of a value.
  ValueId SeenBy(int32_t rank, ValueId id) {
    const ValueId root = program_.RootOf(id);
    const auto copy = copies_.find({rank, root});
    if (copy == copies_.end()) return id;
    if (id == root && program_.value(id).type == program_.value(copy->second).type) return copy->second;
    auto [seen, fresh] = views_.try_emplace({rank, id}, kNone);
    if (fresh) {
      Op& view = New(OpKind::kView, program_.op(program_.value(copy->second).def));
      view.args = {Arg::Of(copy->second)};
      seen->second = program_.AddView(view, program_.value(id).type, copy->second, program_.value(id).offset);
    }
    return seen->second;
  }

  Program& program_;
  const stages::Flow& flow_;
  const stages::Layout& layout_;
  const Phase& phase_;
  std::map<ValueId, std::string> names_;                           // of what crosses
  std::map<std::pair<int32_t, ValueId>, ValueId> copies_, views_;  // by rank that reads, and storage or value
  std::map<OpId, std::vector<std::pair<ValueId, int32_t>>> parts_;  // of gradients, with their stage, by op
  std::map<ValueId, ValueId> whole_;                                // their copies
  std::vector<OpId> ops_;
};

}  // namespace

Result<bool> Borders(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::string axis, options.Name("axis", "pp"));
  INTERLACE_ASSIGN(const int64_t chunks, options.Int("chunks", 1, 1));
  Phase* phase = program.MicroBatchPhase();
  if (program.level != Level::kCaptured || phase == nullptr || !program.stage || !program.stage->unlike() ||
      program.stage->axis != axis)
    return MakeError(
        "borders is for a captured program with a single micro-batch phase, of stages with unlike ranks; declare them "
        "first: mesh(axes=...,stages=...)");
  const Phase before = *phase;
  const stages::Flow flow(program, before);
  INTERLACE_ASSIGN(const PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  const stages::Deal deal{program.Stages(), chunks};
  INTERLACE_ASSIGN(const std::vector<stages::Border> borders,
                   stages::ChosenBorders(program, flow, options.Text("at", "auto"), deal, model, axis));
  INTERLACE_ASSIGN(const stages::Layout layout,
                   stages::MakeLayout(program, flow, stages::StagesOf(flow, borders), deal, false));
  INTERLACE_ASSIGN(std::vector<int64_t> data, options.Counts("data"));
  INTERLACE_ASSIGN(const stages::Recut recut, stages::Recut::Of(*program.stage, std::move(data)));
  if (!recut.SameRows() && program.Meta(stages::kStagesRows) == nullptr) {
    const std::vector<ValueId> roots = stages::CrossingRoots(program, layout);
    INTERLACE_ASSIGN(const stages::Crossings crossings, stages::FindCrossings(program, before, roots));
    program.SetMeta(stages::kStagesRows, stages::PrintCrossings(crossings, stages::NamesOf(program, before, roots)));
  }
  std::string text;
  for (const stages::Border& border : borders) text += (text.empty() ? "" : "+") + border.param;
  program.SetMeta("stages.at", text);
  std::set<ValueId> apart;  // the programs of all stages have these whole
  for (const auto& [param, of] : layout.shared) apart.insert(param);
  for (const stages::Message& message : layout.messages) apart.insert(message.root);
  std::string whole;
  for (const Param& param : program.params) {
    if (apart.contains(param.value)) whole += (whole.empty() ? "" : "\n") + param.name;
  }
  if (!whole.empty()) program.SetMeta(std::string(tensor::kStagesWhole), whole);
  std::vector<OpId> ops = Marker(program, flow, layout, before).Run(apart);
  program.MicroBatchPhase()->ops = std::move(ops);
  return true;
}

}  // namespace interlace
