#include "passes/baselines/bucket_copies.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <unordered_map>

#include "ir/op_table.h"
#include "passes/phase_editor.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// One coalesced call: its buffers by unit id, and where each begins in the shard of the bucket.
struct Call {
  UnitId bucket = kNone;
  std::vector<UnitId> units;
  std::vector<ValueId> sources, results;
  std::vector<int64_t> begin;
  int64_t ranks = 1, shard = 0;  // of the bucket
  DType dtype = DType::kF32;
  ValueId buffer = kNone;  // the result of the one collective
  ValueId packed = kNone;  // its source
  bool delivered = false;  // its wait and the copies out are there
};

class CopyWriter {
 public:
  CopyWriter(Program& program, Phase& phase) : program_(program), phase_(phase) {}

  void Add(OpId start, Call call) {
    for (ValueId id : call.results) call_of_[id] = start;
    calls_.emplace(start, std::move(call));
  }

  void Run() {
    FindLastTouches();
    for (int32_t i = 0; i < static_cast<int32_t>(old_.size()); ++i) {
      Op& op = program_.op(old_[i]);
      if (auto found = calls_.find(op.id); found != calls_.end()) {
        op.kind == OpKind::kGatherStart ? PackShards(op, found->second) : PackGradients(op, found->second, i);
      } else if (op.kind == OpKind::kGatherWait || op.kind == OpKind::kReduceWait) {
        Wait(op);
      } else if (op.kind == OpKind::kRelease) {
        std::erase_if(op.args, [&](const Arg& arg) { return released_.count(arg.value) > 0; });
        if (!op.args.empty()) ops_.push_back(op.id);
      } else {
        ops_.push_back(op.id);
      }
    }
    phase_.ops = std::move(ops_);
  }

 private:
  // By root: the last op that is neither a wait nor a release.
  void FindLastTouches() {
    old_ = phase_.ops;
    for (int32_t i = 0; i < static_cast<int32_t>(old_.size()); ++i) {
      const Op& op = program_.op(old_[i]);
      const bool is_release = op.kind == OpKind::kRelease;
      if (IsWait(op)) continue;
      ForEachOperand(op, [&](ValueId id) {
        const ValueId root = program_.RootOf(id);
        if (is_release) {
          is_released_.insert(root);
        } else {
          last_touch_[root] = i;
        }
      });
      for (ValueId id : op.results) {
        if (id != kNone) last_touch_[program_.RootOf(id)] = i;
      }
    }
  }

  template <typename KindOrName>
  Op& New(KindOrName what, const Op& tags) {
    Op& op = AddLike(program_, tags, what);
    ops_.push_back(op.id);
    return op;
  }

  Type Matrix(const Call& call, int64_t columns, int64_t stride) {
    return {call.dtype, {Dim(call.ranks), Dim(columns)}, {Dim(stride), Dim(1)}};
  }

  void Release(ValueId root, const Op& tags) { New(OpKind::kRelease, tags).args.push_back(Arg::Of(root)); }

  // The collective itself, in place of `start`.
  void Start(const Op& start, Call& call, ValueId packed, int64_t elements) {
    Op& one = New(start.kind, start);
    one.lane = start.lane;
    one.units = {call.bucket};
    one.args.push_back(Arg::Of(packed));
    call.packed = packed;
    call.buffer = program_.AddResult(one, FlatType(call.dtype, elements));
  }

  void PackShards(const Op& start, Call& call) {
    Op& cat = New("aten.cat", start);
    std::vector<Arg> list;
    for (ValueId id : call.sources) list.push_back(Arg::Of(id));
    cat.args = {Arg::List(std::move(list)), Arg::Int(0)};
    Start(start, call, program_.AddResult(cat, FlatType(call.dtype, call.shard)), call.shard * call.ranks);
  }

  void PackGradients(const Op& start, Call& call, int32_t place) {
    std::vector<Arg> list;
    for (size_t k = 0; k < call.sources.size(); ++k) {
      Op& view = New(OpKind::kView, start);
      view.args.push_back(Arg::Of(call.sources[k]));
      const Value& flat = program_.value(call.sources[k]);
      const int64_t shard = program_.units[call.units[k]].shard;
      const ValueId root = flat.root;
      const Dim offset = flat.offset;
      list.push_back(Arg::Of(program_.AddView(view, Matrix(call, shard, shard), root, offset)));
    }
    Op& cat = New("aten.cat", start);
    cat.args = {Arg::List(std::move(list)), Arg::Int(1)};
    const ValueId packed = program_.AddResult(cat, Matrix(call, call.shard, call.shard));
    for (ValueId id : call.sources) {
      const ValueId root = program_.RootOf(id);
      if (is_released_.count(root) == 0 || last_touch_[root] > place || !released_.insert(root).second) continue;
      Release(root, start);
    }
    Op& view = New(OpKind::kView, start);
    view.args.push_back(Arg::Of(packed));
    Start(start, call, program_.AddView(view, FlatType(call.dtype, call.shard * call.ranks), packed, Dim(0)),
          call.shard);
  }

