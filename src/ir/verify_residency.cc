// What is out of memory is not used and comes back before it is; what moves is not written on its way. The run order
// is walked once, with a repeated micro-batch twice, and must end as it began.
#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "base/append.h"
#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

class Walk {
 public:
  Walk(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  void Run() {
    bool any = false;
    for (const State& state : program_.states) {
      if (!state.out) continue;
      any = true;
      if (program_.RootOf(state.value) != state.value)
        report_.AtValue(state.value, "only a state that owns its storage can be 'out'");
      place_[state.value] = Place::kOut;
    }
    ForEachOp(program_, [&](const Op& op) { any = any || MoveOf(op) != nullptr || StepsOnHost(op); });
    if (!any) return;
    const Phase* last = nullptr;
    for (const auto& [phase, count] : program_.RunOrder()) {
      for (int64_t i = 0; i < std::min<int64_t>(count, 2); ++i) RunPhase(*phase);
      last = phase;
    }
    if (last == nullptr) return;
    for (const auto& [id, fresh] : first_fresh_) {  // what was given up in this step must not be wanted by the next one
      if (!fresh) Needs(id);
    }
    for (const State& state : program_.states) {
      const Place now = PlaceOf(state.value), first = state.out ? Place::kOut : Place::kIn;
      if (now == first) continue;
      report_.AtValue(state.value, "the state is " + std::string(PlaceName(now)) +
                                       " when the step ends, but the next step begins with it " +
                                       std::string(PlaceName(first)) +
                                       (state.out ? "; offload it" : "; reload it, or declare it 'out'"));
    }
  }

 private:
  Place PlaceOf(ValueId root) const {
    auto found = place_.find(root);
    return found == place_.end() ? Place::kIn : found->second;
  }

  void Report(const Op& op, const std::string& what, ValueId at) {
    if (reported_.emplace(op.id, at).second) report_.AtOp(op, what, at);
  }

  void RunPhase(const Phase& phase) {
    for (OpId id : phase.ops) {
      const Op& op = program_.op(id);
      if (const Move* move = MoveOf(op)) {
        ForEachOperand(op, [&](ValueId operand) { Moved(op, *move, operand); });
      } else {
        Touches(op);
      }
    }
    for (auto it = place_.begin(); it != place_.end();) {
      const Value& value = program_.value(it->first);
      if (value.kind == ValueKind::kState) {
        ++it;
        continue;
      }
      // What a step on the host has used up ends where it lies.
      if (it->second != Place::kIn && !(it->second == Place::kOut && used_up_.contains(it->first))) {
        Report(program_.op(moved_by_[it->first]),
               "%" + std::to_string(it->first) + " is " + std::string(PlaceName(it->second)) + " when phase '" +
                   phase.name + "' ends; only states stay out over phases",
               it->first);
      }
      clean_.erase(it->first);
      it = place_.erase(it);
    }
  }

  void Moved(const Op& op, const Move& move, ValueId id) {
    const Value& value = program_.value(id);
    const bool may =
        value.kind == ValueKind::kState || value.kind == ValueKind::kResult || value.kind == ValueKind::kTake;
    if (!may || value.root != id) {
      return Report(op,
                    op.name + " moves whole storages of states and results; %" + std::to_string(id) + " is " +
                        (value.root != id ? "a view of %" + std::to_string(value.root) : "neither"),
                    id);
    }
    const Place now = PlaceOf(id);
    if (now != move.from) {
      Report(op, Joined("%", id, " is ", PlaceName(now), " here; ", op.name, " needs it ", PlaceName(move.from)), id);
    }
    if (move.to == Place::kLeaving && IsClean(op) && !clean_.contains(id)) {
      // What ends with the step may be given up: then only fresh memory may come.
      if (value.kind != ValueKind::kState || Persistent(id)) {
        Report(op, Joined("%", id, " was written since it came back, or never was in the tier; leave out clean=true"),
               id);
      }
      lost_.emplace(id, op.id);
    }
    if (move.to == Place::kLeaving && !IsClean(op)) lost_.erase(id);
    if (move.to == Place::kComing) {
      first_fresh_.try_emplace(id, IsFresh(op));
      if (!IsFresh(op)) Needs(id);
    }
    if (const Arg* fresh = op.Attr("fresh"); fresh != nullptr) {
      const bool step = value.kind == ValueKind::kState && !Persistent(id);
      if (move.to != Place::kComing || !step)
        Report(op, "fresh= is for reload.start of a state of one step, which has nothing to keep", id);
      if (IsFresh(op)) {
        blank_.insert(id);
        lost_.erase(id);
      }
    }
    if (move.to == Place::kLeaving && blank_.contains(id))
      Report(op, "%" + std::to_string(id) + " goes out before anything is written to it", id);
    if (move.to == Place::kIn && !blank_.contains(id)) clean_.insert(id);
    place_[id] = move.to;
    moved_by_[id] = op.id;
  }

  void Touches(const Op& op) {
    if (StepsOnHost(op)) return Steps(op);
    if ((place_.empty() && clean_.empty()) || op.kind == OpKind::kView) return;
    auto touch = [&](ValueId id) {
      const Place now = PlaceOf(program_.RootOf(id));
      if (now == Place::kOut || now == Place::kComing)
        Report(op, Joined("%", id, " is used while its storage is ", PlaceName(now), "; reload it and wait first"), id);
    };
    auto write = [&](ValueId id, const char* verb) {
      clean_.erase(program_.RootOf(id));
      blank_.erase(program_.RootOf(id));
      if (PlaceOf(program_.RootOf(id)) == Place::kLeaving)
        Report(op, Joined("%", id, " is ", verb, " while its storage is on its way out; wait for the offload first"),
               id);
    };
    ForEachOperand(op, [&](ValueId id) {
      touch(id);
      if (!blank_.contains(program_.RootOf(id)) || op.kind == OpKind::kRelease) return;
      Report(op, Joined("%", id, " is read before anything is written to it: its memory came with fresh=true"), id);
    });
    for (ValueId id : op.writes) touch(id);
    for (ValueId id : op.results) {
      if (id == kNone || !program_.value(id).placed) continue;
      touch(id);
      write(id, "written");
    }
    for (ValueId id : WrittenOperands(program_, op)) write(id, "written");
    if (op.kind == OpKind::kRelease) {
      ForEachOperand(op, [&](ValueId id) { write(id, "released"); });
    }
  }

  // Bytes in the tier are wanted back, or used there.
  void Needs(ValueId id) {
    auto lost = lost_.find(id);
    if (lost == lost_.end()) return;
    Report(program_.op(lost->second),
           "%" + std::to_string(id) + " was written since it came back, and is needed again; leave out clean=true", id);
  }

  // An optimizer step on the host: everything but the coefficient lies in the tier, and is changed there.
  void Steps(const Op& op) {
    for (size_t i = 0; i < op.args.size(); ++i) {
      if (op.args[i].kind != Arg::Kind::kValue) continue;  // reported elsewhere
      const ValueId id = op.args[i].value;
      const Place now = PlaceOf(program_.RootOf(id));
      if (i >= FlatOperands(op)) {
        if (now != Place::kIn)
          Report(op, Joined("%", id, " is used while its storage is ", PlaceName(now), "; reload it and wait first"),
                 id);
        continue;
      }
      if (program_.RootOf(id) != id) {
        Report(op, Joined("a step on the host works on whole storages; %", id, " is a part of %", program_.RootOf(id)),
               id);
      } else if (now != Place::kOut) {
        Report(op,
               "a step on the host works on storages that are out; %" + std::to_string(id) + " is " +
                   std::string(PlaceName(now)) + "; offload it and wait first",
               id);
      }
      Needs(id);
      if (program_.value(id).kind == ValueKind::kResult) used_up_.insert(id);
    }
    for (ValueId id : WrittenOperands(program_, op)) clean_.erase(id);
  }

  bool Persistent(ValueId id) const {
    return std::any_of(program_.states.begin(), program_.states.end(),
                       [&](const State& s) { return s.value == id && s.persistent; });
  }

  const Program& program_;
  VerifyReport& report_;
  std::unordered_map<ValueId, Place> place_;  // what is not here is in memory
  std::unordered_map<ValueId, OpId> moved_by_;
  std::set<ValueId> clean_;                 // in memory, and the same in the tier
  std::set<ValueId> blank_;                 // in memory that came with fresh=true, and not written since
  std::unordered_map<ValueId, OpId> lost_;  // out, without what was written last: the op that gave it up
  std::map<ValueId, bool> first_fresh_;     // whether the first reload of the step was of fresh memory
  std::set<ValueId> used_up_;               // results that a step on the host took
  std::set<std::pair<OpId, ValueId>> reported_;
};

}  // namespace

void VerifyResidency(const Program& program, VerifyReport& report) {
  Walk(program, report).Run();
}

}  // namespace interlace
