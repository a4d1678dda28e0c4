#include "sim/memory_kinds.h"

#include <algorithm>
#include <map>
#include <type_traits>
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

std::string ParentOf(std::string_view name) {
  return std::string(name.substr(0, name.rfind('.') == name.npos ? 0 : name.rfind('.')));
}

// The module that what is persistent is for; of a unit's states that of its first parameter.
std::map<ValueId, std::string> PersistentModules(const Program& program, const Residency& residency) {
  std::map<UnitId, std::string> units;
  for (const Param& param : program.params) units.try_emplace(param.unit, ParentOf(param.name));
  std::map<ValueId, std::string> out;
  ForEachPersistent(program, residency, [&](const auto& entry) {
    using Entry = std::decay_t<decltype(entry)>;
    std::string& module = out[entry.value];
    if constexpr (std::is_same_v<Entry, State>) {
      if (entry.unit != kNone) module = units[entry.unit];
    } else if constexpr (!std::is_same_v<Entry, Const>) {
      module = ParentOf(entry.name);
    }
  });
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
      if (IsUpdate(op) && op.args.size() > 1) kinds[program.RootOf(op.args[1].value)] = MemoryKind::kGradients;
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
      if (program.RootOf(to.takes[t]) != to.takes[t]) continue;
      MemoryKind &taken = kinds[to.takes[t]], &given = kinds[program.RootOf(from.gives[t])];
      taken == MemoryKind::kGradients ? given = taken : taken = given;
    }
  }
  return kinds;
}

Result<MemoryKinds> ComputeMemoryKinds(const Lowered& lowered, const MemoryCurve& curve) {
  const Program& program = *lowered.program;
  MemoryKinds out;
  if (lowered.run.empty()) return out;
  std::vector<MemoryKind> kinds = KindsOfRoots(lowered);
  const Residency residency = ComputeResidency(program);
  BytesByKind persistent{};
  ForEachPersistent(program, residency, [&](const auto& entry) {
    persistent[static_cast<size_t>(kinds[entry.value])] += *program.StorageBytes(program.value(entry.value).type);
  });
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    INTERLACE_ASSIGN(PhaseLiveness life, ComputeLiveness(program, *lowered.phases[p], residency, false));
    size_t count = lowered.ops[p].size();
    std::vector<BytesByKind> change(count + 1, BytesByKind{});
    for (const StorageLife& s : life.storages) {
      size_t kind = static_cast<size_t>(kinds[s.root]);
      int32_t first = std::max(s.first, 0);
      if (first > s.last) continue;
      if (static_cast<size_t>(first) < count) change[first][kind] += s.bytes;
      if (static_cast<size_t>(s.last) < count) change[s.last + 1][kind] -= s.bytes;
    }
    std::vector<BytesByKind>& at_op = out.at_op.emplace_back(count);
    BytesByKind now = persistent;
    for (size_t i = 0; i < count; ++i) {
      for (size_t kind = 0; kind < kMemoryKinds; ++kind) now[kind] += change[i][kind];
      at_op[i] = now;
      at_op[i][static_cast<size_t>(MemoryKind::kWorkspace)] +=
          lowered.ops[p][i].transient_bytes + lowered.ReceiveAt(p, i);
    }
  }
  std::map<ValueId, std::string> modules = PersistentModules(program, residency);
  std::map<std::pair<MemoryKind, std::string>, KindHolder> holders;
  for (const MemoryHolder& at : curve.holders) {
    const auto persists = modules.find(at.root);
    const MemoryKind kind = at.root == kNone ? at.kind : kinds[at.root];
    const std::string& module = persists == modules.end() ? at.module : persists->second;
    KindHolder& h = holders[{kind, module}];
    h.kind = kind, h.module = module, h.bytes += at.bytes, ++h.storages;
  }
  for (auto& [key, holder] : holders) out.at_peak.push_back(std::move(holder));
  StableSort(out.at_peak, [](const KindHolder& a, const KindHolder& b) { return a.bytes > b.bytes; });
  return out;
}

}  // namespace interlace
