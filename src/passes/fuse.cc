// fuse.cc — groups of elementwise ops, norms, softmax and their backward ops become regions, which run as one op each.
//   before: %5: f32[4,8] = aten.mm(%4, %w) {fwd m3}        after: func f0(%0: f32[4,8], %1: f32[4,8]) gives (%3) {
//           %6: f32[4,8] = aten.silu(%5) {fwd m3}                   %2: f32[4,8] = aten.silu(%0)
//           %7: f32[4,8] = aten.mul.Tensor(%6, %3) {fwd m3}         %3: f32[4,8] = aten.mul.Tensor(%2, %1)
//           %8: f32[4,8] = aten.mm(%7, %v) {fwd m3}               }
//                                                                 %5: f32[4,8] = aten.mm(%4, %w) {fwd m3}
//                                                                 %7: f32[4,8] = call f0(%5, %3) {fwd m3}
//                                                                 %8: f32[4,8] = aten.mm(%7, %v) {fwd m3}
// The level of an op is the number of ops that no region has (products, attention, convolutions, ...) on the longest
// path to it. A region is a connected component of ops of one level and one part (forward, backward), so nothing
// outside lies between two of its ops. Ops of the backward part that were captured early sink to the level of their
// users: no forward region makes what backward can make itself. What leaves a region is what was used outside of it
// before, so nothing more is kept for the backward part.
//
// Runs on a captured program after canonicalize and precision, before recompute (which runs whole regions again, with
// the same bits) and before the strategy, so that all strategies have the same regions. Sizes that are not numbers, ops
// that draw, write or are unknown here, and what someone writes stay outside.
//
// Options: min=2: ops of a region at least; modules: those whose path begins so (joined by "+"), all by default.
#include <algorithm>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/scan.h"
#include "ir/func.h"
#include "ir/op_table.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// ATen ops, without overloads, of which code generation makes loops.
const std::unordered_set<std::string_view>& Fusible() {
  static const auto& names = *new std::unordered_set<std::string_view>{"abs",
                                                                       "add",
                                                                       "sub",
                                                                       "rsub",
                                                                       "mul",
                                                                       "div",
                                                                       "neg",
                                                                       "pow",
                                                                       "exp",
                                                                       "log",
                                                                       "sqrt",
                                                                       "rsqrt",
                                                                       "reciprocal",
                                                                       "sin",
                                                                       "cos",
                                                                       "tanh",
                                                                       "sigmoid",
                                                                       "relu",
                                                                       "silu",
                                                                       "gelu",
                                                                       "erf",
                                                                       "square",
                                                                       "maximum",
                                                                       "minimum",
                                                                       "clamp",
                                                                       "clamp_min",
                                                                       "where",
                                                                       "eq",
                                                                       "ne",
                                                                       "lt",
                                                                       "le",
                                                                       "gt",
                                                                       "ge",
                                                                       "logical_and",
                                                                       "logical_not",
                                                                       "logical_or",
                                                                       "bitwise_and",
                                                                       "bitwise_not",
                                                                       "bitwise_or",
                                                                       "masked_fill",
                                                                       "silu_backward",
                                                                       "gelu_backward",
                                                                       "tanh_backward",
                                                                       "sigmoid_backward",
                                                                       "threshold_backward",
                                                                       "sum",
                                                                       "mean",
                                                                       "_softmax",
                                                                       "_softmax_backward_data",
                                                                       "_log_softmax",
                                                                       "_log_softmax_backward_data",
                                                                       "native_layer_norm",
                                                                       "native_layer_norm_backward",
                                                                       "nll_loss_forward",
                                                                       "nll_loss_backward",
                                                                       "embedding",
                                                                       "cat",
                                                                       "clone",
                                                                       "_to_copy",
                                                                       "slice_backward",
                                                                       "select_backward",
                                                                       "addcmul",
                                                                       "constant_pad_nd",
                                                                       "ones_like",
                                                                       "zeros_like",
                                                                       "full_like"};
  return names;
}

bool IsNumeric(const Type& type) {
  const auto number = [](const Dim& dim) { return dim.is_const(); };
  return std::all_of(type.sizes.begin(), type.sizes.end(), number) &&
         std::all_of(type.strides.begin(), type.strides.end(), number);
}

bool IsNumeric(const Arg& arg) {
  if (arg.kind == Arg::Kind::kInt && !arg.integer.is_const()) return false;
  return std::all_of(arg.list.begin(), arg.list.end(), [](const Arg& item) { return IsNumeric(item); });
}

