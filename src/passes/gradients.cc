// PlaceGradients: finds for each gradient whether the op that makes it can write it into the flat buffer, else adds a
// copy, and issues the reductions in the order in which gradients become complete.
#include <algorithm>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sort.h"
#include "ir/op_table.h"
#include "passes/sharding.h"

namespace interlace {
namespace {

// Gradients that may wait for their reductions in buffers of their own while every rank holds all sums.
constexpr int64_t kUnderWayBytes = int64_t{8} << 20;

// The gradient of a parameter in one more micro-batch of the run.
struct MoreGradient {
  ValueId value = kNone;
  int32_t done = -1;     // it is complete after this op
  int32_t added = -1;    // and added to the first after this one
  bool product = false;  // that op is a matrix product whose result nothing else reads
};

struct Gradient {
  int32_t param = -1;   // index in Program::params
  int32_t marker = -1;  // index of the grad op
  int32_t landed = -1;  // the (first) gradient is complete after this op
  int32_t done = -1;    // what lies in the flat buffer is
  std::vector<MoreGradient> more;
  int32_t last_use = -1;      // of the flat buffer, by ops of the old list
  ValueId owner = kNone;      // the value to place: the gradient itself or what it is a plain reshape of; kNone: copy
  DType dtype = DType::kF32;  // it is reduced in; narrower than the unit's when the program says so
  ValueId state = kNone;      // the unit's state `grad`
  ValueId flat = kNone;       // where it goes: the flat buffer or, with one rank, the state
};

class Placer {
 public:
  Placer(Program& program, PhaseEditor& edit, const PhaseFacts& facts, const ShardingOptions& options, bool whole)
      : program_(program), edit_(edit), facts_(facts), options_(options), whole_(whole && options.ranks > 1) {}

  void Run() {
    Find();
    for (Gradient& gradient : gradients_) Land(gradient);
    MoveViews();
    if (!options_.Alone()) Reduce();
  }

 private:
  void Find() {
    std::vector<int32_t> param_index = ParamIndex(program_);
    std::vector<int32_t> uses(program_.num_values(), 0);
    for (int32_t i = 0; i < edit_.size(); ++i) {
      ForEachOperand(std::as_const(edit_.op(i)), [&](ValueId id) { ++uses[id]; });
    }
    std::unordered_map<int32_t, size_t> first_of;  // by parameter: its place in gradients_
    for (int32_t i = 0; i < edit_.size(); ++i) {
      const Op& op = edit_.op(i);
      if (op.kind != OpKind::kGrad) continue;
      edit_.Remove(i);
      Gradient gradient;
      gradient.param = param_index[op.args[0].value];
      gradient.marker = i;
      const auto first = first_of.find(gradient.param);
      ValueId value = op.args[1].value, root = program_.RootOf(value);
      gradient.dtype = program_.value(value).type.dtype;
      bool made_here = root < static_cast<ValueId>(facts_.def.size()) && facts_.def[root] >= 0;
      gradient.done = made_here ? facts_.def[root] : i;
      if (made_here) {
        for (int32_t write : facts_.writes[root]) {
          if (write < i) gradient.done = std::max(gradient.done, write);
        }
        if (facts_.def[value] > gradient.done) gradient.done = facts_.def[value];
        if (IsStart(edit_.op(facts_.def[root]))) {  // a sum over ranks: there once it was waited for
          for (int32_t use : facts_.uses[root]) {
            if (use < i && IsWait(edit_.op(use))) gradient.done = std::max(gradient.done, use);
          }
        }
        if (first == first_of.end() && CanPlace(gradient, value, root)) {
          gradient.owner = root;
          gradient.done = facts_.def[root];
          claimed_.resize(program_.num_values(), 0);
          claimed_[root] = 1;
          // The reshape was made for the marker alone.
          if (value != root && uses[value] == 1) edit_.Remove(facts_.def[value]);
        }
      }
      gradient.landed = gradient.done;
      if (first != first_of.end()) {
        Gradient& sum = gradients_[first->second];
        const bool product = made_here && value == root && gradient.done == facts_.def[root] && uses[value] == 1 &&
                             !facts_.leaves[root] && IsProduct(edit_.op(gradient.done));
        sum.more.push_back({value, gradient.done, gradient.done, product});
        sum.done = std::max(sum.done, gradient.done);
        continue;
      }
      first_of[gradient.param] = gradients_.size();
      gradients_.push_back(gradient);
    }
    for (Gradient& sum : gradients_) AddBehindReaders(sum);
    StableSort(gradients_, [](const Gradient& a, const Gradient& b) { return a.done < b.done; });
  }

