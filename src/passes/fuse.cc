// fuse.cc — groups of elementwise ops, norms, softmax and their backward ops become regions, which run as one op each.
//   before: %5: f32[4,8] = aten.mm(%4, %w) {fwd m3}        after: func f0(%0: f32[4,8], %1: f32[4,8]) gives (%3) {
//           %6: f32[4,8] = aten.silu(%5) {fwd m3}                   %2: f32[4,8] = aten.silu(%0)
//           %7: f32[4,8] = aten.mul.Tensor(%6, %3) {fwd m3}         %3: f32[4,8] = aten.mul.Tensor(%2, %1)
//           %8: f32[4,8] = aten.mm(%7, %v) {fwd m3}               }
//                                                                 %5: f32[4,8] = aten.mm(%4, %w) {fwd m3}
//                                                                 %7: f32[4,8] = call f0(%5, %3) {fwd m3}
//                                                                 %8: f32[4,8] = aten.mm(%7, %v) {fwd m3}
// fuse_regions.h says which. What leaves a region is what was used outside of it before, so nothing more is kept for
// the backward part, and less where fuse_recompute.h finds that making it again costs less than keeping it.
//
// Runs on a captured program after canonicalize and precision, before recompute (which runs whole regions again, with
// the same bits) and before the strategy, so that all strategies have the same regions.
//
// Options: min=2: ops of a region at least; modules: those whose path begins so (joined by "+"), all by default;
// recompute=false: what is kept for the backward part stays as it was. Where pass `pipeline` puts forward and backward
// parts into phases of their own, pass `rematerialize` makes that choice before it.
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
#include "passes/fuse_recompute.h"
#include "passes/fuse_regions.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

class Fuser {
 public:
  Fuser(Program& program, Phase& phase, const FuseRegions& found) : program_(program), phase_(phase), found_(found) {}

  // Regions and the other ops in their old order, as far as operands are there; a region stands where its last op did,
  // since what was captured too early came first. False: they wait for one another, and nothing was changed.
  bool Rewrite() {
    const auto node_of = [&](int32_t i) { return found_.region_of[i] < 0 ? i : found_.count + found_.region_of[i]; };
    const int32_t nodes = found_.count + static_cast<int32_t>(found_.regions.size());
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
    for (int32_t i = 0; i < found_.count; ++i) {
      const Op& op = found_.At(i);
      if (found_.IsOrdered(i)) edge(std::exchange(ordered, i), i);
      ForEachOperand(op, [&](ValueId id) {
        const ValueId root = program_.RootOf(id);
        const int32_t maker = found_.facts.def[root];
        if (found_.region_of[i] >= 0 && maker >= 0 && found_.region_of[maker] == found_.region_of[i]) return;
        if (found_.facts.def[id] != i) edge(found_.facts.def[id], i);
        edge(found_.facts.def[root], i);
        edge(last_write[root], i);
        readers[root].push_back(i);
      });
      for (ValueId id : op.results) {
        if (id != kNone && program_.RootOf(id) != id) edge(found_.facts.def[program_.RootOf(id)], i);
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
    const auto place = [&](int32_t node) {
      return node < found_.count ? node : found_.regions[node - found_.count].ops.back();
    };
    for (int32_t node = 0; node < nodes; ++node) {
      if (waits[node] == 0 && (node >= found_.count || found_.region_of[node] < 0)) ready.emplace(place(node), node);
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
      if (node >= found_.count && !found_.regions[node - found_.count].gives.empty())
        ops.push_back(CallTo(found_.regions[node - found_.count]));
      if (node < found_.count && !found_.IsInside(node)) ops.push_back(phase_.ops[node]);
    }
    phase_.ops = std::move(ops);
    return true;
  }

 private:
  // The body with values of its own, and in `operands` what it is called with.
  Program BodyOf(const FuseRegions::Region& region, std::vector<ValueId>& operands) {
    Program body;
    Phase phase{"body", {}, {}, {}};
    std::unordered_map<ValueId, ValueId> inside;
    const std::unordered_set<int32_t> members(region.ops.begin(), region.ops.end());
    const auto type_of = [&](ValueId id) { return std::as_const(program_).value(id).type; };
    const auto map = [&](ValueId id) {
      if (const auto found = inside.find(id); found != inside.end()) return found->second;
      const ValueId root = program_.RootOf(id);
      if (root != id && members.contains(found_.facts.def[root])) {  // a view of what the region made
        const OpId view = body.AddOp(OpKind::kView).id;
        body.op(view).args = {Arg::Of(inside.at(root))};
        const ValueId made =
            body.AddView(body.op(view), type_of(id), inside.at(root), std::as_const(program_).value(id).offset);
        phase.ops.push_back(view);
        return inside[id] = made;
      }
      const ValueId made = body.AddValue(ValueKind::kInput, type_of(id)).id;
      body.inputs.push_back({made, std::to_string(operands.size())});
      operands.push_back(id);
      return inside[id] = made;
    };
    for (int32_t i : region.ops) {
      const Op& outer = found_.At(i);
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

  OpId CallTo(const FuseRegions::Region& region) {
    std::vector<ValueId> operands;
    const int32_t func = AddFunc(program_, BodyOf(region, operands));
    const Op& last = found_.At(region.ops.back());
    Op& call = AddLike(program_, last, CallOf(func));
    for (ValueId id : operands) call.args.push_back(Arg::Of(id));
    for (ValueId id : region.gives) {
      program_.value(id).def = call.id;
      program_.value(id).result_index = static_cast<int32_t>(call.results.size());
      call.results.push_back(id);
    }
    return call.id;
  }

  Program& program_;
  Phase& phase_;
  const FuseRegions& found_;
};

}  // namespace

namespace {

Result<FuseOptions> Wanted(const PassOptions& options) {
  FuseOptions wanted;
  INTERLACE_ASSIGN(wanted.least, options.Int("min", 2, 1));
  const std::string modules = options.Text("modules", "");  // named: Split returns views of it
  for (std::string_view path : Split(modules, '+')) {
    if (!path.empty()) wanted.modules.emplace_back(path);
  }
  return wanted;
}

}  // namespace

Result<bool> Rematerialize(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const FuseOptions wanted, Wanted(options));
  bool changed = false;
  for (Phase& phase : program.phases) {
    if (phase.kind == PhaseKind::kMicroBatch) changed = FuseRecompute(program, phase, wanted) || changed;
  }
  return changed;
}

Result<bool> Fuse(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const FuseOptions wanted, Wanted(options));
  bool changed = false;
  if (options.Text("recompute", "true") == "true") {
    INTERLACE_ASSIGN(changed, Rematerialize(program, options));
  }
  for (Phase& phase : program.phases) {
    if (phase.kind != PhaseKind::kMicroBatch) continue;
    const FuseRegions found(program, phase, wanted);
    changed = (!found.regions.empty() && Fuser(program, phase, found).Rewrite()) || changed;
  }
  return changed;
}

}  // namespace interlace