class Fuser {
 public:
  Fuser(Program& program, Phase& phase, int64_t least, const std::vector<std::string>& modules)
      : program_(program),
        phase_(phase),
        facts_(program, phase),
        count_(static_cast<int32_t>(phase.ops.size())),
        least_(least),
        modules_(modules) {}

  bool Run() {
    FindKinds();
    FindLevels();
    FindComponents();
    FindRegions();
    return !regions_.empty() && Rewrite();
  }

 private:
  enum class Kind : uint8_t { kFuse, kView, kOther };
  struct Region {
    std::vector<int32_t> ops;  // ascending
    std::vector<ValueId> gives;
  };

  const Op& At(int32_t index) const { return std::as_const(program_).op(phase_.ops[index]); }
  const Value& ValueOf(ValueId id) const { return std::as_const(program_).value(id); }
  // Ops whose order is kept whatever they read: draws of one generator, modules in Python.
  bool IsOrdered(int32_t index) const { return At(index).rng || At(index).kind == OpKind::kCallPython; }

  bool IsChosen(const Op& op) const {
    if (modules_.empty()) return true;
    if (op.module == kNone) return false;
    const std::string& path = program_.modules[op.module].path;
    return std::any_of(modules_.begin(), modules_.end(), [&](const std::string& m) { return path.starts_with(m); });
  }

  bool MayFuse(const Op& op) const {
    if (op.kind != OpKind::kLibrary || !op.name.starts_with("aten.") || op.rng || HasEffect(program_, op)) return false;
    std::string_view name = std::string_view(op.name).substr(5);
    if (!Fusible().contains(name.substr(0, name.find('.'))) || !op.attrs.empty() || op.lane || !IsChosen(op))
      return false;
    bool fits = !op.results.empty();
    for (ValueId id : op.results) {
      if (id == kNone) continue;
      fits = fits && program_.RootOf(id) == id && IsNumeric(ValueOf(id).type) && facts_.writes[id].empty();
    }
    ForEachOperand(op, [&](ValueId id) {
      fits = fits && IsNumeric(ValueOf(id).type) && ValueOf(id).offset.is_const() &&
             facts_.writes[program_.RootOf(id)].empty();
    });
    for (const Arg& arg : op.args) fits = fits && IsNumeric(arg);
    for (const NamedArg& named : op.named) fits = fits && IsNumeric(named.arg);
    return fits;
  }

  void FindKinds() {
    kind_.resize(count_);
    for (int32_t i = 0; i < count_; ++i)
      kind_[i] = MayFuse(At(i)) ? Kind::kFuse : IsPureView(program_, At(i)) ? Kind::kView : Kind::kOther;
  }

  // The op that made the storage of an operand; -1: none of this phase.
  int32_t MakerOf(ValueId id) const { return facts_.def[program_.RootOf(id)]; }

  void FindLevels() {
    level_.assign(count_, 0);
    std::vector<std::vector<int32_t>> users(count_);
    int32_t ordered = -1;
    for (int32_t i = 0; i < count_; ++i) {
      const auto after = [&](int32_t def) {
        if (def < 0 || def >= i) return;
        level_[i] = std::max(level_[i], level_[def]);
        users[def].push_back(i);
      };
      ForEachOperand(At(i), [&](ValueId id) {
        after(facts_.def[id]);
        after(MakerOf(id));
      });
      if (IsOrdered(i)) after(std::exchange(ordered, i));
      if (kind_[i] == Kind::kOther) ++level_[i];
    }
    for (int32_t i = count_ - 1; i >= 0; --i) {
      if (kind_[i] == Kind::kOther || At(i).part != Part::kBackward || users[i].empty()) continue;
      int32_t latest = INT32_MAX;
      for (int32_t user : users[i]) latest = std::min(latest, level_[user] - (kind_[user] == Kind::kOther ? 1 : 0));
      level_[i] = std::max(level_[i], latest);
    }
  }

  int32_t Find(int32_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }

  void FindComponents() {
    parent_.resize(count_);
    for (int32_t i = 0; i < count_; ++i) parent_[i] = i;
    for (int32_t i = 0; i < count_; ++i) {
      if (kind_[i] != Kind::kFuse) continue;
      ForEachOperand(At(i), [&](ValueId id) {
        const int32_t maker = MakerOf(id);
        if (maker < 0 || kind_[maker] != Kind::kFuse || level_[maker] != level_[i] || At(maker).part != At(i).part)
          return;
        parent_[std::max(Find(i), Find(maker))] = std::min(Find(i), Find(maker));
      });
    }
  }