  // What else reads the first gradient where it lies (that of a position's embedding goes on to the layer before) must
  // not find the sum there.
  void AddBehindReaders(Gradient& sum) {
    if (sum.owner == kNone) return;
    for (MoreGradient& more : sum.more) {
      for (int32_t use : facts_.uses[sum.owner]) {
        if (edit_.op(use).kind != OpKind::kGrad) more.added = std::max(more.added, use);
      }
      more.product = more.product && more.added == more.done;
      sum.done = std::max(sum.done, more.added);
    }
  }

  // The op that defines the root can write into the flat buffer when nothing else decides where the root's storage is,
  // and the gradient has the elements of that storage in the parameter's order.
  bool CanPlace(const Gradient& gradient, ValueId value, ValueId root) {
    const Value& owner = program_.value(root);
    const Value& param = program_.value(program_.params[gradient.param].value);
    const Op& op = edit_.op(facts_.def[root]);
    if (IsOwn(op) && op.kind != OpKind::kCopy) return false;
    if (!facts_.writes[root].empty() || facts_.leaves[root]) return false;
    if (root < static_cast<ValueId>(claimed_.size()) && claimed_[root]) return false;
    // With one rank the gradient's place is the state itself.
    if (options_.Alone() && gradient.dtype != param.type.dtype) return false;
    if (!SameGeometry(program_.value(value).type, param.type)) return false;
    if (value == root) return true;
    // A reshape such as [1, n] to [n]: both contiguous, the whole storage.
    const Value& view = program_.value(value);
    return view.type.dtype == owner.type.dtype && view.offset == Dim(0) && program_.IsContiguous(view.type) &&
           program_.IsContiguous(owner.type) && program_.NumElements(view.type) == program_.NumElements(owner.type);
  }

  const Param& ParamOf(const Gradient& gradient) const { return program_.params[gradient.param]; }
  const Unit& UnitOf(const Gradient& gradient) const { return program_.units[ParamOf(gradient).unit]; }

  // Adds the state and the flat buffer, and makes the gradient land there.
  void Land(Gradient& gradient) {
    const Param& param = ParamOf(gradient);
    const Unit& unit = UnitOf(gradient);
    const Op& at = edit_.op(gradient.landed);
    ValueId value = edit_.op(gradient.marker).args[1].value;
    // The value lies outside the phase, or in a gathered buffer that ends with the marker.
    bool outside = gradient.owner == kNone && gradient.landed == gradient.marker;
    auto insert = [&](OpId op) {
      gradient.owner != kNone || outside ? edit_.Before(gradient.landed, op) : edit_.After(gradient.landed, op);
    };
    gradient.state = program_.AddState(unit.id, "grad", FlatType(unit.dtype, whole_ ? unit.numel : unit.own()), false);
    gradient.flat = gradient.state;
    bool padded = !(program_.NumElements(program_.value(param.value).type) == Dim(unit.numel));
    if (!options_.Alone()) {
      Op& begin = AddLike(program_, at, OpKind::kGradBegin);
      begin.units = {unit.id};
      gradient.flat = program_.AddResult(begin, FlatType(gradient.dtype, unit.numel));
      insert(begin.id);
    } else if (padded) {
      Op& begin = AddLike(program_, at, OpKind::kGradBegin);
      begin.units = {unit.id};
      program_.AddPlaced(begin, FlatType(unit.dtype, unit.numel), gradient.state, Dim(0));
      insert(begin.id);
    }
    if (gradient.owner != kNone) {
      Value& owner = program_.value(gradient.owner);
      owner.root = gradient.flat;
      owner.offset = param.unit_offset;
      owner.placed = true;
      gradient.last_use = gradient.landed;
      for (int32_t use : facts_.uses[gradient.owner]) {
        if (edit_.op(use).kind != OpKind::kGrad) gradient.last_use = std::max(gradient.last_use, use);
      }
    } else {
      Op& copy = AddLike(program_, at, OpKind::kCopy, {value});
      Type type = program_.value(param.value).type;
      type.dtype = program_.value(gradient.flat).type.dtype;
      program_.AddPlaced(copy, std::move(type), gradient.flat, Dim(param.unit_offset));
      insert(copy.id);
      gradient.last_use = gradient.landed;
    }
    for (const MoreGradient& more : gradient.more) Add(gradient, more);
    gradient.last_use = std::max(gradient.last_use, gradient.done);
  }

