#include "sim/memory_curve.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <type_traits>

#include "base/sort.h"
#include "ir/carried_places.h"
#include "ir/liveness.h"
#include "ir/memory_plan.h"
#include "ir/residency.h"
#include "ir/text.h"
#include "sim/critical_path.h"

namespace interlace {
namespace {

Status AddBytes(int64_t& sum, int64_t bytes) {
  if (__builtin_add_overflow(sum, bytes, &sum)) return MakeError("the bytes alive at once do not fit in 64 bits");
  return Ok{};
}

struct Declared {
  ValueId value;
  std::string name;
};

std::vector<Declared> Persistent(const Program& program, const Residency& residency) {
  std::vector<Declared> out;
  ForEachPersistent(program, residency, [&](const auto& entry) {
    if constexpr (std::is_same_v<std::decay_t<decltype(entry)>, State>) {
      out.push_back({entry.value, NameOfStorage(program, entry.value)});
    } else {
      out.push_back({entry.value, entry.name});
    }
  });
  return out;
}

Result<int64_t> PersistentBytes(const Program& program, const Residency& residency) {
  int64_t sum = 0;
  Status status = Ok{};
  ForEachPersistent(program, residency, [&](const auto& entry) {
    if (!status.ok()) return;
    Result<int64_t> bytes = program.StorageBytes(program.value(entry.value).type);
    status = bytes.ok() ? AddBytes(sum, *bytes) : Status(bytes.error());
  });
  INTERLACE_TRY(status);
  return sum;
}

std::string ModuleOfValue(const Program& program, ValueId id) {
  OpId def = program.value(id).def;
  return def == kNone ? "" : ModuleOf(program, program.op(def));
}

// Bytes while each op of a phase runs, persistent ones included.
Result<std::vector<int64_t>> BytesAtOps(const Lowered& lowered, size_t p, const PhaseLiveness& life,
                                        int64_t persistent) {
  const size_t count = lowered.ops[p].size();
  std::vector<int64_t> results(count, 0);
  double sum = static_cast<double>(persistent);
  for (const StorageLife& s : life.storages) {
    sum += static_cast<double>(s.bytes);
    if (s.first >= 0) INTERLACE_TRY(AddBytes(results[s.first], s.bytes));
  }
  // All of a phase at once is more than ever lives; only if that fits are the running sums sure to.
  if (sum > 9e18) return MakeError("the bytes of phase '", lowered.phases[p]->name, "' do not fit in 64 bits");
  std::vector<int64_t> at_op(count, 0);
  for (size_t i = 0; i < count; ++i) {
    at_op[i] = life.live_before[i];
    for (int64_t more : {results[i], lowered.ops[p][i].transient_bytes, lowered.ReceiveAt(p, i), persistent})
      INTERLACE_TRY(AddBytes(at_op[i], more));
  }
  return at_op;
}

// The run of a phase with the most saved across it, the first of equals; the end when it never runs.
size_t FullestRun(const Lowered& lowered, const std::vector<int64_t>& through, size_t phase) {
  size_t best = lowered.run.size();
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    if (lowered.run[run] != static_cast<int32_t>(phase)) continue;
    if (best == lowered.run.size() || (!through.empty() && through[run] > through[best])) best = run;
    if (through.empty()) break;
  }
  return best;
}

}  // namespace

Result<int64_t> PeakBytes(const Lowered& lowered) {
  const Program& program = *lowered.program;
  const Residency residency = ComputeResidency(program);
  INTERLACE_ASSIGN(const int64_t persistent, PersistentBytes(program, residency));
  int64_t peak = persistent;
  INTERLACE_ASSIGN(const std::vector<int64_t> through, BytesThroughRuns(program));
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    INTERLACE_ASSIGN(PhaseLiveness life, ComputeLiveness(program, *lowered.phases[p], residency, false));
    INTERLACE_ASSIGN(std::vector<int64_t> at_op, BytesAtOps(lowered, p, life, persistent));
    const int64_t carried = through.empty() ? 0 : through[FullestRun(lowered, through, p)];
    for (int64_t bytes : at_op) {
      INTERLACE_TRY(AddBytes(bytes, carried));
      peak = std::max(peak, bytes);
    }
  }
  return peak;
}

namespace {

Result<int64_t> PlacedBytes(const Lowered& lowered) {
  const Program& program = *lowered.program;
  Binding ranks;  // any rank: all have the same sizes
  for (const Axis& axis : program.mesh) ranks["rank_" + axis.name] = 0;
  INTERLACE_ASSIGN(const Program bound, Bind(program, ranks));
  MemoryPlanOptions known;
  known.workspace.resize(program.phases.size());
  bool any = false;
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    std::vector<int64_t>& inside = known.workspace[lowered.phases[p] - program.phases.data()];
    for (const LoweredOp& op : lowered.ops[p]) {
      inside.push_back(op.transient_bytes);
      any = any || op.transient_bytes > 0;
    }
  }
  INTERLACE_ASSIGN(const MemoryPlan first, PlanMemory(bound));
  int64_t taken = first.taken_bytes;
  if (any) {
    INTERLACE_ASSIGN(const MemoryPlan learned, PlanMemory(bound, known));
    taken = std::max(taken, learned.taken_bytes);
  }
  INTERLACE_ASSIGN(int64_t bytes, PersistentBytes(program, ComputeResidency(program)));
  INTERLACE_TRY(AddBytes(bytes, taken));
  return bytes;
}

}  // namespace

