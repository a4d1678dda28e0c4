#include "plan/pair_bound.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace interlace::plan {
namespace {

constexpr double kNoBound = std::numeric_limits<double>::infinity();
constexpr int kSteps = 24;       // of prices for one limit
constexpr double kWidth = 0.01;  // of an interval of limits

enum StageClass { kFirst, kMiddle, kLast, kStageClasses };
struct Item {
  double us;               // t
  double blocks, devices;  // shares of all
};

// What stages cost that choose for themselves.
class Prices {
 public:
  Prices(std::array<std::vector<Item>, kStageClasses> items, int32_t stages, double first_guess)
      : items_(std::move(items)), middle_(stages - 2), x_(first_guess) {
    for (std::vector<Item>& each : items_) {
      std::sort(each.begin(), each.end(), [](const Item& a, const Item& b) { return a.us < b.us; });
    }
  }

  // Whether some prices show that a sum of t below `wanted` is not to be had where no t is above `limit`.
  bool Reach(double limit, double wanted) {
    for (int step = 0; step < kSteps; ++step) {
      double blocks = 0, devices = 0;
      const double reached = Priced(limit, blocks, devices);
      if (reached >= wanted) return true;
      const double up_x = 1 - blocks, up_y = devices - 1;
      const double length = up_x * up_x + (y_ > 0 || up_y > 0 ? up_y * up_y : 0);
      if (length < 1e-12) return false;  // these stages are a plan
      const double stride = 1.2 * (wanted - reached) / length;
      x_ = std::max(x_ + stride * up_x, 0.0), y_ = std::max(y_ + stride * up_y, 0.0);
    }
    return false;
  }

 private:
  // The right side, and what the stages then use.
  double Priced(double limit, double& blocks, double& devices) const {
    double sum = x_ - y_;
    for (int which = 0; which < kStageClasses; ++which) {
      const double count = which == kMiddle ? middle_ : 1;
      if (count == 0) continue;
      double best = kNoBound;
      const Item* chosen = nullptr;
      for (const Item& item : items_[which]) {
        if (item.us > limit) break;
        const double cost = item.us - x_ * item.blocks + y_ * item.devices;
        if (cost < best) best = cost, chosen = &item;
      }
      if (chosen == nullptr) return kNoBound;  // there is no such stage
      sum += count * best;
      blocks += count * chosen->blocks, devices += count * chosen->devices;
    }
    return sum;
  }

  std::array<std::vector<Item>, kStageClasses> items_;
  const double middle_;
  double x_, y_ = 0;  // kept from limit to limit
};

}  // namespace

double PairBounds::LeastUs(const InterStageProblem& p) {
  const auto [least, most] = std::minmax_element(p.counts.begin(), p.counts.end());
  const int32_t widest = std::min(*most, p.devices - (p.stages - 1) * *least);
  return Work(p) * p.layers * ((p.micro_batches - 1.0) / p.devices + 1.0 / widest);
}

bool PairBounds::NoneBeats(const InterStageProblem& p, double cutoff_us) {
  const double least_us = Work(p) * p.layers / p.devices;  // of the longest t
  if (p.stages < 2 || !(cutoff_us < kNoBound) || !(least_us > 0)) return false;
  std::array<std::vector<Item>, kStageClasses> items;
  const int32_t most = std::min(p.most_layers, p.layers - (p.stages - 1) * p.fewest_layers);
  for (int which = 0; which < kStageClasses; ++which) {
    for (int32_t count : p.counts) {
      for (int32_t l = p.fewest_layers; l <= most; ++l) {
        double us = kNoBound;
        for (const FrontierPoint& point :
             frontiers_.Of({l, which == kFirst, which == kLast, count, p.micro_batches, 1})) {
          us = std::min(us, point.cost.stable_us);
        }
        if (us < kNoBound)
          items[which].push_back({us, static_cast<double>(l) / p.layers, static_cast<double>(count) / p.devices});
      }
    }
  }
  Prices prices(std::move(items), p.stages, least_us * p.stages);
  for (double low = least_us * (1 - 1e-9); p.micro_batches * low < cutoff_us;) {
    const double high = low * (1 + kWidth);
    if (!prices.Reach(high, cutoff_us - (p.micro_batches - 1) * low)) return false;
    low = high;
  }
  return true;
}

double PairBounds::Work(const InterStageProblem& p) {
  double work = kNoBound;
  for (int32_t count : p.counts) work = std::min(work, Work(p.layers, p.micro_batches, count));
  return work;
}

double PairBounds::Work(int32_t blocks, int32_t micro_batches, int32_t devices) {
  auto [at, added] = work_.try_emplace({micro_batches, devices}, kNoBound);
  for (int ends = 0; ends < 4 && added; ++ends) {
    for (int32_t l = 1; l <= blocks; ++l) {
      for (const FrontierPoint& point :
           frontiers_.Of({l, (ends & 1) != 0, (ends & 2) != 0, devices, micro_batches, 1})) {
        at->second = std::min(at->second, point.cost.stable_us * devices / l);
      }
    }
  }
  return at->second;
}

}  // namespace interlace::plan
