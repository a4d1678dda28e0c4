#include "ir/carried_places.h"

#include <map>
#include <set>
#include <string>

namespace interlace {
namespace {

constexpr int64_t kMostRuns = int64_t{1} << 20;  // of a step
constexpr size_t kMostHeld = size_t{1} << 25;    // places in use, summed over the runs

class Placing {
 public:
  explicit Placing(const Program& program) : program_(program) {}

  Result<CarriedPlaces> Run() {
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
    for (const Carried& save : phase.saves) {
      const auto found = here.find(save.value);
      const int32_t place = found != here.end() ? found->second : NewPlace(save);
      if (found != here.end()) here.erase(found);
      run.saves.push_back(place);
      in_use_.insert(place);
      saved_[{save.name, micro_batch}] = place;
    }
    for (const auto& [value, place] : here) free_[out_.saved_by[static_cast<size_t>(place)]->name].insert(place);
    return Ok{};
  }

  int32_t NewPlace(const Carried& save) {
    std::set<int32_t>& free = free_[save.name];
    if (!free.empty()) return free.extract(free.begin()).value();
    out_.saved_by.push_back(&save);
    return static_cast<int32_t>(out_.saved_by.size()) - 1;
  }

  const Program& program_;
  CarriedPlaces out_;
  std::map<std::pair<std::string, int64_t>, int32_t> saved_;  // by name and micro-batch: the place
  std::map<std::string, std::set<int32_t>> free_;             // by name
  std::set<int32_t> in_use_;
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
