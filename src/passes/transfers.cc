#include "passes/transfers.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_set>

#include "base/sort.h"
#include "ir/op_table.h"

namespace interlace {
namespace {

using UseCounts = std::vector<int32_t>;  // by value

// Appends the ops that make an operand of a gather, in order; false when that needs more than states, or when something
// else uses what they make.
bool AppendLead(const Program& program, const UseCounts& uses, ValueId operand, std::vector<OpId>& lead) {
  const Value& value = program.value(operand);
  if (value.kind == ValueKind::kState) return true;
  if (value.kind != ValueKind::kResult || value.def == kNone || uses[operand] != 1) return false;
  const Op& op = program.op(value.def);
  if ((IsOwn(op) && op.kind != OpKind::kCopy) || HasEffect(program, op) || op.rng || op.results.size() != 1)
    return false;
  bool of_states = true;
  ForEachOperand(op, [&](ValueId id) { of_states = of_states && AppendLead(program, uses, id, lead); });
  lead.push_back(op.id);
  return of_states;
}

// The lead of a gather.start that can be moved: whole parameters, from states or from what is made of them for it
// alone.
std::optional<std::vector<OpId>> LeadOfMovable(const Program& program, const Op& op, const UseCounts& uses) {
  bool movable = op.kind == OpKind::kGatherStart && !op.results.empty();
  for (ValueId id : op.results) movable = movable && id != kNone && program.RootOf(id) == id;
  std::vector<OpId> lead;
  if (movable) ForEachOperand(op, [&](ValueId id) { movable = movable && AppendLead(program, uses, id, lead); });
  return movable ? std::optional(std::move(lead)) : std::nullopt;
}

Result<int64_t> BytesOf(const Program& program, const std::vector<ValueId>& values) {
  int64_t bytes = 0;
  for (ValueId id : values) {
    INTERLACE_ASSIGN(int64_t one, program.StorageBytes(program.value(id).type));
    bytes += one;
  }
  return bytes;
}

// Reads a phase in one walk; skeleton positions are known as soon as an op is put there.
class TransferReader {
 public:
  TransferReader(const Program& program, const Phase& phase, Transfers& out, std::vector<OpId>& skeleton)
      : program_(program), phase_(phase), out_(out), skeleton_(skeleton) {
    for (std::vector<int32_t>* of : {&gather_of_, &reduce_of_, &tail_of_, &flat_of_, &last_touch_}) {
      of->assign(static_cast<size_t>(program.num_values()), -1);
    }
  }

  Result<int32_t> Run() {
    // A walk over the ops of a large program costs milliseconds; there are two here.
    UseCounts uses(static_cast<size_t>(program_.num_values()), 0);
    std::vector<OpId> gathers;
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      ForEachOperand(op, [&](ValueId v) { ++uses[v]; });
      if (op.kind == OpKind::kGatherStart) gathers.push_back(id);
    }
    for (ValueId v : phase_.Outgoing()) ++uses[v];
    constexpr int32_t kStays = -1, kLead = -2;
    std::vector<int32_t> role(static_cast<size_t>(program_.num_ops()),
                              kStays);  // by op; of what can be moved: its lead
    std::vector<std::vector<OpId>> leads;
    for (OpId id : gathers) {
      std::optional<std::vector<OpId>> lead = LeadOfMovable(program_, program_.op(id), uses);
      if (!lead) continue;
      for (OpId op : *lead) role[op] = kLead;
      role[id] = static_cast<int32_t>(leads.size());
      leads.push_back(std::move(*lead));
    }
    int32_t backward = -1;
    const auto count = static_cast<int32_t>(phase_.ops.size());
    for (int32_t i = 0; i < count; ++i) {
      const Op& op = program_.op(phase_.ops[i]);
      const int32_t mine = role[op.id];
      if (mine == kLead) continue;
      order_ = (i + 1) * Transfers::kSpacing;
      if (mine >= 0) {
        INTERLACE_TRY(AddGather(op, leads[mine]));
      } else if (op.kind == OpKind::kReduceStart) {
        INTERLACE_TRY(AddReduce(op));
      } else if (op.kind == OpKind::kReduceWait && reduce_of_[op.args[0].value] >= 0) {
        i = AddTail(i);
      } else if (Reduce* reduce = op.kind == OpKind::kGatherStart ? GatheredOf(op) : ReleasedOf(op)) {
        reduce->late.push_back({op.id, Here(), order_});
      } else {
        if (backward < 0 && op.part == Part::kBackward) backward = Here();
        AddToSkeleton(op);
      }
    }
    for (ValueId id : phase_.Outgoing()) Outlives(id);
    StableSort(out_.gathers, [](const Gather& a, const Gather& b) { return a.need < b.need; });
    return backward < 0 ? Here() : backward;
  }

