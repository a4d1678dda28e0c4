#include "sim/memory_kinds.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/sort.h"
#include "ir/liveness.h"
#include "ir/op_table.h"
#include "ir/residency.h"
#include "sim/critical_path.h"

namespace interlace {
namespace {

MemoryKind KindOfState(std::string_view role) {
  if (role == "shard" || role == "full" || role == "master") return MemoryKind::kParameters;
  if (role.ends_with("grad")) return MemoryKind::kGradients;
  return MemoryKind::kOptimizer;
}

MemoryKind KindOfResult(const Op& op) {
  if (op.kind == OpKind::kGatherStart) return MemoryKind::kGathered;
  if (op.kind == OpKind::kGradBegin || op.kind == OpKind::kReduceStart) return MemoryKind::kGradients;
  return op.part == Part::kForward ? MemoryKind::kActivations : MemoryKind::kTemporaries;
}

// The module a unit's states are for.
std::vector<std::string> ModulesOfUnits(const Program& program) {
  std::vector<std::string> out(program.units.size());
  std::vector<bool> known(program.units.size(), false);
  for (const Param& param : program.params) {
    if (param.unit == kNone || known[param.unit]) continue;
    known[param.unit] = true;
    size_t dot = param.name.rfind('.');
    out[param.unit] = dot == std::string::npos ? "" : param.name.substr(0, dot);
  }
  return out;
}

struct PersistentRoot {
  ValueId value;
  std::string module;
};

std::vector<PersistentRoot> PersistentRoots(const Program& program) {
  std::vector<PersistentRoot> out;
  std::vector<std::string> units = ModulesOfUnits(program);
  auto parent = [](std::string_view name) {
    return std::string(name.substr(0, name.rfind('.') == name.npos ? 0 : name.rfind('.')));
  };
  auto add = [&](ValueId id, std::string module) {
    if (program.RootOf(id) == id) out.push_back({id, std::move(module)});
  };
  for (const Param& p : program.params) {
    if (p.unit == kNone) add(p.value, parent(p.name));
  }
  for (const Buffer& b : program.buffers) add(b.value, parent(b.name));
  for (const Const& c : program.consts) add(c.value, "");
  for (const State& s : program.states) add(s.value, s.unit == kNone ? "" : units[s.unit]);
  return out;
}

}  // namespace

std::vector<MemoryKind> KindsOfRoots(const Lowered& lowered) {
  const Program& program = *lowered.program;
  std::vector<MemoryKind> kinds(program.num_values(), MemoryKind::kTemporaries);
  for (const Param& p : program.params) kinds[p.value] = MemoryKind::kParameters;
  for (const Buffer& b : program.buffers) kinds[b.value] = MemoryKind::kBuffers;
  for (const Const& c : program.consts) kinds[c.value] = MemoryKind::kBuffers;
  for (const State& s : program.states) kinds[s.value] = KindOfState(s.role);
  for (const Phase* phase : lowered.phases) {
    for (const Carried& load : phase->loads) kinds[load.value] = MemoryKind::kActivations;
    for (OpId id : phase->ops) {
      const Op& op = program.op(id);
      for (ValueId result : op.results) {
        if (result != kNone) kinds[result] = KindOfResult(op);
      }
      if (op.kind == OpKind::kGrad && op.args.size() == 2 && op.args[1].kind == Arg::Kind::kValue) {
        kinds[program.RootOf(op.args[1].value)] = MemoryKind::kGradients;
      }
    }
  }
  // A take is what the phase before it gave; twice round, as the first phase takes from the last.
  const std::vector<int32_t>& run = lowered.run;
  for (size_t i = 1; i < 2 * run.size() + 1; ++i) {
    const Phase& from = *lowered.phases[run[(i - 1) % run.size()]];
    const Phase& to = *lowered.phases[run[i % run.size()]];
    for (size_t t = 0; t < std::min(from.gives.size(), to.takes.size()); ++t) {
      if (program.RootOf(to.takes[t]) == to.takes[t]) kinds[to.takes[t]] = kinds[program.RootOf(from.gives[t])];
    }
  }
  return kinds;
}

Result<MemoryKinds> ComputeMemoryKinds(const Lowered& lowered, const MemoryCurve& curve) {
  const Program& program = *lowered.program;
  MemoryKinds out;
  if (lowered.run.empty()) return out;
  std::vector<MemoryKind> kinds = KindsOfRoots(lowered);
  std::map<std::pair<MemoryKind, std::string>, KindHolder> holders;
  auto hold = [&](MemoryKind kind, std::string module, int64_t bytes) {
    KindHolder& h = holders[{kind, module}];
    h.kind = kind, h.module = std::move(module), h.bytes += bytes, ++h.storages;
  };
  BytesByKind persistent{};
  const Residency residency = ComputeResidency(program);
  const std::set<ValueId> moving(residency.states.begin(), residency.states.end());
  for (PersistentRoot& root : PersistentRoots(program)) {
    if (moving.contains(root.value)) continue;  // among the storages of each phase
    INTERLACE_ASSIGN(int64_t bytes, program.StorageBytes(program.value(root.value).type));
    persistent[static_cast<size_t>(kinds[root.value])] += bytes;
    hold(kinds[root.value], std::move(root.module), bytes);
  }
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    INTERLACE_ASSIGN(PhaseLiveness life, ComputeLiveness(program, *lowered.phases[p]));
    size_t count = lowered.ops[p].size();
    std::vector<BytesByKind> change(count + 1, BytesByKind{});
    bool peak_here = curve.peak.place >= 0 && lowered.run[curve.peak.run_index] == static_cast<int32_t>(p);
    for (const StorageLife& s : life.storages) {
      size_t kind = static_cast<size_t>(kinds[s.root]);
      int32_t first = std::max(s.first, 0);
      if (first > s.last) continue;
      if (static_cast<size_t>(first) < count) change[first][kind] += s.bytes;
      if (static_cast<size_t>(s.last) < count) change[s.last + 1][kind] -= s.bytes;
      if (!peak_here || first > curve.peak.place || s.last < curve.peak.place) continue;
      OpId def = program.value(s.root).def;
      hold(kinds[s.root], def == kNone ? "" : ModuleOf(program, program.op(def)), s.bytes);
    }
    std::vector<BytesByKind>& at_op = out.at_op.emplace_back(count);
    BytesByKind now = persistent;
    for (size_t i = 0; i < count; ++i) {
      for (size_t kind = 0; kind < kMemoryKinds; ++kind) now[kind] += change[i][kind];
      at_op[i] = now;
      at_op[i][static_cast<size_t>(MemoryKind::kWorkspace)] +=
          lowered.ops[p][i].transient_bytes + lowered.ReceiveAt(p, i);
    }
    if (!peak_here) continue;
    if (!curve.through.empty() && curve.through[curve.peak.run_index] > 0)
      hold(MemoryKind::kActivations, "", curve.through[curve.peak.run_index]);
    const LoweredOp& at = lowered.ops[p][curve.peak.place];
    if (const int64_t receive = lowered.ReceiveAt(p, curve.peak.place); receive > 0)
      hold(MemoryKind::kWorkspace, "", receive);
    if (at.transient_bytes > 0) hold(MemoryKind::kWorkspace, ModuleOf(program, program.op(at.op)), at.transient_bytes);
  }
  for (auto& [key, holder] : holders) out.at_peak.push_back(std::move(holder));
  StableSort(out.at_peak, [](const KindHolder& a, const KindHolder& b) { return a.bytes > b.bytes; });
  return out;
}

}  // namespace interlace
