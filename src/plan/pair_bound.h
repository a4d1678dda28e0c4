// pair_bound.h — bounds of what a number of micro-batches and stages can reach, in a fraction of the time that the
// exact choice between stages takes. Inside the room only (tune.h).
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "plan/frontiers.h"
#include "plan/inter_stage.h"

namespace interlace::plan {

class PairBounds {
 public:
  explicit PairBounds(Frontiers& frontiers) : frontiers_(frontiers) {}

  // All devices busy with the work of all blocks, each as fast as in any stage of any size: t_i n_i >= W l_i. So the
  // longest t is at least W L / N, and the sum of them at least W L / n with n the most devices that a stage may have.
  double LeastUs(const InterStageProblem& problem);

  // Whether no plan can be faster than this. A stage is one of its class's items (l blocks, n devices, least t). Given
  // a limit T on every t, blocks and devices get a price each (Lagrange), and every stage chooses for itself: for any
  // x, y >= 0
  //
  //   sum t_i  >=  x - y + sum_i min { t - x l/L + y n/N  :  t <= T }
  //
  // A step is at least (G-1) max t + sum t, so for max t in (T1, T2] it is at least (G-1) T1 plus the right side for
  // T2. Prices rise and fall by what is used too little and too much (Polyak's steps).
  bool NoneBeats(const InterStageProblem& problem, double cutoff_us);

 private:
  double Work(const InterStageProblem& problem);                        // W: device-microseconds of a block
  double Work(int32_t blocks, int32_t micro_batches, int32_t devices);  // in stages of so many devices

  Frontiers& frontiers_;
  std::map<std::pair<int32_t, int32_t>, double> work_;  // by G and devices
};

}  // namespace interlace::plan
