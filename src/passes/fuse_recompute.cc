#include "passes/fuse_recompute.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/min_cut.h"
#include "ir/op_table.h"

namespace interlace {
namespace {

using Kind = FuseRegions::Kind;

// One element of the result from few of the operands, but for softmax: a row twice.
bool MayMakeAgain(const Op& op) {
  static const auto& never = *new std::unordered_set<std::string_view>{
      "sum",      "mean", "native_layer_norm", "native_layer_norm_backward", "nll_loss_forward", "nll_loss_backward",
      "embedding"};
  return op.results.size() == 1 && !never.contains(AtenName(op));
}

class Chooser {
 public:
  Chooser(Program& program, Phase& phase, const FuseOptions& options)
      : program_(program), phase_(phase), found_(program, phase, options), alone_(options.least <= 2) {}

  bool Run() {
    FindReaders();
    again_.assign(program_.num_values(), 0);
    for (const FuseRegions::Region& region : found_.regions) {
      if (found_.At(region.ops.front()).part == Part::kForward) Choose(region);
    }
    if (std::find(again_.begin(), again_.end(), 1) == again_.end()) return false;
    Rewrite();
    RemoveUnread();
    return true;
  }

 private:
  ValueId RootOf(ValueId id) const { return program_.RootOf(id); }

  void FindReaders() {
    made_ = kept_ = std::vector<char>(program_.num_values(), 0);
    readers_.resize(program_.num_values());
    for (int32_t i = 0; i < found_.count; ++i) {
      if (found_.kind[i] == Kind::kView) continue;  // roots stand for their views
      ForEachOperand(found_.At(i), [&](ValueId id) {
        const ValueId root = RootOf(id);
        const int32_t maker = found_.facts.def[root];
        if (found_.At(i).part == Part::kForward) {
          if (maker < 0 || found_.region_of[i] < 0 || found_.region_of[i] != found_.region_of[maker]) made_[root] = 1;
        } else if (found_.kind[i] == Kind::kFuse && (found_.region_of[i] >= 0 || alone_)) {
          if (readers_[root].empty() || readers_[root].back() != i) readers_[root].push_back(i);
        } else {
          kept_[root] = 1;
        }
      });
    }
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (found_.facts.leaves[id] || !found_.facts.writes[id].empty()) kept_[id] = 1;
    }
  }

  bool IsKept(ValueId root) const { return kept_[root] || !readers_[root].empty(); }

  // Bytes to keep `root`, to write it if nobody does, and to read it if those who read what it stands for do not.
  int64_t CostOf(ValueId root, bool written, bool read) const {
    const Value& value = std::as_const(program_).value(root);
    const Result<int64_t> bytes = program_.StorageBytes(value.type);
    if (!bytes.ok() || (value.kind == ValueKind::kParam && !IsKept(root))) return kNeverCut;
    return *bytes * ((written ? 0 : 1) + (written && IsKept(root) ? 0 : 1) + (read ? 0 : 1));
  }

  void Choose(const FuseRegions::Region& region) {
    const auto is_wanted = [&](ValueId root) { return !made_[root] && !kept_[root] && !readers_[root].empty(); };
    std::unordered_set<ValueId> read;  // where values of this region are read in the backward part
    for (ValueId root : region.gives) {
      if (!is_wanted(root)) continue;
      for (int32_t reader : readers_[root]) {
        const int32_t there = found_.region_of[reader];
        const std::vector<int32_t> one{reader};
        for (int32_t i : there < 0 ? one : found_.regions[there].ops)
          ForEachOperand(found_.At(i), [&](ValueId id) { read.insert(RootOf(id)); });
      }
    }
    if (read.empty()) return;
    std::vector<CutNode> nodes;
    std::vector<ValueId> root_of;
    std::unordered_map<ValueId, int32_t> node_of;
    const auto add = [&](ValueId root, CutNode node) {
      node_of[root] = static_cast<int32_t>(nodes.size());
      nodes.push_back(std::move(node));
      root_of.push_back(root);
    };
    for (int32_t i : region.ops) {
      const Op& op = found_.At(i);
      std::vector<int32_t> operands;
      ForEachOperand(op, [&](ValueId id) {
        const ValueId root = RootOf(id);
        if (!node_of.contains(root)) add(root, {CostOf(root, true, read.contains(root)), {}, true, false});
        operands.push_back(node_of[root]);
      });
      for (ValueId id : op.results) {
        if (id == kNone) continue;
        const bool written = made_[id] || kept_[id];
        for (int32_t operand : operands) nodes[operand].next.push_back(static_cast<int32_t>(nodes.size()));
        const int64_t cost = CostOf(id, written, written && read.contains(id));
        add(id, {cost, {}, written || !MayMakeAgain(op), is_wanted(id)});
      }
    }
    const std::vector<CutSide> sides = MinCut(nodes);
    for (size_t i = 0; i < nodes.size(); ++i)
      if (sides[i] == CutSide::kSink) again_[root_of[i]] = 1;
  }

  // Backward ops read values of their own level, which stand in front of the first of them.
  void Rewrite() {
    PhaseEditor edit(program_, phase_);
    for (int32_t i = 0; i < found_.count; ++i) {
      if (found_.kind[i] != Kind::kFuse || found_.At(i).part == Part::kForward) continue;
      ForEachOperand(edit.op(i), [&](ValueId& id) {
        if (again_[RootOf(id)]) id = Again(id, i, edit);
      });
    }
    edit.Finish();
  }