int64_t TakenBytes(const Lowered& lowered, int64_t live_bytes) {
  if (!lowered.cpu) return live_bytes;
  const Result<int64_t> placed = PlacedBytes(lowered);
  return placed.ok() ? std::max(*placed, live_bytes) : live_bytes;
}

Result<MemoryCurve> ComputeMemory(const Lowered& lowered) {
  const Program& program = *lowered.program;
  MemoryCurve out;
  const Residency residency = ComputeResidency(program);
  INTERLACE_ASSIGN(out.persistent_bytes, PersistentBytes(program, residency));
  for (const Input& input : program.inputs) {
    INTERLACE_ASSIGN(int64_t bytes, program.StorageBytes(program.value(input.value).type));
    INTERLACE_TRY(AddBytes(out.input_bytes, bytes));
  }
  INTERLACE_ASSIGN(out.through, BytesThroughRuns(program));
  std::vector<PhaseLiveness> lives;
  std::vector<MemoryPeak> all;
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    INTERLACE_ASSIGN(PhaseLiveness life, ComputeLiveness(program, *lowered.phases[p], residency, false));
    INTERLACE_ASSIGN(std::vector<int64_t> at_op, BytesAtOps(lowered, p, life, out.persistent_bytes));
    const size_t run = FullestRun(lowered, out.through, p);
    for (size_t i = 0; i < at_op.size() && run < lowered.run.size(); ++i) {
      int64_t bytes = at_op[i];
      INTERLACE_TRY(AddBytes(bytes, out.through.empty() ? 0 : out.through[run]));
      all.push_back({bytes, run, static_cast<int64_t>(i), lowered.ops[p][i].op});
    }
    out.at_op.push_back(std::move(at_op));
    lives.push_back(std::move(life));
  }
  auto larger = [](const MemoryPeak& a, const MemoryPeak& b) { return a.bytes > b.bytes; };
  size_t kept = std::min<size_t>(all.size(), 10);
  // Equal ones in program order: the sort is stable by the tie on place.
  std::partial_sort(all.begin(), all.begin() + static_cast<int64_t>(kept), all.end(),
                    [&](const MemoryPeak& a, const MemoryPeak& b) {
                      if (a.bytes != b.bytes) return larger(a, b);
                      return a.run_index != b.run_index ? a.run_index < b.run_index : a.place < b.place;
                    });
  all.resize(kept);
  out.top = std::move(all);
  if (out.top.empty()) {
    out.peak.bytes = out.persistent_bytes;
  } else {
    out.peak = out.top.front();
  }

  for (const Declared& d : Persistent(program, residency)) {
    out.holders.push_back({d.name, "", *program.StorageBytes(program.value(d.value).type), d.value});
  }
  if (out.peak.place >= 0) {
    int32_t at = static_cast<int32_t>(out.peak.place);
    for (const StorageLife& s : lives[lowered.run[out.peak.run_index]].storages) {
      if (s.first <= at && at <= s.last)
        out.holders.push_back({NameOfStorage(program, s.root), ModuleOfValue(program, s.root), s.bytes, s.root});
    }
    int64_t transient = lowered.ops[lowered.run[out.peak.run_index]][at].transient_bytes;
    if (!out.through.empty() && out.through[out.peak.run_index] > 0)
      out.holders.push_back(
          {"saved for later runs", "", out.through[out.peak.run_index], kNone, MemoryKind::kActivations});
    const int64_t receive = lowered.ReceiveAt(lowered.run[out.peak.run_index], at);
    if (receive > 0) out.holders.push_back({"receive buffers of reductions", "", receive});
    if (transient > 0)
      out.holders.push_back(
          {"inside " + program.op(out.peak.op).name, ModuleOf(program, program.op(out.peak.op)), transient});
  }
  StableSort(out.holders, [](const MemoryHolder& a, const MemoryHolder& b) { return a.bytes > b.bytes; });
  return out;
}

void SetSource(const Program& program, OpId op, MemoryEvent& event) {
  const int32_t source = op == kNone ? kNone : program.op(op).source;
  if (source < 0 || source >= static_cast<int32_t>(program.sources.size())) return;
  const std::string& place = program.sources[source].place;
  const size_t colon = place.rfind(':');
  event.file = place.substr(0, colon);
  if (colon != std::string::npos) std::from_chars(place.data() + colon + 1, place.data() + place.size(), event.line);
}

