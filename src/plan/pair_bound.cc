#include "plan/pair_bound.h"

#include <algorithm>
#include <limits>

namespace interlace::plan {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();
constexpr int kSteps = 24;       // of prices for one limit
constexpr double kWidth = 0.01;  // of an interval of limits

}  // namespace

PairBound::PairBound(int32_t micro_batches, int32_t stages) : micro_batches_(micro_batches), middle_(stages - 2) {}

double PairBound::Priced(double limit, double x, double y, double& blocks, double& devices) const {
  double sum = x - y;
  blocks = devices = 0;
  for (int which = 0; which < kClasses; ++which) {
    const double count = which == kMiddle ? middle_ : 1;
    if (count == 0) continue;
    double best = kNone;
    const Item* chosen = nullptr;
    for (const Item& item : items_[which]) {
      if (item.us > limit) break;
      const double cost = item.us - x * item.blocks + y * item.devices;
      if (cost < best) best = cost, chosen = &item;
    }
    if (chosen == nullptr) return kNone;  // no such stage at all
    sum += count * best;
    blocks += count * chosen->blocks, devices += count * chosen->devices;
  }
  return sum;
}

bool PairBound::Reaches(double limit, double wanted) {
  double blocks = 0, devices = 0;
  for (int step = 0; step < kSteps; ++step) {
    const double reached = Priced(limit, x_, y_, blocks, devices);
    if (reached >= wanted) return true;
    const double up_x = 1 - blocks, up_y = devices - 1;
    const double length = up_x * up_x + (y_ > 0 || up_y > 0 ? up_y * up_y : 0);
    if (length < 1e-12) return false;  // these stages are a plan
    const double stride = (wanted - reached) / length * 1.2;
    x_ = std::max(x_ + stride * up_x, 0.0), y_ = std::max(y_ + stride * up_y, 0.0);
  }
  return false;
}

bool PairBound::NoneBeats(double cutoff_us, double least_us) {
  for (std::vector<Item>& items : items_) {
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.us < b.us; });
  }
  if (!(least_us > 0)) return false;
  x_ = least_us * (middle_ + 2), y_ = 0;
  for (double low = least_us * (1 - 1e-9); micro_batches_ * low < cutoff_us;) {
    const double high = low * (1 + kWidth);
    if (!Reaches(high, cutoff_us - (micro_batches_ - 1) * low)) return false;
    low = high;
  }
  return true;
}

}  // namespace interlace::plan
