// What runs save under a name for a micro-batch, and later runs load: followed along the run order. A load takes what
// was saved; who needs it again saves it again. Micro-batches do not touch one another, so that a line of the run order
// is one step here, for all its micro-batches: what is saved and not yet loaded is a set of ranges for each name.
#include <algorithm>
#include <map>
#include <set>

#include "base/suggest.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

// Micro-batches from `first` to `end` - 1, saved by a phase as a value.
struct Range {
  int64_t first = 0, end = 0;
  const Phase* phase = nullptr;
  ValueId value = kNone;
};

class CarriedValues {
 public:
  CarriedValues(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  void Run() {
    if (!program_.Carries()) return;
    for (const Phase& phase : program_.phases) Lists(phase);
    if (!report_.empty()) return;
    size_t line = 0;
    for (const Program::StepRun& run : program_.RunsOfStep()) {
      const int64_t end = run.first + run.count * program_.width;
      for (const Carried& load : run.phase->loads) {
        if (!Load(*run.phase, load, run.first, end, line)) return;
      }
      for (const Carried& save : run.phase->saves) {
        if (!Save(*run.phase, save, run.first, end, line)) return;
      }
      ++line;
    }
    for (const auto& [name, ranges] : saved_) {
      if (ranges.empty()) continue;
      const Range& range = ranges.front();
      report_.AtPhase(*range.phase,
                      InQuotes(name) + " of micro-batch " + std::to_string(range.first) + ", which phase " +
                          InQuotes(range.phase->name) +
                          " saves, is never loaded; load it in a later run of the step, or do not save it");
    }
  }

 private:
  // Names and values of one phase.
  void Lists(const Phase& phase) {
    if (phase.kind == PhaseKind::kStep && !(phase.saves.empty() && phase.loads.empty())) {
      return report_.AtPhase(
          phase, "phase " + InQuotes(phase.name) + " runs once a step; only phases of micro-batches save and load");
    }
    std::set<std::string_view> saved, loaded;
    std::set<ValueId> values;
    for (const Carried& load : phase.loads) {
      if (!loaded.insert(load.name).second)
        report_.AtPhase(phase, "phase " + InQuotes(phase.name) + " loads " + InQuotes(load.name) + " twice");
      Owns(phase, load, "loaded");
    }
    for (const Carried& save : phase.saves) {
      if (!saved.insert(save.name).second)
        report_.AtPhase(phase, "phase " + InQuotes(phase.name) + " saves two values as " + InQuotes(save.name));
      if (!values.insert(program_.RootOf(save.value)).second)
        report_.AtPhase(phase, "%" + std::to_string(save.value) + " is saved under two names; one is enough");
      Owns(phase, save, "saved");
      const ValueKind kind = program_.value(program_.RootOf(save.value)).kind;
      if (kind != ValueKind::kResult && kind != ValueKind::kTake) {
        report_.AtPhase(phase,
                        "%" + std::to_string(save.value) + " is declared, and seen in every phase without being saved");
      }
      if (std::any_of(phase.gives.begin(), phase.gives.end(),
                      [&](ValueId id) { return program_.RootOf(id) == program_.RootOf(save.value); })) {
        report_.AtPhase(phase, "%" + std::to_string(save.value) + " is given to the next run and saved as " +
                                   InQuotes(save.name) + "; do one of the two");
      }
    }
  }

  void Owns(const Phase& phase, const Carried& carried, const char* verb) {
    const ValueId root = program_.RootOf(carried.value);
    if (root == carried.value) return;
    report_.AtPhase(phase, "%" + std::to_string(carried.value) + " lies in %" + std::to_string(root) +
                               "; whole storages are " + verb + ", and views of them made where they are needed");
  }

  // At the line of the run order, or at the phase where there is none.
  void At(const Phase& phase, size_t line, const std::string& what) {
    program_.order.empty() ? report_.AtPhase(phase, what) : report_.AtRun(line, what);
  }

  bool Save(const Phase& phase, const Carried& save, int64_t first, int64_t end, size_t line) {
    std::vector<Range>& ranges = saved_[save.name];
    for (const Range& range : ranges) {
      const int64_t both = std::max(range.first, first);
      if (both >= std::min(range.end, end)) continue;
      At(phase, line,
         "phase " + InQuotes(phase.name) + " saves " + InQuotes(save.name) + " of micro-batch " + std::to_string(both) +
             " again before it was loaded");
      return false;
    }
    ranges.push_back({first, end, &phase, save.value});
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
    return true;
  }

  bool Load(const Phase& phase, const Carried& load, int64_t first, int64_t end, size_t line) {
    std::vector<Range>& ranges = saved_[load.name];
    std::vector<Range> rest;
    int64_t next = first;  // the first micro-batch that is still to be found
    for (const Range& range : ranges) {
      const int64_t from = std::max(range.first, first), to = std::min(range.end, end);
      if (from >= to) {
        rest.push_back(range);
        continue;
      }
      if (from > next) break;
      if (!SameType(phase, load, range)) return false;
      next = to;
      if (range.first < from) rest.push_back({range.first, from, range.phase, range.value});
      if (to < range.end) rest.push_back({to, range.end, range.phase, range.value});
    }
    if (next < end) {
      std::vector<std::string_view> known;
      for (const Phase& other : program_.phases) {
        for (const Carried& save : other.saves) known.push_back(save.name);
      }
      const bool named = std::find(known.begin(), known.end(), load.name) != known.end();
      At(phase, line,
         "phase " + InQuotes(phase.name) + " loads " + InQuotes(load.name) + " of micro-batch " + std::to_string(next) +
             ", which no run before it has saved, or one has loaded and not saved again" +
             (named ? "" : DidYouMean(load.name, known)));
      return false;
    }
    ranges = std::move(rest);
    return true;
  }

  bool SameType(const Phase& phase, const Carried& load, const Range& saved) {
    const Type &mine = program_.value(load.value).type, &theirs = program_.value(saved.value).type;
    if (mine == theirs) return true;
    report_.AtPhase(phase, "phase " + InQuotes(phase.name) + " loads " + InQuotes(load.name) + " as " +
                               PrintType(program_, mine) + ", but " + InQuotes(saved.phase->name) + " saves it as " +
                               PrintType(program_, theirs));
    return false;
  }

  const Program& program_;
  VerifyReport& report_;
  std::map<std::string, std::vector<Range>> saved_;  // by name, in order of micro-batches
};

}  // namespace

void VerifyCarried(const Program& program, VerifyReport& report) {
  CarriedValues(program, report).Run();
}

}  // namespace interlace
