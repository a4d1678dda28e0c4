// Transfers in flight, and what phases hand to one another. The run order is walked twice: the first lap only learns
// what is in flight where a phase begins (the last phase hands on to the first of the next step), the second lap
// reports. What a phase saves may be in flight, too, and is then waited for by who loads it; a message on its way out
// is saved with what it sends, so that this lasts as long.
#include <algorithm>
#include <map>
#include <set>

#include "base/append.h"
#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

// A transfer between its start and its wait.
struct Flight {
  ValueId result = kNone;  // as the phase at hand names it
  ValueId origin = kNone;  // as the phase of the start names it
  OpId start = kNone;
  std::vector<ByteRange> sources;  // still read by the transfer
};

// One that is saved; `with`: the names under which its sources are.
struct SavedFlight {
  Flight flight;
  std::vector<std::string> with;  // by source
};

class Flow {
 public:
  Flow(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  void Run() {
    std::vector<const Phase*> laps;
    for (const auto& [phase, count] : program_.RunOrder()) laps.insert(laps.end(), count > 1 ? 2 : 1, phase);
    if (laps.empty()) return;
    MatchPhases(laps);
    for (reporting_ = false;; reporting_ = true) {
      for (size_t i = 0; i < laps.size(); ++i) {
        Load(*laps[i]);
        RunPhase(*laps[i]);
        Save(*laps[i]);
        HandOn(*laps[i], *laps[(i + 1) % laps.size()]);
      }
      if (reporting_) break;
    }
  }

 private:
  void Report(const Op& op, const std::string& what, ValueId at) {
    if (reporting_ && reported_.emplace(op.id, what).second) report_.AtOp(op, what, at);
  }

  void MatchPhases(const std::vector<const Phase*>& laps) {
    std::set<std::pair<const Phase*, const Phase*>> done;
    for (size_t i = 0; i < laps.size(); ++i) {
      const Phase& from = *laps[i];
      const Phase& to = *laps[(i + 1) % laps.size()];
      if (!done.emplace(&from, &to).second) continue;
      if (from.gives.size() != to.takes.size()) {
        report_.AtPhase(to, "phase '" + to.name + "' takes " + std::to_string(to.takes.size()) + " values, but '" +
                                from.name + "', which runs before it, gives " + std::to_string(from.gives.size()));
        continue;
      }
      for (size_t k = 0; k < to.takes.size(); ++k) {
        const Type& given = program_.value(from.gives[k]).type;
        const Type& taken = program_.value(to.takes[k]).type;
        if (given == taken) continue;
        report_.AtPhase(to, "phase '" + to.name + "' takes %" + std::to_string(to.takes[k]) + " as " +
                                PrintType(program_, taken) + ", but '" + from.name + "' gives %" +
                                std::to_string(from.gives[k]) + " as " + PrintType(program_, given));
      }
    }
  }

  void RunPhase(const Phase& phase) {
    for (OpId id : phase.ops) {
      const Op& op = program_.op(id);
      if (MoveOf(op) != nullptr) {  // by storage, not by result: verify_residency.cc
        Touches(op);
        continue;
      }
      if (IsWait(op)) {
        Wait(op);
        continue;
      }
      Touches(op);
      if (IsStart(op)) Start(op);
    }
  }

  // What was saved in flight still is.
  void Load(const Phase& phase) {
    for (const Carried& load : phase.loads) {
      const auto found = saved_.find(load.name);
      if (found == saved_.end()) continue;
      const SavedFlight& saved = found->second;
      Flight flight{load.value, saved.flight.origin, saved.flight.start, {}};
      for (size_t i = 0; i < saved.with.size(); ++i) {
        const auto source = std::find_if(phase.loads.begin(), phase.loads.end(),
                                         [&](const Carried& other) { return other.name == saved.with[i]; });
        if (source == phase.loads.end()) {
          if (reporting_) {
            report_.AtPhase(phase, "'" + load.name + "' is a message on its way; load '" + saved.with[i] +
                                       "', which it sends, in the same phase");
          }
          continue;
        }
        ByteRange range = saved.flight.sources[i];
        range.root = source->value;
        flight.sources.push_back(range);
      }
      flights_.push_back(std::move(flight));
    }
  }

  void Save(const Phase& phase) {
    for (const Carried& save : phase.saves) {
      const auto found = std::find_if(flights_.begin(), flights_.end(),
                                      [&](const Flight& flight) { return flight.result == save.value; });
      if (found == flights_.end()) continue;
      if (TraitsOf(program_.op(found->start)).family != OpFamily::kPeer) continue;  // only messages: reported by HandOn
      SavedFlight saved{*found, {}};
      std::erase_if(saved.flight.sources, [&](const ByteRange& source) { return !IsLocal(source.root); });
      for (const ByteRange& source : saved.flight.sources) {
        const auto with = std::find_if(phase.saves.begin(), phase.saves.end(),
                                       [&](const Carried& other) { return other.value == source.root; });
        if (with == phase.saves.end()) {
          Report(program_.op(found->start),
                 "%" + std::to_string(found->origin) + " is still in flight when it is saved; save %" +
                     std::to_string(source.root) + ", which is sent, as well",
                 found->origin);
        }
        saved.with.push_back(with == phase.saves.end() ? std::string() : with->name);
      }
      saved_.insert_or_assign(save.name, std::move(saved));
      flights_.erase(found);
    }
  }

  // What is local to a phase cannot be named in the next.
  bool IsLocal(ValueId root) const {
    const ValueKind kind = program_.value(root).kind;
    return kind == ValueKind::kResult || kind == ValueKind::kTake;
  }

  void Wait(const Op& op) {
    ForEachOperand(op, [&](ValueId id) {
      for (size_t i = 0; i < flights_.size(); ++i) {
        if (flights_[i].result != id) continue;
        const Op& start = program_.op(flights_[i].start);
        if (TraitsOf(op).partner != start.kind) {
          Report(op, Joined("%", id, " comes from ", start.name, "; wait for it with ", TransferName(start), ".wait"),
                 id);
        }
        flights_.erase(flights_.begin() + static_cast<ptrdiff_t>(i));
        return;
      }
      Report(op,
             "%" + std::to_string(id) + " is not in flight here; a " + std::string(TransferName(op)) +
                 ".start must come before, and one wait is enough",
             id);
    });
  }

  void Touches(const Op& op) {
    if (flights_.empty()) return;
    auto touch = [&](ValueId id) {
      ByteRange range = RangeOf(program_, id);
      for (const Flight& flight : flights_) {
        if (!range.Overlaps(RangeOf(program_, flight.result))) continue;
        const std::string& start = program_.op(flight.start).name;
        std::string what = "%" + std::to_string(id);
        what += id == flight.result ? " is used" : " touches %" + std::to_string(flight.result);
        Report(op,
               what + " between " + start + " and " + std::string(TransferName(program_.op(flight.start))) + ".wait",
               id);
      }
    };
    auto write = [&](ValueId id, const char* verb) {
      ByteRange range = RangeOf(program_, id);
      for (const Flight& flight : flights_) {
        for (const ByteRange& source : flight.sources) {
          if (!range.Overlaps(source)) continue;
          Report(op,
                 "%" + std::to_string(id) + " is " + verb + " while " + program_.op(flight.start).name + " of %" +
                     std::to_string(flight.result) + " still reads it; wait first",
                 id);
        }
      }
    };
    ForEachOperand(op, touch);
    for (ValueId id : op.writes) touch(id);
    for (ValueId id : op.results) {
      if (id == kNone || program_.RootOf(id) == id) continue;
      touch(id);
      if (program_.value(id).placed) write(id, "written");
    }
    for (ValueId id : WrittenOperands(program_, op)) write(id, "written");
    if (TraitsOf(op).frees != kNoOperand) {
      ForEachOperand(op, [&](ValueId id) { write(id, "released"); });
    }
  }

  void Start(const Op& op) {
    std::vector<ByteRange> sources;
    ForEachOperand(op, [&](ValueId id) { sources.push_back(RangeOf(program_, id)); });
    bool paired = sources.size() == op.results.size();
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (op.results[i] == kNone) continue;
      flights_.push_back({op.results[i], op.results[i], op.id, paired ? std::vector<ByteRange>{sources[i]} : sources});
    }
  }

