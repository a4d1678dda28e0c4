#include "passes/trials.h"

#include <algorithm>

#include "passes/passes.h"
#include "passes/runner.h"

namespace interlace {

Trials::Trials(const Program& base, const PassCosts& costs, double seconds)
    : base_(base), costs_(costs), seconds_(seconds), begin_(std::chrono::steady_clock::now()) {}

Status Trials::Begin() {
  INTERLACE_ASSIGN(known_, KnownOpsOf(base_, costs_));
  return Ok{};
}

double Trials::Elapsed() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

size_t Trials::Hash::operator()(const Schedule& schedule) const {
  size_t hash = 0;
  const auto mix = [&](int32_t number) { hash = (hash ^ static_cast<uint32_t>(number)) * 0x100000001b3 + 1; };
  for (UnitId unit : schedule.keep) mix(unit);
  for (const auto* list : {&schedule.forward, &schedule.backward, &schedule.reduce}) {
    mix(-1);
    for (const Schedule::Bucket& bucket : *list) {
      mix(-2 - bucket.ahead);
      for (UnitId unit : bucket.units) mix(unit);
    }
  }
  return hash;
}

// What was tried last is changed in place: most of a large program is the same in every schedule.
Result<Prediction> Trials::Simulate(const Schedule& schedule, bool with_stalls, bool& overlaps) {
  if (variant_) {
    variant_->TakeBack(base_);
  } else {
    variant_ = base_.Clone();
    variant_->Track();
  }
  INTERLACE_TRY(ApplySchedule(*variant_, schedule));
  INTERLACE_ASSIGN(overlaps, OverlapUpdate(*variant_));
  ++count_;
  return Predict(*variant_, costs_, with_stalls, known_);
}

Result<const Candidate*> Trials::Try(const Schedule& schedule, const std::string& origin) {
  auto [found, fresh] = schedules_.try_emplace(schedule, nullptr);
  if (!fresh) return found->second;
  Candidate candidate{origin, {}, 0, 0, false};
  INTERLACE_ASSIGN(const Prediction prediction, Simulate(schedule, false, candidate.decisions.overlap_update));
  candidate.decisions.schedule = schedule;
  candidate.time_ps = prediction.time_ps;
  candidate.bytes = prediction.bytes;
  return found->second = &all_.emplace_back(std::move(candidate));
}

Result<const std::vector<Stall>*> Trials::StallsOf(const Candidate& candidate) {
  auto [found, fresh] = stalls_.try_emplace(&candidate);
  if (fresh) {
    bool overlaps = false;
    INTERLACE_ASSIGN(Prediction prediction, Simulate(*candidate.decisions.schedule, true, overlaps));
    found->second = std::move(prediction.stalls);
  }
  return &found->second;
}

Result<Prediction> Trials::Measure(const Program& program) {
  ++count_;
  return Predict(program, costs_);
}

Result<Trials::Outcome> Trials::TryPasses(const std::string& origin, Decisions decisions) {
  Outcome out;
  Program program = base_.Clone();
  if (const Status made = RunUnverified(program, CallsOf(decisions)); !made.ok()) {
    out.refused = made.error().message;
    return out;
  }
  INTERLACE_ASSIGN(const Prediction prediction, Measure(program));
  out.live_bytes = prediction.bytes;
  Candidate candidate{origin, std::move(decisions), prediction.time_ps, prediction.bytes, false};
  if (candidate.decisions.offload) {
    INTERLACE_ASSIGN(candidate.bytes, PlacedBytesOf(program, costs_, prediction.bytes));
    candidate.placed = true;
  } else if (Result<Schedule> schedule = ScheduleOf(program, base_); schedule.ok()) {
    out.schedule = std::move(*schedule);
  }
  out.candidate = &all_.emplace_back(std::move(candidate));
  return out;
}

// Equal ones: the one whose text comes first, whatever the order in which they were tried.
const Candidate* Trials::Least(int64_t limit, int64_t Candidate::*of) const {
  const Candidate* least = nullptr;
  for (const Candidate& c : all_) {
    if (!c.decisions.schedule || c.bytes > limit) continue;
    if (least == nullptr || c.*of < least->*of ||
        (c.*of == least->*of && PrintSchedule(*c.decisions.schedule) < PrintSchedule(*least->decisions.schedule)))
      least = &c;
  }
  return least;
}

}  // namespace interlace