  // Adds the gradient of one more micro-batch to what lies in the flat buffer.
  void Add(const Gradient& gradient, const MoreGradient& more) {
    const Param& param = ParamOf(gradient);
    const Op& tags = edit_.op(more.done);
    Type type = program_.value(param.value).type;
    type.dtype = program_.value(gradient.flat).type.dtype;
    Op& view = AddLike(program_, tags, OpKind::kView, {gradient.flat});
    const ValueId part = program_.AddView(view, type, gradient.flat, Dim(param.unit_offset));
    const bool product = more.product && program_.value(more.value).type == type;
    Op& add = AddLike(program_, tags, product ? "aten.addmm_" : "aten.add_.Tensor");
    add.args = product ? tags.args : std::vector<Arg>{Arg::Of(more.value)};
    add.args.insert(add.args.begin(), Arg::Of(part));
    add.writes = {part};
    program_.AddView(add, type, gradient.flat, Dim(param.unit_offset));
    edit_.After(more.added, view.id);
    edit_.After(more.added, add.id);
    if (product) edit_.Remove(more.done);
  }

  // Views of a gradient that has moved lie in the flat buffer too.
  void MoveViews() {
    std::vector<const Gradient*> moved(program_.num_values(), nullptr);
    for (const Gradient& gradient : gradients_) {
      if (gradient.owner != kNone) moved[gradient.owner] = &gradient;
    }
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (!program_.HasValue(id)) continue;
      Value& value = program_.value(id);
      const Gradient* gradient = moved[value.root];
      if (gradient == nullptr || id == gradient->owner) continue;
      value.root = gradient->flat;
      int64_t offset = OffsetIn(ParamOf(*gradient).unit_offset, gradient->dtype, value.type.dtype);
      value.offset = program_.dims.Add(value.offset, Dim(offset));
    }
  }

  struct Started {
    const Gradient* gradient = nullptr;
    ValueId part = kNone;  // the reduced shard
  };

  void Reduce() {
    // A copy for a second parameter may read a buffer that was released by its own last use otherwise.
    for (Gradient& gradient : gradients_) {
      if (gradient.owner != kNone) continue;
      ValueId root = program_.RootOf(edit_.op(gradient.marker).args[1].value);
      for (Gradient& source : gradients_) {
        if (source.owner != kNone && source.flat == root) source.last_use = std::max(source.last_use, gradient.done);
      }
    }
    std::deque<Started> pending;
    std::vector<ValueId> gathers;
    int64_t in_flight = 0;  // bytes of the flat buffers of `pending`
    for (const Gradient& gradient : gradients_) {
      auto here = [&](OpId op) { edit_.After(gradient.done, op); };
      std::vector<Started> ended;
      for (; !pending.empty() && !RidesAlong(gradient, *pending.front().gradient, in_flight); pending.pop_front()) {
        in_flight -= FlatBytes(*pending.front().gradient);
        FinishReduce(ended.emplace_back(pending.front()), gradient.done, here);
      }
      Started started = StartReduce(gradient, here);
      for (const Started& one : ended) {
        if (whole_) gathers.push_back(Gather(one, here));
      }
      if (options_.wait_next) {
        pending.push_back(started);
        in_flight += FlatBytes(gradient);
        continue;
      }
      FinishReduce(started, gradient.done, here);
      if (whole_) here(WaitGather(Gather(started, here), gradient));
    }
    auto at_end = [&](OpId op) { edit_.AtEnd(op); };
    for (Started& started : pending) {
      FinishReduce(started, edit_.size(), at_end);
      if (whole_) gathers.push_back(Gather(started, at_end));
    }
    for (ValueId full : gathers) at_end(WaitGather(full, gradients_.back()));
  }