 private:
  int32_t Here() const { return static_cast<int32_t>(skeleton_.size()); }

  Status AddGather(const Op& op, const std::vector<OpId>& lead) {
    Gather gather;
    gather.units = op.units;
    gather.fulls = op.results;
    gather.start = op.id;
    gather.lead = lead;
    gather.part = op.part;
    INTERLACE_ASSIGN(gather.bytes, BytesOf(program_, op.results));
    INTERLACE_ASSIGN(gather.shard_bytes, BytesOf(program_, OperandValues(op)));
    gather.at = Here();
    gather.order = order_;
    gather.need = gather.end = -1;
    for (ValueId id : op.results) gather_of_[id] = static_cast<int32_t>(out_.gathers.size());
    out_.gathers.push_back(std::move(gather));
    return Ok{};
  }

  Status AddReduce(const Op& op) {
    Reduce reduce;
    reduce.units = op.units;
    reduce.parts = op.results;
    reduce.start = op.id;
    reduce.part = op.part;
    reduce.at = Here();
    reduce.order = order_;
    reduce.wait = -1;
    reduce.latest = -1;
    ForEachOperand(op, [&](ValueId id) {
      reduce.flats.push_back(id);
      reduce.ready = std::max(reduce.ready, last_touch_[program_.RootOf(id)] + 1);
    });
    INTERLACE_ASSIGN(reduce.bytes, BytesOf(program_, reduce.flats));
    const auto index = static_cast<int32_t>(out_.reduces.size());
    for (ValueId id : reduce.parts) reduce_of_[id] = index;
    for (ValueId id : reduce.flats) flat_of_[program_.RootOf(id)] = index;
    out_.reduces.push_back(std::move(reduce));
    return Ok{};
  }

  // The wait at place i and what follows it that concerns only the sums; returns the last place of the tail.
  int32_t AddTail(int32_t i) {
    const int32_t index = reduce_of_[program_.op(phase_.ops[i]).args[0].value];
    Reduce& reduce = out_.reduces[index];
    std::unordered_set<ValueId> own(reduce.parts.begin(), reduce.parts.end());
    std::unordered_set<ValueId> flats;
    for (ValueId id : reduce.flats) flats.insert(program_.RootOf(id));
    reduce.wait = Here();
    reduce.wait_order = order_;
    reduce.tail.push_back(phase_.ops[i]);
    const auto count = static_cast<int32_t>(phase_.ops.size());
    while (i + 1 < count && Follows(i + 1, own, flats)) {
      const Op& op = program_.op(phase_.ops[++i]);
      reduce.tail.push_back(op.id);
      for (ValueId id : op.results) own.insert(id);
    }
    ReleaseAfterReads(reduce);
    auto touch = [&](ValueId id) {
      if (id != kNone && flats.count(program_.RootOf(id)) == 0) tail_of_[program_.RootOf(id)] = index;
    };
    for (OpId id : reduce.tail) {
      ForEachOperand(program_.op(id), touch);
      for (ValueId result : program_.op(id).results) touch(result);
    }
    return i;
  }

