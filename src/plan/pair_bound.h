// pair_bound.h — whether some number of micro-batches and stages can beat a plan at all, in a fraction of the time that the
// exact choice between stages takes. Inside the room only (tune.h).
//
// A stage is one of its class's items (l blocks, n devices, least t); the first holds the embedding, the last the head. Given
// a limit T on every t, blocks and devices get a price each (Lagrange), and every stage chooses for itself: for any x, y >= 0
//
//   sum t_i  >=  x - y + sum_i min { t - x l/L + y n/N  :  t <= T }
//
// where L blocks and N devices are to be used up. A step is at least (G-1) max t + sum t, so for max t in (T1, T2] it is at
// least (G-1) T1 plus the right side for T2. Prices rise and fall by what is used too little and too much (Polyak's steps).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace interlace::plan {

class PairBound {
 public:
  struct Item {
    double us;                    // t
    double blocks, devices;       // shares of all
  };
  enum Class { kFirst, kMiddle, kLast, kClasses };

  PairBound(int32_t micro_batches, int32_t stages);  // two stages or more
  void Add(Class which, const Item& item) { items_[which].push_back(item); }
  // Whether no choice of items is faster than this. `least_us`: no plan has a shorter longest t.
  bool NoneBeats(double cutoff_us, double least_us);

 private:
  // The right side for one limit and prices, and what the stages then use of blocks and devices.
  double Priced(double limit, double x, double y, double& blocks, double& devices) const;
  bool Reaches(double limit, double wanted);

  const double micro_batches_, middle_;  // G, stages in the middle
  std::array<std::vector<Item>, kClasses> items_;  // by t once asked
  double x_ = 0, y_ = 0;                 // prices, kept from limit to limit
};

}  // namespace interlace::plan