  // What is still in flight goes with the gives; everything else must have been waited for.
  void HandOn(const Phase& from, const Phase& to) {
    std::vector<Flight> next;
    for (Flight& flight : flights_) {
      bool given = false;
      for (size_t k = 0; k < from.gives.size() && k < to.takes.size() && !given; ++k) {
        if (from.gives[k] != flight.result) continue;
        given = true;
        std::erase_if(flight.sources, [&](const ByteRange& source) { return IsLocal(source.root); });
        next.push_back({to.takes[k], flight.origin, flight.start, std::move(flight.sources)});
      }
      if (!given) {
        Report(program_.op(flight.start),
               "%" + std::to_string(flight.origin) + " is still in flight when phase '" + from.name +
                   "' ends; wait for it there, or give it to the next phase (messages may be saved)",
               flight.origin);
      }
    }
    flights_ = std::move(next);
  }

  const Program& program_;
  VerifyReport& report_;
  bool reporting_ = false;
  std::vector<Flight> flights_;
  std::map<std::string, SavedFlight, std::less<>> saved_;  // by name
  std::set<std::pair<OpId, std::string>> reported_;
};

}  // namespace

void VerifyFlow(const Program& program, VerifyReport& report) {
  Flow(program, report).Run();
}

}  // namespace interlace