  // A flat buffer may be read while it is reduced: its release may not move before the last such op with the tail.
  void ReleaseAfterReads(Reduce& reduce) {
    std::erase_if(reduce.tail, [&](OpId id) {
      const Op& op = program_.op(id);
      int32_t last = -1;
      if (op.kind == OpKind::kRelease)
        ForEachOperand(op, [&](ValueId v) { last = std::max(last, last_touch_[program_.RootOf(v)]); });
      if (last < reduce.at) return false;
      reduce.late.push_back({id, last + 1, 0});
      return true;
    });
  }

  // Whether the op at place i takes the sums of a tail: it works on them, or releases the buffers they came from. A
  // view that the next such op works on belongs to it.
  bool Follows(int32_t i, const std::unordered_set<ValueId>& own, const std::unordered_set<ValueId>& flats) const {
    const Op& op = program_.op(phase_.ops[i]);
    bool takes = false, releases = op.kind == OpKind::kRelease;
    ForEachOperand(op, [&](ValueId id) {
      takes = takes || own.count(id) > 0;
      releases = releases && (flats.count(id) > 0 || own.count(id) > 0);
    });
    if (op.kind == OpKind::kRelease) return releases;
    if (op.kind == OpKind::kReduceWait) return takes;
    if (IsStart(op) || IsWait(op) || op.kind == OpKind::kOutput) return false;
    if (takes) return true;
    if (op.kind != OpKind::kView || i + 1 >= static_cast<int32_t>(phase_.ops.size())) return false;
    if (program_.value(program_.RootOf(op.args[0].value)).kind != ValueKind::kState) return false;
    const Op& next = program_.op(phase_.ops[i + 1]);
    return AnyOperand(next, [&](ValueId id) { return id == op.results[0]; }) &&
           AnyOperand(next, [&](ValueId id) { return own.contains(id); });
  }

  void AddToSkeleton(const Op& op) {
    const int32_t here = Here();
    skeleton_.push_back(op.id);
    auto touch = [&](ValueId id) {
      const ValueId root = program_.RootOf(id);
      last_touch_[root] = here;
      if (gather_of_[root] >= 0) {
        Gather& gather = out_.gathers[gather_of_[root]];
        if (gather.need < 0) gather.need = here;
        if (op.kind == OpKind::kRelease) gather.end = std::max(gather.end, here);
      }
      Limit(tail_of_, root, here);
    };
    ForEachOperand(op, touch);
    for (ValueId id : op.results) {
      if (id == kNone) continue;
      touch(id);
      if (program_.value(id).placed) Limit(flat_of_, program_.RootOf(id), here);
    }
    // A flat buffer may be read while it is reduced.
    for (ValueId id : WrittenOperands(program_, op)) Limit(flat_of_, program_.RootOf(id), here);
    if (op.kind == OpKind::kRelease)
      ForEachOperand(op, [&](ValueId id) { Limit(flat_of_, program_.RootOf(id), here); });
  }

  // The reduction all of whose operands here are flat buffers, when the op releases them after its tail; else nullptr.
  Reduce* ReleasedOf(const Op& op) {
    if (op.kind != OpKind::kRelease) return nullptr;
    Reduce* out = nullptr;
    for (const Arg& arg : op.args) {
      const int32_t found = flat_of_[program_.RootOf(arg.value)];
      if (found < 0) return nullptr;
      Reduce* reduce = &out_.reduces[found];
      if (reduce->wait < 0 || (out != nullptr && out != reduce)) return nullptr;
      out = reduce;
    }
    return out;
  }

  // The reduction whose sums, taken by its tail, a gather makes whole in place; else nullptr.
  Reduce* GatheredOf(const Op& op) {
    int32_t found = -1;
    bool one = true;
    const auto look = [&](ValueId id) {
      const int32_t of = tail_of_[program_.RootOf(id)];
      one = one && of >= 0 && (found < 0 || of == found);
      found = of;
    };
    ForEachOperand(op, look);
    for (ValueId id : op.results) look(id);
    if (!one || found < 0 || out_.reduces[found].latest >= 0) return nullptr;
    return &out_.reduces[found];
  }