  void FindRegions() {
    std::vector<Region> all(count_);
    for (int32_t i = 0; i < count_; ++i) {
      if (kind_[i] == Kind::kFuse) all[Find(i)].ops.push_back(i);
    }
    region_of_.assign(count_, -1);
    std::vector<Region>& out = regions_;
    for (Region& region : all) {
      if (static_cast<int64_t>(region.ops.size()) < least_) continue;
      for (int32_t i : region.ops) region_of_[i] = static_cast<int32_t>(out.size());
      out.push_back(std::move(region));
    }
    // What is read outside, directly or through a view there that someone reads, or leaves the phase.
    std::vector<char>& outside = outside_;
    outside.assign(program_.num_values(), 0);
    for (int32_t i = count_ - 1; i >= 0; --i) {
      const Op& op = At(i);
      if (kind_[i] == Kind::kView) continue;  // roots stand for their views
      ForEachOperand(op, [&](ValueId id) {
        const ValueId root = program_.RootOf(id);
        const int32_t maker = facts_.def[root];
        if (maker >= 0 && (region_of_[i] < 0 || region_of_[maker] != region_of_[i])) outside[root] = 1;
      });
      for (ValueId id : op.results) {
        if (id != kNone && program_.RootOf(id) != id) outside[program_.RootOf(id)] = 1;
      }
    }
    for (ValueId id : phase_.Outgoing()) outside[program_.RootOf(id)] = 1;
    for (Region& region : out) {
      for (int32_t i : region.ops) {
        for (ValueId id : At(i).results) {
          if (id != kNone && outside[id]) region.gives.push_back(id);
        }
      }
    }
  }

  // The body with values of its own, and in `operands` what it is called with.
  Program BodyOf(const Region& region, std::vector<ValueId>& operands) {
    Program body;
    Phase phase{"body", {}, {}, {}};
    std::unordered_map<ValueId, ValueId> inside;
    const std::unordered_set<int32_t> members(region.ops.begin(), region.ops.end());
    const auto type_of = [&](ValueId id) { return ValueOf(id).type; };
    const auto map = [&](ValueId id) {
      if (const auto found = inside.find(id); found != inside.end()) return found->second;
      const ValueId root = program_.RootOf(id);
      if (root != id && members.contains(facts_.def[root])) {  // a view of what the region made
        const OpId view = body.AddOp(OpKind::kView).id;
        body.op(view).args = {Arg::Of(inside.at(root))};
        const ValueId made = body.AddView(body.op(view), type_of(id), inside.at(root), ValueOf(id).offset);
        phase.ops.push_back(view);
        return inside[id] = made;
      }
      const ValueId made = body.AddValue(ValueKind::kInput, type_of(id)).id;
      body.inputs.push_back({made, std::to_string(operands.size())});
      operands.push_back(id);
      return inside[id] = made;
    };
    for (int32_t i : region.ops) {
      const Op& outer = At(i);
      Op copy = outer;
      ForEachOperand(copy, [&](ValueId& id) { id = map(id); });
      Op& op = body.AddOp(outer.name);
      op.args = std::move(copy.args);
      op.named = std::move(copy.named);
      for (ValueId id : outer.results) {
        if (id == kNone) {
          op.results.push_back(kNone);
        } else {
          inside[id] = body.AddResult(op, type_of(id));
        }
      }
      phase.ops.push_back(op.id);
    }
    for (ValueId id : region.gives) phase.gives.push_back(inside.at(id));
    body.phases.push_back(std::move(phase));
    body.Compact();
    return body;
  }

  OpId CallTo(const Region& region) {
    std::vector<ValueId> operands;
    const int32_t func = AddFunc(program_, BodyOf(region, operands));
    const Op& last = At(region.ops.back());
    Op& call = AddLike(program_, last, CallOf(func));
    for (ValueId id : operands) call.args.push_back(Arg::Of(id));
    for (ValueId id : region.gives) {
      program_.value(id).def = call.id;
      program_.value(id).result_index = static_cast<int32_t>(call.results.size());
      call.results.push_back(id);
    }
    return call.id;
  }