  int64_t FlatBytes(const Gradient& gradient) const { return UnitOf(gradient).numel * DTypeBytes(gradient.dtype); }

  // Whether the reduction may start while others are under way: those of small parameters of the same module, together
  // at most an eighth of the first. So one large gradient is held while the next is made, and the reduction of a bias
  // does not wait for the one of its weight, which then would have nothing to hide behind. Where every rank ends
  // with all sums, a few MiB more are little, and each large gradient would wait for the one before it otherwise.
  bool RidesAlong(const Gradient& gradient, const Gradient& first, int64_t in_flight) const {
    if (whole_ && in_flight + FlatBytes(gradient) <= kUnderWayBytes) return true;
    const auto module = [&](const Gradient& of) {
      const std::string_view name = ParamOf(of).name;
      return name.substr(0, std::min(name.rfind('.'), name.size()));
    };
    const int64_t bytes = FlatBytes(first);
    return module(gradient) == module(first) && in_flight + FlatBytes(gradient) <= bytes + bytes / 8;
  }

  template <typename F>
  Started StartReduce(const Gradient& gradient, F&& here) {
    const Unit& unit = UnitOf(gradient);
    Op& op = AddLike(program_, edit_.op(gradient.done), OpKind::kReduceStart, {gradient.flat});
    op.units = {unit.id};
    ValueId part = gradient.dtype == unit.dtype ? PlacePart(op, gradient)
                                                : program_.AddResult(op, FlatType(gradient.dtype, unit.own()));
    here(op.id);
    return {&gradient, part};
  }

  // This rank's part of the state is what `op` gives.
  ValueId PlacePart(Op& op, const Gradient& gradient) {
    const Unit& unit = UnitOf(gradient);
    Dim own = whole_ ? program_.dims.Mul(Dim(unit.shard), program_.AxisRank(options_.axis)) : Dim(0);
    return program_.AddPlaced(op, FlatType(unit.dtype, unit.own()), gradient.state, own);
  }

  // Waits at op `now`; the buffer goes at once or after its last use, and a narrow part is widened into the state.
  template <typename F>
  void FinishReduce(Started& started, int32_t now, F&& here) {
    const Gradient& gradient = *started.gradient;
    const Op& tags = edit_.op(gradient.done);
    here(AddLike(program_, tags, OpKind::kReduceWait, {started.part}).id);
    const OpId release = AddLike(program_, tags, OpKind::kRelease, {gradient.flat}).id;
    gradient.last_use <= now ? here(release) : edit_.After(gradient.last_use, release);
    if (gradient.dtype == UnitOf(gradient).dtype) return;
    Op& widen = AddLike(program_, tags, OpKind::kCopy, {started.part});
    started.part = PlacePart(widen, gradient);
    here(widen.id);
  }

  // Starts to gather the summed gradient in place.
  template <typename F>
  ValueId Gather(const Started& started, F&& here) {
    const Unit& unit = UnitOf(*started.gradient);
    Op& op = AddLike(program_, edit_.op(started.gradient->done), OpKind::kGatherStart, {started.part});
    op.units = {unit.id};
    ValueId full = program_.AddPlaced(op, FlatType(unit.dtype, unit.numel), started.gradient->state, Dim(0));
    here(op.id);
    return full;
  }

  OpId WaitGather(ValueId full, const Gradient& tags) {
    return AddLike(program_, edit_.op(tags.done), OpKind::kGatherWait, {full}).id;
  }

  Program& program_;
  PhaseEditor& edit_;
  const PhaseFacts& facts_;
  const ShardingOptions& options_;
  bool whole_;
  std::vector<Gradient> gradients_;
  std::vector<char> claimed_;  // by root: a gradient decides where it is
};

}  // namespace

void PlaceGradients(Program& program, PhaseEditor& edit, const PhaseFacts& facts, const ShardingOptions& options,
                    bool whole) {
  Placer(program, edit, facts, options, whole).Run();
}

}  // namespace interlace