Result<std::vector<MemoryEvent>> PersistentEvents(const Lowered& lowered, int32_t rank) {
  const Program& program = *lowered.program;
  std::vector<MemoryEvent> out;
  for (Declared& d : Persistent(program, ComputeResidency(program))) {
    INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(d.value).type));
    MemoryEvent& e = out.emplace_back();
    e.rank = rank, e.storage = static_cast<int64_t>(out.size()) - 1, e.bytes = bytes, e.name = std::move(d.name);
  }
  return out;
}

Result<std::vector<MemoryEvent>> MemoryEvents(const Lowered& lowered, const std::vector<int64_t>& start_ps,
                                              const std::vector<int64_t>& end_ps, int32_t rank) {
  const Program& program = *lowered.program;
  INTERLACE_ASSIGN(std::vector<MemoryEvent> out, PersistentEvents(lowered, rank));
  auto next_storage = static_cast<int64_t>(out.size());
  std::vector<int64_t> storage(program.num_values(), -1);  // of a root that lives now
  auto begin = [&](ValueId root, int64_t time_ps, int64_t bytes, std::string name, std::string module) {
    MemoryEvent& e = out.emplace_back();
    e.rank = rank, e.time_ns = time_ps / 1000, e.storage = storage[root] = next_storage++, e.bytes = bytes;
    e.name = std::move(name), e.module = std::move(module);
    SetSource(program, program.value(root).def, e);
  };
  auto end = [&](ValueId root, int64_t time_ps) {
    if (storage[root] < 0) return;
    MemoryEvent& e = out.emplace_back();
    e.rank = rank, e.time_ns = time_ps / 1000, e.allocate = false, e.storage = storage[root],
    e.name = NameOfStorage(program, root);
    storage[root] = -1;
  };
  const Residency residency = ComputeResidency(program);
  for (size_t i = 0; i < residency.states.size() && !lowered.phases.empty(); ++i) {
    const ValueId id = residency.states[i];
    if (residency.at_begin.at(lowered.phases[0])[i] == Place::kOut) continue;
    INTERLACE_ASSIGN(int64_t bytes, program.StorageBytes(program.value(id).type));
    begin(id, 0, bytes, NameOfStorage(program, id), "");
  }
  std::vector<PhaseLiveness> lives;
  std::vector<std::vector<std::vector<const StorageLife*>>> born;
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    INTERLACE_ASSIGN(PhaseLiveness life, ComputeLiveness(program, *lowered.phases[p]));
    lives.push_back(std::move(life));
  }
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    auto& by_op = born.emplace_back(lowered.ops[p].size());
    for (const StorageLife& s : lives[p].storages) {
      if (s.first >= 0) by_op[s.first].push_back(&s);
    }
  }
  std::vector<int64_t> carried;                              // storages of what the last phase gave, in its order
  std::map<std::pair<std::string, int64_t>, int64_t> saved;  // by name and micro-batch: the storage
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    int32_t p = lowered.run[run];
    const Phase& phase = *lowered.phases[p];
    int64_t first = lowered.first[run];
    int64_t phase_start = lowered.ops[p].empty() ? 0 : start_ps[first];
    for (size_t i = 0; i < phase.takes.size(); ++i) {
      ValueId root = program.RootOf(phase.takes[i]);
      if (root != phase.takes[i]) continue;
      if (i < carried.size() && carried[i] >= 0) {
        storage[root] = carried[i];
      } else {
        INTERLACE_ASSIGN(int64_t bytes, program.StorageBytes(program.value(root).type));
        begin(root, phase_start, bytes, NameOfStorage(program, root), "");
      }
    }
    for (const Carried& load : phase.loads) storage[load.value] = saved[{load.name, lowered.micro_batch[run]}];
    for (size_t i = 0; i < lowered.ops[p].size(); ++i) {
      for (const StorageLife* s : born[p][i]) {
        begin(s->root, start_ps[first + i], s->bytes, NameOfStorage(program, s->root), ModuleOfValue(program, s->root));
      }
      for (ValueId root : lives[p].dies_after[i]) end(root, end_ps[first + i]);
    }
    int64_t phase_end = lowered.ops[p].empty() ? phase_start : end_ps[lowered.first[run + 1] - 1];
    for (const Carried& save : phase.saves) {
      saved[{save.name, lowered.micro_batch[run]}] = storage[save.value];
      storage[save.value] = -1;  // goes on under this name
    }
    carried.clear();
    for (ValueId id : phase.gives) carried.push_back(storage[program.RootOf(id)]);
    for (ValueId id : phase.gives) {
      ValueId root = program.RootOf(id);
      const Value& value = program.value(root);
      if (value.kind == ValueKind::kResult || value.kind == ValueKind::kTake)
        storage[root] = -1;  // goes on under another name
    }
    for (const StorageLife& s : lives[p].storages) {  // alive at the end and not given; states go on
      if (program.value(s.root).kind != ValueKind::kState) end(s.root, phase_end);
    }
  }
  return out;
}

}  // namespace interlace