  // A view of what stays inside a region: those who read it are there too.
  bool IsInside(int32_t index) const {
    if (kind_[index] != Kind::kView) return false;
    return std::all_of(At(index).results.begin(), At(index).results.end(), [&](ValueId id) {
      const int32_t maker = id == kNone ? -1 : MakerOf(id);
      return maker >= 0 && region_of_[maker] >= 0 && !outside_[program_.RootOf(id)];
    });
  }

  // Regions and the other ops in their old order, as far as operands are there; a region stands where its last op did,
  // since what was captured too early came first. False: they wait for one another, and nothing was changed.
  bool Rewrite() {
    const auto node_of = [&](int32_t i) { return region_of_[i] < 0 ? i : count_ + region_of_[i]; };
    const int32_t nodes = count_ + static_cast<int32_t>(regions_.size());
    std::vector<std::vector<int32_t>> next(nodes);
    std::vector<int32_t> waits(nodes, 0);
    std::vector<int32_t> last_write(program_.num_values(), -1);
    std::vector<std::vector<int32_t>> readers(program_.num_values());
    const auto edge = [&](int32_t from, int32_t to) {
      if (from < 0 || node_of(from) == node_of(to)) return;
      next[node_of(from)].push_back(node_of(to));
      ++waits[node_of(to)];
    };
    int32_t ordered = -1;
    for (int32_t i = 0; i < count_; ++i) {
      const Op& op = At(i);
      if (IsOrdered(i)) edge(std::exchange(ordered, i), i);
      ForEachOperand(op, [&](ValueId id) {
        const ValueId root = program_.RootOf(id);
        const int32_t maker = facts_.def[root];
        if (region_of_[i] >= 0 && maker >= 0 && region_of_[maker] == region_of_[i]) return;
        if (facts_.def[id] != i) edge(facts_.def[id], i);
        edge(facts_.def[root], i);
        edge(last_write[root], i);
        readers[root].push_back(i);
      });
      for (ValueId id : op.results) {
        if (id != kNone && program_.RootOf(id) != id) edge(facts_.def[program_.RootOf(id)], i);
      }
      for (ValueId id : WrittenOperands(program_, op)) {
        const ValueId root = program_.RootOf(id);
        for (int32_t reader : readers[root]) edge(reader, i);
        last_write[root] = i;
        readers[root].clear();
      }
    }
    using Entry = std::pair<int32_t, int32_t>;  // place, node
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    const auto place = [&](int32_t node) { return node < count_ ? node : regions_[node - count_].ops.back(); };
    for (int32_t node = 0; node < nodes; ++node) {
      if (waits[node] == 0 && (node >= count_ || region_of_[node] < 0)) ready.emplace(place(node), node);
    }
    std::vector<int32_t> order;
    while (!ready.empty()) {
      const int32_t node = ready.top().second;
      ready.pop();
      order.push_back(node);
      for (int32_t after : next[node]) {
        if (--waits[after] == 0) ready.emplace(place(after), after);
      }
    }
    if (std::any_of(waits.begin(), waits.end(), [](int32_t left) { return left > 0; })) return false;
    std::vector<OpId> ops;
    for (int32_t node : order) {
      if (node >= count_ && !regions_[node - count_].gives.empty()) ops.push_back(CallTo(regions_[node - count_]));
      if (node < count_ && !IsInside(node)) ops.push_back(phase_.ops[node]);
    }
    phase_.ops = std::move(ops);
    return true;
  }

  Program& program_;
  Phase& phase_;
  PhaseFacts facts_;
  int32_t count_;
  int64_t least_;
  const std::vector<std::string>& modules_;
  std::vector<Kind> kind_;
  std::vector<Region> regions_;
  std::vector<char> outside_;  // by root: read outside of the region that makes it
  std::vector<int32_t> level_, parent_, region_of_;
};

}  // namespace

Result<bool> Fuse(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const int64_t least, options.Int("min", 2, 1));
  std::vector<std::string> modules;
  const std::string wanted = options.Text("modules", "");  // named: Split returns views of it
  for (std::string_view path : Split(wanted, '+')) {
    if (!path.empty()) modules.emplace_back(path);
  }
  bool changed = false;
  for (Phase& phase : program.phases) {
    if (phase.kind == PhaseKind::kMicroBatch) changed = Fuser(program, phase, least, modules).Run() || changed;
  }
  return changed;
}

}  // namespace interlace