  // Waits for single buffers become one wait for the bucket's, at the first of them, and the copies.
  void Wait(Op& op) {
    for (const Arg& arg : std::vector<Arg>(op.args)) {
      auto found = call_of_.find(arg.value);
      if (found == call_of_.end()) continue;
      std::erase_if(op.args, [&](const Arg& other) { return other.value == arg.value; });
      Call& call = calls_.at(found->second);
      if (!call.delivered) Deliver(op, call);
      call.delivered = true;
    }
    if (!op.args.empty()) ops_.push_back(op.id);
  }

  void Deliver(const Op& wait, Call& call) {
    New(wait.kind, wait).args.push_back(Arg::Of(call.buffer));
    const bool gather = wait.kind == OpKind::kGatherWait;
    if (!gather) Release(program_.RootOf(call.packed), wait);
    for (size_t k = 0; k < call.results.size(); ++k) {
      const int64_t shard = program_.units[call.units[k]].shard;
      Op& view = New(OpKind::kView, wait);
      view.args.push_back(Arg::Of(call.buffer));
      Type type = gather ? Matrix(call, shard, call.shard) : FlatType(call.dtype, shard);
      const ValueId part = program_.AddView(view, std::move(type), call.buffer, Dim(call.begin[k]));
      Op& copy = New(OpKind::kCopy, wait);
      copy.args.push_back(Arg::Of(part));
      copy.results = {call.results[k]};
      Value& result = program_.value(call.results[k]);
      result.def = copy.id;
      result.result_index = 0;
      if (gather) result.type = Matrix(call, shard, shard);
    }
    Release(call.buffer, wait);
  }

  Program& program_;
  Phase& phase_;
  std::vector<OpId> old_, ops_;
  std::unordered_map<OpId, Call> calls_;
  std::unordered_map<ValueId, OpId> call_of_;  // by result of the coalesced call
  std::unordered_map<ValueId, int32_t> last_touch_;
  std::set<ValueId> is_released_, released_;  // gradients: by this phase; and already, right after they were packed
};

}  // namespace

UnitId CopiedBuckets::UnitOf(std::vector<UnitId> members, DType dtype) {
  auto [found, fresh] = units_.try_emplace({members, dtype}, static_cast<UnitId>(program_.units.size()));
  if (!fresh) return found->second;
  Unit unit;
  unit.id = found->second;
  unit.axis = program_.units[members[0]].axis;
  unit.replicas = program_.units[members[0]].replicas;
  unit.dtype = dtype;
  for (UnitId member : members) {
    unit.numel += program_.units[member].numel;
    unit.shard += program_.units[member].shard;
    unit.part += program_.units[member].part;
  }
  program_.units.push_back(std::move(unit));
  return found->second;
}

Status CopiedBuckets::Rewrite(Phase& phase, const std::vector<OpId>& starts) {
  CopyWriter writer(program_, phase);
  const std::set<ValueId> handed_on(phase.gives.begin(), phase.gives.end());
  for (OpId id : starts) {
    const Op& op = program_.op(id);
    std::vector<size_t> order(op.units.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return op.units[a] < op.units[b]; });
    Call call;
    for (size_t k : order) {
      const UnitId unit = op.units[k];
      if (handed_on.count(op.results[k]) > 0) {
        return MakeError(
            "u", unit,
            " is kept gathered across micro-batches and cannot be copied out of a bucket; run bucket(pack=copy) "
            "before unshard");
      }
      if (op.kind == OpKind::kReduceStart && program_.units[unit].parted())
        return MakeError("u", unit,
                         " is reduced onto replicas, each of which gets a part; run shard(states=shard) before");
      call.units.push_back(unit);
      call.sources.push_back(op.args[k].value);
      call.results.push_back(op.results[k]);
      call.begin.push_back(call.shard);
      call.shard += program_.units[unit].shard;
      call.ranks = program_.AxisSize(program_.units[unit].axis);
    }
    call.dtype = program_.value(call.sources[0]).type.dtype;
    call.bucket = UnitOf(call.units, call.dtype);
    writer.Add(id, std::move(call));
  }
  writer.Run();
  return Ok{};
}

}  // namespace interlace
