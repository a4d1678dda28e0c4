#include <algorithm>
#include <bit>

#include "cost/cluster.h"

namespace interlace {
namespace {

// Sets of classes in the order of the algorithm: four, three, two members; lexicographic by member.
constexpr int kSets[] = {0b1111, 0b0111, 0b1011, 0b1101, 0b1110, 0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100};

struct Fitted {
  std::string_view gpu;
  int64_t per_node, nodes;
  std::array<double, 28> factors;
};

// Printed by `python bench/fit_interference.py --emit` from mist_concurrency_{l4,a100}.csv (github.com/Dazz993/Mist,
// Apache-2.0); the same script without --emit prints the cross-validated errors.
constexpr Fitted kFitted[] = {
#include "cost/interference_table.inc"
};

}  // namespace

Interference Interference::FromFactors(const std::array<double, 28>& factors) {
  Interference out;
  size_t next = 0;
  for (int set : kSets) {
    for (int member = 0; member < kClasses; ++member) {
      if ((set >> member & 1) != 0) out.factor[set][member] = factors[next++];
    }
  }
  return out;
}

void Interference::Measured(const std::array<std::array<double, kClasses>, kClasses>& slower) {
  for (int set : kSets) {
    for (int member = 0; member < kClasses; ++member) {
      if ((set >> member & 1) == 0) continue;
      double sum = 1;
      bool all = true;
      for (int other = 0; other < kClasses; ++other) {
        if (other == member || (set >> other & 1) == 0) continue;
        const bool known = slower[member][other] > 0;
        sum += known ? slower[member][other] - 1 : 0;
        all = all && known;
      }
      factor[set][member] = all ? sum : std::max(factor[set][member], sum);
    }
  }
}

double Interference::Together(std::array<double, kClasses> alone) const {
  double total = 0;
  while (true) {
    int set = 0;
    for (int i = 0; i < kClasses; ++i) set |= alone[i] > 0 ? 1 << i : 0;
    if ((set & (set - 1)) == 0) return total + alone[0] + alone[1] + alone[2] + alone[3];  // one at most is left
    double shortest = 0;
    int which = -1;
    for (int i = 0; i < kClasses; ++i) {
      if ((set >> i & 1) == 0) continue;
      double scaled = alone[i] * factor[set][i];
      if (which < 0 || scaled < shortest) shortest = scaled, which = i;
    }
    total += shortest;
    for (int i = 0; i < kClasses; ++i) {
      if ((set >> i & 1) == 0) continue;
      double left = alone[i] * factor[set][i] - shortest;
      alone[i] = i == which || left <= 0 ? 0 : left / factor[set][i];
    }
  }
}

const Interference* FindInterference(std::string_view gpu, int64_t per_node, int64_t nodes) {
  static const auto& built = *[] {
    auto* tables = new std::array<Interference, std::size(kFitted)>();
    for (size_t i = 0; i < std::size(kFitted); ++i) (*tables)[i] = Interference::FromFactors(kFitted[i].factors);
    return tables;
  }();
  // Nearest in node count first, for links between nodes behave unlike those within; then in GPUs per node.
  auto distance = [](int64_t a, int64_t b) {
    int x = std::bit_width(static_cast<uint64_t>(a)), y = std::bit_width(static_cast<uint64_t>(b));
    return x > y ? x - y : y - x;
  };
  const Interference* best = nullptr;
  int best_score = 0;
  for (size_t i = 0; i < std::size(kFitted); ++i) {
    const Fitted& f = kFitted[i];
    if (f.gpu != gpu) continue;
    int score = 100 * ((f.nodes > 1) != (nodes > 1)) + 10 * distance(f.nodes, nodes) + distance(f.per_node, per_node);
    if (best == nullptr || score < best_score) best = &built[i], best_score = score;
  }
  return best;
}

const Interference* InterferenceOn(const ClusterSpec& cluster, int64_t per_node, int64_t nodes) {
  const bool as_one = cluster.stack != "kernels" && cluster.inter.gb_per_s >= 0.5 * cluster.intra.gb_per_s;
  return FindInterference(cluster.interference, per_node, as_one ? 1 : nodes);
}

}  // namespace interlace
