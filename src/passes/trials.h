// trials.h — the variants of one program that a search has tried. Each schedule is simulated once, and what was
// simulated counts against a budget.
#pragma once

#include <chrono>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "passes/decisions.h"
#include "passes/predict.h"

namespace interlace {

struct Candidate {
  std::string origin = "search";  // what it came from: "plain", "prefetch", ...
  Decisions decisions;
  int64_t time_ps = 0;
  int64_t bytes = 0;  // peak of a rank: of what lives, or, once `placed`, with all in its place (PlacedBytesOf)
  bool placed = false;
};

class Trials {
 public:
  // `seconds`: the budget is spent then, too (0: never). The others must outlive it.
  Trials(const Program& base, const PassCosts& costs, double seconds);
  // Once, before the first schedule is tried.
  Status Begin();

  // Simulates the program with this schedule, unless that was done before.
  Result<const Candidate*> Try(const Schedule& schedule, const std::string& origin = "search");
  // The same, and what holds its compute lane.
  Result<const std::vector<Stall>*> StallsOf(const Candidate& candidate);
  // Runs the passes of `decisions` and simulates what comes out, which may also be read as a schedule. A pass that
  // refuses leaves no candidate.
  struct Outcome {
    const Candidate* candidate = nullptr;
    std::string refused;
    int64_t live_bytes = 0;  // the peak of what lives
    std::optional<Schedule> schedule;
  };
  Result<Outcome> TryPasses(const std::string& origin, Decisions decisions);
  // Counts a simulation that leaves no candidate.
  Result<Prediction> Measure(const Program& program);

  // Those tried as schedules: the fastest within `limit`, and the smallest; nullptr: none.
  const Candidate* Fastest(int64_t limit) const { return Least(limit, &Candidate::time_ps); }
  const Candidate* Smallest() const { return Least(std::numeric_limits<int64_t>::max(), &Candidate::bytes); }
  std::deque<Candidate>& all() { return all_; }
  int64_t count() const { return count_; }  // simulations so far
  bool Spent(int64_t budget) const { return count_ >= budget || (seconds_ > 0 && Elapsed() > seconds_); }
  double Elapsed() const;

 private:
  struct Hash {
    size_t operator()(const Schedule& schedule) const;
  };
  Result<Prediction> Simulate(const Schedule& schedule, bool with_stalls, bool& overlaps);
  const Candidate* Least(int64_t limit, int64_t Candidate::*of) const;

  const Program& base_;
  const PassCosts& costs_;
  const double seconds_;
  const std::chrono::steady_clock::time_point begin_;
  KnownOps known_;                  // of the base
  std::optional<Program> variant_;  // of the base: the schedule that was simulated last
  std::deque<Candidate> all_;       // in the order they were tried; they keep their addresses
  std::unordered_map<Schedule, const Candidate*, Hash> schedules_;
  std::unordered_map<const Candidate*, std::vector<Stall>> stalls_;
  int64_t count_ = 0;
};

}  // namespace interlace