  // A tail that has come may not move behind an op that follows it and touches what it touched, or ends its buffer.
  void Limit(const std::vector<int32_t>& of, ValueId id, int32_t here) {
    if (of[id] < 0) return;
    Reduce& reduce = out_.reduces[of[id]];
    if (reduce.wait >= 0 && reduce.latest < 0) reduce.latest = here;
  }

  void Outlives(ValueId id) {
    const int32_t gather = gather_of_[program_.RootOf(id)];
    if (gather >= 0) out_.gathers[gather].end = Here();
  }

  const Program& program_;
  const Phase& phase_;
  Transfers& out_;
  std::vector<OpId>& skeleton_;
  int64_t order_ = 0;
  // By value, -1 for none:
  std::vector<int32_t> gather_of_;   // of a full buffer
  std::vector<int32_t> reduce_of_;   // of a reduced part
  std::vector<int32_t> tail_of_;     // of a root: the reduction whose tail touched it
  std::vector<int32_t> flat_of_;     // of a flat buffer's root
  std::vector<int32_t> last_touch_;  // of a root: the last skeleton op so far
};

void Append(Program& program, Op& into, const Op& from) {
  for (size_t i = 0; i < from.results.size(); ++i) {
    Value& value = program.value(from.results[i]);
    value.def = into.id;
    value.result_index = static_cast<int32_t>(into.results.size());
    into.results.push_back(value.id);
  }
  into.args.insert(into.args.end(), from.args.begin(), from.args.end());
  into.units.insert(into.units.end(), from.units.begin(), from.units.end());
}

bool IsGather(const Program& program, const Reduce::Late& late) {
  return program.op(late.op).kind == OpKind::kGatherStart;
}

template <typename T>
void Extend(std::vector<T>& into, std::vector<T>& from) {
  into.insert(into.end(), from.begin(), from.end());
  from.clear();
}

}  // namespace

Result<Transfers> Transfers::Read(Program& program, Phase& phase) {
  Transfers out(program, phase);
  INTERLACE_ASSIGN(out.backward_begin_, TransferReader(program, phase, out, out.skeleton_).Run());
  for (Gather& gather : out.gathers) {
    if (gather.need < 0) gather.need = out.size();
    if (gather.end < 0) gather.end = out.size();
  }
  StableSort(out.gathers, [](const Gather& a, const Gather& b) { return a.need < b.need; });
  for (Reduce& reduce : out.reduces) {
    if (reduce.wait < 0) reduce.wait = out.size();  // another phase waits for it
    if (reduce.latest < 0) reduce.latest = out.size();
  }
  return out;
}

void Transfers::Merge(Gather& into, Gather& from) {
  Append(*program_, program_->op(into.start), std::as_const(*program_).op(from.start));
  into.need = std::min(into.need, from.need);
  into.end = std::max(into.end, from.end);
  into.bytes += from.bytes;
  into.shard_bytes += from.shard_bytes;
  Extend(into.units, from.units);
  Extend(into.fulls, from.fulls);
  Extend(into.lead, from.lead);
}

void Transfers::Merge(Reduce& into, Reduce& from) {
  Append(*program_, program_->op(into.start), std::as_const(*program_).op(from.start));
  if (std::pair(into.at, into.order) < std::pair(from.at, from.order)) {
    into.at = from.at;
    into.order = from.order;
  }
  if (std::pair(into.wait, into.wait_order) < std::pair(from.wait, from.wait_order)) {
    into.wait = from.wait;
    into.wait_order = from.wait_order;
  }
  into.ready = std::max(into.ready, from.ready);
  into.latest = std::min(into.latest, from.latest);
  into.bytes += from.bytes;
  Extend(into.units, from.units);
  Extend(into.flats, from.flats);
  Extend(into.parts, from.parts);
  Extend(into.tail, from.tail);
  GatherBehindTail(*program_, into);
  GatherBehindTail(*program_, from);
  for (const Reduce::Late& late : from.late) {
    const auto same = std::find_if(into.late.begin(), into.late.end(), [&](const Reduce::Late& of) {
      return IsGather(*program_, of) && IsGather(*program_, late);
    });
    if (same == into.late.end()) {
      into.late.push_back(late);
    } else {
      Append(*program_, program_->op(same->op), std::as_const(*program_).op(late.op));
    }
  }
  from.late.clear();
}

