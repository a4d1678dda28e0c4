// search.h — chooses what is gathered, kept and reduced when, all together, with the simulator as the judge.
//
//   the space   decisions.h, search_space.h
//   the judge   trials.h: each is simulated once, within a budget
//   the policy  search.cc: heuristics as their authors describe them, a grid of bucket sizes, distances and kept units,
//               moves on the transfers that hold the compute lane longest, what is left on making the smallest smaller
//   the choice  front.h: a limit picks from what no other beats
//   in parallel search_pass.cc: one search for each of the captured program's variants; the pass itself
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "passes/cost_options.h"
#include "passes/front.h"
#include "passes/pass_table.h"

namespace interlace {

struct SearchOptions {
  int64_t evaluations = 0;  // simulations at most; 0: by the size of the program (they take about half a minute)
  double seconds = 0;       // stop after so long, with what there is; 0: no such stop (and the same result every time)
  double share = 1;         // of the simulations that the program's size gives
  double slack = 0.01;      // of the best time that is given up for less memory
  bool offload = false;     // storages may leave memory where nothing else fits (offload.h)
  bool reposition = false;  // and some updates be left to the next step there (reposition_update.h)
  bool host = false;        // and optimizer steps be made where states lie (host_update.h)
  PassOptions costs;        // cluster and profile for the heuristics; may be empty
};

struct SearchResult {
  std::deque<Candidate> tried;        // all
  std::vector<Candidate> front;       // of them: rising memory, falling time
  std::vector<Candidate> heuristics;  // each as it came out, the plain program first
  std::vector<Candidate> without;     // the chosen schedule without one of its decisions each, under its name
  size_t chosen = 0;                  // in front; its size when nothing fits into the limit
  int64_t lower_bound_ps = 0;         // no schedule is faster
  int64_t evaluations = 0;
  double seconds = 0;
  std::string refused;  // what the pass `offload` said of the smallest schedule, where that does not fit either
};

// `base`: a program after shard, accumulate and update in which nothing has been moved, merged or kept.
Result<SearchResult> SearchSchedules(const Program& base, const PassCosts& costs, const SearchOptions& options);
// The same without a choice: neither front nor chosen.
Result<SearchResult> TrySchedules(const Program& base, const PassCosts& costs, const SearchOptions& options);

// The pass on a sharded program. Options: cluster, profile, limit, evaluations, seconds, offload, reposition. Leaves
// its result in the program's meta lines. Error: not even the smallest schedule fits into the limit (says what it
// needs, and what would lower it).
Result<bool> Search(Program& program, const PassOptions& options);
// With recompute=auto or breadth_first=auto it also decides that, on what the runner kept of the captured program:
// every variant of it is searched, and `program` becomes the chosen one.
Result<bool> SearchCaptured(Program& program, const Origin& origin, const PassOptions& options);
bool SearchesCaptured(const PassOptions& options);

}  // namespace interlace
