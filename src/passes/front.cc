#include "passes/front.h"

#include <limits>

#include "base/sort.h"

namespace interlace {

std::vector<Candidate> FrontOf(const std::deque<Candidate>& tried) {
  std::vector<const Candidate*> all;
  for (const Candidate& c : tried) all.push_back(&c);
  StableSort(all, [](const Candidate* a, const Candidate* b) {
    return std::pair(a->bytes, a->time_ps) < std::pair(b->bytes, b->time_ps);
  });
  std::vector<Candidate> front;
  for (const Candidate* c : all) {
    if (front.empty() || c->time_ps < front.back().time_ps) front.push_back(*c);
  }
  return front;
}

size_t PickFromFront(const std::vector<Candidate>& front, int64_t limit, double slack) {
  int64_t best = std::numeric_limits<int64_t>::max();
  for (const Candidate& c : front) {
    if (c.bytes <= limit) best = std::min(best, c.time_ps);
  }
  for (size_t i = 0; i < front.size(); ++i) {
    if (front[i].bytes > limit) break;
    if (static_cast<double>(front[i].time_ps) <= static_cast<double>(best) * (1 + slack)) return i;
  }
  return front.size();
}

Result<Picked> Choose(std::deque<Candidate>& tried, const PassCosts& costs, double slack,
                      const std::function<Result<Program>(const Candidate&)>& make) {
  // Each round places one that is not yet, so that ends; bytes only grow, so what lives is a bound for what is left
  // out.
  for (;;) {
    Picked out{FrontOf(tried), 0};
    out.chosen = PickFromFront(out.front, costs.limit, slack);
    if (costs.limit == std::numeric_limits<int64_t>::max()) return out;
    const Candidate& one = out.front[out.chosen < out.front.size() ? out.chosen : 0];
    if (one.placed) return out;
    INTERLACE_ASSIGN(const Program program, make(one));
    INTERLACE_ASSIGN(const int64_t bytes, PlacedBytesOf(program, costs, one.bytes));
    for (Candidate& c : tried) {
      if (c.decisions != one.decisions) continue;
      c.bytes = bytes;
      c.placed = true;
    }
  }
}

}  // namespace interlace
