// search.h — chooses what is gathered, kept and reduced when, all together, with the simulator as the judge.
//
// Many schedules are tried, whatever the limit: heuristics as their authors describe them, a grid of bucket sizes,
// distances and kept units (coordinate by coordinate), then moves on the transfers that hold the compute lane longest.
// The rest of the budget goes into making the smallest schedule smaller.
// The front is every schedule that no other beats in both time and memory. A memory limit picks from the front the
// smallest schedule within 1 % of the fastest that fits, so a higher limit never gives a slower step. In the picked
// schedule every reduction is waited for as late as costs nothing: real ranks are not equally fast at every moment.
//
//   front   memory  ^ \.                     the limit ......|
//                   |   `-.__                 picked: a      v
//                   |       a `----b---- time          b is faster by less than 1 %
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "passes/cost_options.h"
#include "passes/pipeline.h"
#include "passes/schedule.h"

namespace interlace {

struct SearchOptions {
  int64_t evaluations = 0;  // simulations at most; 0: by the size of the program (they take about half a minute)
  double seconds = 0;       // stop after so long, with what there is; 0: no such stop (and the same result every time)
  double share = 1;         // of the simulations that the program's size gives
  double slack = 0.01;      // of the best time that is given up for less memory
  bool offload = false;     // storages may leave memory where nothing else fits (offload.h)
  bool reposition = false;  // and some updates be left to the next step there (reposition_update.h)
  bool host = false;        // and optimizer steps be made where states lie (host_update.h)
  std::string costs_text;   // `cluster=...,profile=...` for the heuristics' options; may be empty
};

struct Candidate {
  std::string name;      // what it came from: "plain", "prefetch", "search", ...
  std::string captured;  // passes to run on the captured program, before the strategy: recompute, interleave
  std::string passes;    // what makes it of the program that was searched
  int64_t time_ps = 0;
  int64_t bytes = 0;  // peak of a rank: of what lives, or, once `placed`, with all in its place (PlacedBytesOf)
  bool placed = false;
};

struct SearchResult {
  std::vector<Candidate> judged;      // all
  std::vector<Candidate> front;       // of them: rising memory, falling time
  std::vector<Candidate> heuristics;  // each as it came out, the plain program first
  std::vector<Candidate> without;     // the chosen schedule without one of its decisions each
  size_t chosen = 0;                  // in front; its size when nothing fits into the limit
  int64_t lower_bound_ps = 0;         // no schedule is faster
  int64_t evaluations = 0;
  double seconds = 0;
  std::string refused;  // what the pass `offload` said of the smallest schedule, where that does not fit either
};

// `base`: a program after shard, accumulate and update in which nothing has been moved, merged or kept.
Result<SearchResult> SearchSchedules(const Program& base, const PassCosts& costs, const SearchOptions& options);
// The same without a choice: neither front nor chosen.
Result<SearchResult> JudgeSchedules(const Program& base, const PassCosts& costs, const SearchOptions& options);

// Front and chosen, of the candidates that were judged. A limit is compared with what a program takes once everything
// has its place in memory. Planning these places takes longer than adding up what lives at once, and the sum is larger,
// so only a candidate that would be chosen is planned, until one fits. When none fits, the first of the front is the
// candidate that takes least. `make`: the program of a candidate.
Status Choose(SearchResult& found, const PassCosts& costs, double slack,
              const std::function<Result<Program>(const Candidate&)>& make);

// The chosen schedule, each time without one kind of decision: what that decision is worth.
Result<std::vector<Candidate>> WithoutEach(const Program& base, const PassCosts& costs, const Candidate& chosen);

// A search with the passes of the captured level as further choices: `between` (shard, accumulate, update, ...) runs on
// the captured program after no, selective, partial and full recomputation (recompute=auto) and, where gradients are
// reduced once a step, with several micro-batches side by side (interleave=auto); every one of these is searched.
// `program` becomes the chosen one.
Result<SearchResult> SearchCaptured(const Program& captured, const std::vector<PassCall>& between,
                                    const PassOptions& options, Program& program);
// Whether the options ask for that: recompute=auto, interleave=auto.
bool RepeatsSearch(const PassOptions& options);

// Those of them that no other beats in both, by rising memory.
std::vector<Candidate> FrontOf(std::vector<Candidate> all);
// The smallest candidate of the front within `slack` of the fastest that fits; the front's size when none fits.
size_t PickFromFront(const std::vector<Candidate>& front, int64_t limit, double slack);

// The pass with recompute=none,interleave=none (the runner calls SearchCaptured for the others). Options: cluster,
// profile, limit, evaluations, seconds. Leaves its result in the program's meta lines. Error: not even the smallest
// schedule fits into the limit (says what it needs, and what would lower it).
Result<bool> Search(Program& program, const PassOptions& options);

}  // namespace interlace