void Transfers::GatherBehindTail(const Program& program, Reduce& reduce) {
  for (Reduce::Late& late : reduce.late) {
    if (IsGather(program, late)) late.at = -1;
  }
}

Status Transfers::Check() const {
  for (const Gather& gather : gathers) {
    if (gather.units.empty() || (gather.at >= 0 && gather.at <= gather.need)) continue;
    return Error{"the gather of " + UnitNames(gather.units) + " would start after it is needed",
                 gather.need < size() ? op(gather.need).name : phase_->name};
  }
  for (const Reduce& reduce : reduces) {
    if (reduce.units.empty()) continue;
    if (reduce.at < reduce.ready) {
      return Error{"the reduction of " + UnitNames(reduce.units) + " would start before its gradients are there", {}};
    }
    const bool waits = !reduce.tail.empty();
    if (waits && (std::pair(reduce.wait, reduce.wait_order) <= std::pair(reduce.at, reduce.order) ||
                  reduce.wait > reduce.latest)) {
      return Error{
          "the wait for the reduction of " + UnitNames(reduce.units) + " would be before its start or too late", {}};
    }
  }
  return Ok{};
}

Status Transfers::Write() {
  INTERLACE_TRY(Check());
  struct Item {
    int32_t at;
    int64_t order;
    const std::vector<OpId>* ops;  // before `start`
    OpId start;
  };
  std::vector<Item> items;
  std::deque<std::vector<OpId>> single;
  for (const Gather& g : gathers) {
    if (!g.units.empty()) items.push_back({g.at, g.order, &g.lead, g.start});
  }
  for (const Reduce& r : reduces) {
    if (r.units.empty()) continue;
    items.push_back({r.at, r.order, nullptr, r.start});
    if (!r.tail.empty()) items.push_back({r.wait, r.wait_order, &r.tail, kNone});
    for (const Reduce::Late& late : r.late) {
      const auto place = std::max(std::pair(late.at, late.order), std::pair(r.wait, r.wait_order));
      single.push_back({late.op});
      items.push_back({place.first, place.second, &single.back(), kNone});
    }
  }
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return std::pair(a.at, a.order) < std::pair(b.at, b.order); });
  std::vector<OpId> ops;
  ops.reserve(phase_->ops.size());
  size_t next = 0;
  for (int32_t gap = 0; gap <= size(); ++gap) {
    for (; next < items.size() && items[next].at <= gap; ++next) {
      if (items[next].ops != nullptr) ops.insert(ops.end(), items[next].ops->begin(), items[next].ops->end());
      if (items[next].start != kNone) ops.push_back(items[next].start);
    }
    if (gap < size()) ops.push_back(skeleton_[gap]);
  }
  phase_->ops = std::move(ops);
  return Ok{};
}

bool MayMerge(const Program& program, const std::vector<UnitId>& a, const std::vector<UnitId>& b) {
  return !a.empty() && !b.empty() && SameAxes(program.units[a[0]], program.units[b[0]]);
}

std::vector<Phase*> MicroBatches(Program& program) {
  std::vector<Phase*> phases;
  for (Phase& phase : program.phases) {
    if (phase.kind == PhaseKind::kMicroBatch) phases.push_back(&phase);
  }
  return phases;
}

std::string UnitNames(const std::vector<UnitId>& units) {
  std::string text;
  for (UnitId unit : units) text += (text.empty() ? "u" : "+u") + std::to_string(unit);
  return text;
}

}  // namespace interlace
