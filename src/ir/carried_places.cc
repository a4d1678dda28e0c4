#include "ir/carried_places.h"

#include <map>
#include <set>
#include <string>

#include "ir/op_table.h"

namespace interlace {
namespace {

// Places that any save of their size takes lie closer, but nearly every run has a choice of its own then, and each
// choice is a variant with kernels and tensors of its own. So with many runs names keep to their own places. Measured
// on the two ranks of an interleaved Llama, 8 micro-batches: arenas 14 and 20 % smaller, 38 and 46 choices for 23
// and 27.
constexpr int64_t kManyRuns = 128;
constexpr int64_t kMostRuns = int64_t{1} << 20;  // of a step
constexpr size_t kMostHeld = size_t{1} << 25;    // places in use, summed over the runs

class Placing {
 public:
  explicit Placing(const Program& program) : program_(program) {}

  Result<CarriedPlaces> Run() {
    int64_t runs = 0;
    for (const Program::StepRun& entry : program_.RunsOfStep()) runs += entry.count;
    by_name_ = runs > kManyRuns;
    for (const Program::StepRun& entry : program_.RunsOfStep()) {
      for (int64_t i = 0; i < entry.count; ++i) {
        if (static_cast<int64_t>(out_.runs.size()) == kMostRuns || held_ > kMostHeld) {
          return MakeError("the ", program_.accumulation,
                           " micro-batches of a step hold more saved values than can be planned; run fewer at once");
        }
        INTERLACE_TRY(Place(*entry.phase, entry.first + i * program_.width));
      }
    }
    return std::move(out_);
  }

 private:
  Status Place(const Phase& phase, int64_t micro_batch) {
    CarriedRun& run = out_.runs.emplace_back();
    run.phase = &phase;
    std::map<ValueId, int32_t> here;  // by value: the place that it was loaded from
    for (const Carried& load : phase.loads) {
      const auto found = saved_.find({load.name, micro_batch});
      if (found == saved_.end()) return MakeError("'", load.name, "' is loaded before it is saved");
      here[load.value] = found->second;
      run.loads.push_back(found->second);
      in_use_.erase(found->second);
      saved_.erase(found);
    }
    run.through.assign(in_use_.begin(), in_use_.end());
    held_ += run.through.size();
    std::map<ValueId, int32_t> of_value = here;  // all that this run touches
    for (const Carried& save : phase.saves) {
      const auto found = here.find(save.value);
      const int32_t place = found != here.end() ? found->second : NewPlace(save);
      if (found != here.end()) here.erase(found);
      of_value[save.value] = place;
      run.saves.push_back(place);
      in_use_.insert(place);
      saved_[{save.name, micro_batch}] = place;
    }
    for (const auto& [value, place] : here) ending_.insert(place);
    FollowTransfers(phase, of_value);
    return Ok{};
  }

  // Places of sources go with the transfers that the run gives to the next one. What is neither saved nor read by any
  // is free.
  void FollowTransfers(const Phase& phase, const std::map<ValueId, int32_t>& of_value) {
    std::map<ValueId, std::set<int32_t>> flights;  // by result of a start
    for (size_t i = 0; i < phase.takes.size() && i < flights_.size(); ++i) flights[phase.takes[i]] = flights_[i];
    for (OpId id : TransfersOf(phase)) {
      const Op& op = program_.op(id);
      if (IsWait(op)) ForEachOperand(op, [&](ValueId value) { flights.erase(value); });
      if (!IsStart(op)) continue;
      std::set<int32_t> sources;
      ForEachOperand(op, [&](ValueId value) {
        const auto found = of_value.find(program_.RootOf(value));
        if (found != of_value.end()) sources.insert(found->second);
      });
      for (ValueId result : op.results) {
        if (result != kNone && !sources.empty()) flights[result] = sources;
      }
    }
    flights_.clear();
    std::set<int32_t> read;
    for (ValueId give : phase.gives) {
      flights_.push_back(flights[give]);
      read.insert(flights_.back().begin(), flights_.back().end());
    }
    for (auto place = ending_.begin(); place != ending_.end();) {
      if (read.contains(*place)) {
        ++place;
        continue;
      }
      FreeFor(*out_.saved_by[static_cast<size_t>(*place)]).insert(*place);
      place = ending_.erase(place);
    }
  }

  // Starts and waits, in their order.
  const std::vector<OpId>& TransfersOf(const Phase& phase) {
    const auto [found, fresh] = transfers_.try_emplace(&phase);
    for (OpId id : fresh ? phase.ops : std::vector<OpId>()) {
      if (IsStart(program_.op(id)) || IsWait(program_.op(id))) found->second.push_back(id);
    }
    return found->second;
  }

  std::set<int32_t>& FreeFor(const Carried& save) {
    const Result<int64_t> bytes = program_.StorageBytes(program_.value(save.value).type);
    return free_[{bytes.ok() ? *bytes : -1, by_name_ ? save.name : std::string()}];
  }

  int32_t NewPlace(const Carried& save) {
    std::set<int32_t>& free = FreeFor(save);
    if (!free.empty()) return free.extract(free.begin()).value();
    out_.saved_by.push_back(&save);
    return static_cast<int32_t>(out_.saved_by.size()) - 1;
  }

  const Program& program_;
  CarriedPlaces out_;
  std::map<std::pair<std::string, int64_t>, int32_t> saved_;  // by name and micro-batch: the place
  bool by_name_ = false;
  std::map<std::pair<int64_t, std::string>, std::set<int32_t>> free_;  // by bytes, and with many runs by name
  std::set<int32_t> in_use_;
  std::set<int32_t> ending_;                // neither saved nor free: a transfer may still read them
  std::vector<std::set<int32_t>> flights_;  // by what the last run gave: places that its transfer reads
  std::map<const Phase*, std::vector<OpId>> transfers_;
  size_t held_ = 0;
};

}  // namespace

Result<CarriedPlaces> PlaceCarried(const Program& program) {
  return Placing(program).Run();
}

Result<std::vector<int64_t>> BytesThroughRuns(const Program& program) {
  std::vector<int64_t> out;
  if (!program.Carries()) return out;
  INTERLACE_ASSIGN(const CarriedPlaces places, PlaceCarried(program));
  for (const CarriedRun& run : places.runs) {
    int64_t& sum = out.emplace_back(0);
    for (int32_t place : run.through) {
      const ValueId value = places.saved_by[static_cast<size_t>(place)]->value;
      INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(value).type));
      if (__builtin_add_overflow(sum, bytes, &sum)) return MakeError("the bytes alive at once do not fit in 64 bits");
    }
  }
  return out;
}

}  // namespace interlace