  // The value, or view, as it is made again for the op at `reader`.
  ValueId Again(ValueId id, int32_t reader, PhaseEditor& edit) {
    const std::pair<int32_t, ValueId> key{found_.level[reader], id};
    if (const auto made = made_again_.find(key); made != made_again_.end()) return made->second;
    const Value value = std::as_const(program_).value(id);
    const Op& first = found_.At(found_.facts.def[value.root]);
    const bool is_view = value.root != id;
    std::unordered_map<ValueId, ValueId> now;
    const auto make = [&](ValueId operand) {
      if (again_[RootOf(operand)]) now.emplace(operand, Again(operand, reader, edit));
    };
    if (is_view) {
      make(value.root);
    } else {
      ForEachOperand(first, make);
    }
    Op& op =
        is_view ? AddLike(program_, first, OpKind::kView, {now.at(value.root)}) : AddLike(program_, first, first.name);
    op.part = Part::kBackward;
    if (!is_view) {
      op.args = first.args;
      op.named = first.named;
      ForEachOperand(op, [&](ValueId& operand) {
        if (const auto found = now.find(operand); found != now.end()) operand = found->second;
      });
    }
    const ValueId made = is_view ? program_.AddView(op, value.type, now.at(value.root), value.offset)
                                 : program_.AddResult(op, value.type);
    edit.Before(reader, op.id);
    return made_again_[key] = made;
  }

  // Of what regions are made: the rest is as it was.
  void RemoveUnread() {
    const PhaseFacts facts(program_, phase_);
    std::vector<char> read = facts.leaves;
    std::vector<OpId> ops;
    for (size_t i = phase_.ops.size(); i-- > 0;) {
      const Op& op = std::as_const(program_).op(phase_.ops[i]);
      const auto is_again = [&](ValueId id) { return id != kNone && again_[RootOf(id)] && !read[id]; };
      if (op.part == Part::kForward && !op.results.empty() &&
          std::all_of(op.results.begin(), op.results.end(), is_again))
        continue;
      ForEachOperand(op, [&](ValueId id) { read[id] = read[RootOf(id)] = 1; });
      ops.push_back(phase_.ops[i]);
    }
    phase_.ops.assign(ops.rbegin(), ops.rend());
  }

  Program& program_;
  Phase& phase_;
  const FuseRegions found_;
  bool alone_;                                 // an op becomes a region when another one is made for it
  std::vector<char> made_, kept_;              // by root: forward ops outside read it; it stays for the backward part
  std::vector<std::vector<int32_t>> readers_;  // by root: ops of the backward part for which it could be made again
  std::vector<char> again_;                    // by root: made again
  std::map<std::pair<int32_t, ValueId>, ValueId> made_again_;  // by level and value
};

// A dropout's mask, zeros and ones in the dtype of what it masks, is read as bytes that are widened again, so that of
// the two the bytes are kept: %2 = bernoulli(%1), %3: b8 = _to_copy(%2), %4: f32 = _to_copy(%3), and %4 is read for %2.
bool NarrowMasks(Program& program, Phase& phase, const FuseOptions& options) {
  if (std::none_of(phase.ops.begin(), phase.ops.end(),
                   [&](OpId id) { return AtenName(std::as_const(program).op(id)) == "bernoulli"; }))
    return false;
  const FuseRegions found(program, phase, options);
  PhaseEditor edit(program, phase);
  bool changed = false;
  for (int32_t i = 0; i < found.count; ++i) {
    const Op& draw = found.At(i);
    if (AtenName(draw) != "bernoulli" || draw.part != Part::kForward || draw.results.size() != 1) continue;
    const ValueId mask = draw.results.front();
    if (DTypeBytes(std::as_const(program).value(mask).type.dtype) == 1) continue;
    const std::vector<int32_t>& uses = found.facts.uses[mask];
    if (found.facts.leaves[mask] || uses.empty() || found.region_of[uses.front()] < 0) continue;
    const auto fits = [&](int32_t use) {  // by the first one's region in the forward part, by others behind it
      return found.kind[use] == Kind::kFuse &&
             (found.At(use).part != Part::kForward || found.region_of[use] == found.region_of[uses.front()]);
    };
    if (!std::all_of(uses.begin(), uses.end(), fits)) continue;
    std::unordered_set<ValueId> of_it{mask};  // what is made of it there: some of that is read behind
    bool behind = false;
    for (int32_t op : found.regions[found.region_of[uses.front()]].ops) {
      bool reads = false;
      ForEachOperand(found.At(op), [&](ValueId id) { reads = reads || of_it.contains(program.RootOf(id)); });
      if (reads) of_it.insert(found.At(op).results.begin(), found.At(op).results.end());
    }
    for (ValueId id : of_it)
      if (id != kNone && !found.facts.uses[id].empty())
        behind = behind || found.At(found.facts.uses[id].back()).part != Part::kForward;
    if (!behind) continue;
    Type type = std::as_const(program).value(mask).type;
    ValueId last = mask;
    for (DType dtype : {DType::kB8, type.dtype}) {
      Op& copy = AddLike(program, found.At(uses.front()), "aten._to_copy", {last});
      copy.named.push_back({"dtype", Arg::Word(std::string(DTypeName(dtype)))});
      type.dtype = dtype;
      last = program.AddResult(copy, type);
      edit.Before(uses.front(), copy.id);
    }
    for (int32_t use : uses) ForEachOperand(edit.op(use), [&](ValueId& id) { id = id == mask ? last : id; });
    changed = true;
  }
  if (changed) edit.Finish();
  return changed;
}

}  // namespace

bool FuseRecompute(Program& program, Phase& phase, const FuseOptions& options) {
  const bool narrowed = NarrowMasks(program, phase, options);
  return Chooser(program, phase, options).Run() || narrowed;
}

}  // namespace interlace
