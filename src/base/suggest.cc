#include "base/suggest.h"

#include <algorithm>

namespace interlace {

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string DidYouMean(std::string_view word, const std::vector<std::string_view>& known) {
  if (word.empty() || word.size() > 64) return "";
  int limit = std::max(1, static_cast<int>(word.size()) / 3);
  std::string_view best;
  for (std::string_view candidate : known) {
    if (candidate.size() > word.size() + limit) continue;
    int distance = EditDistance(word, candidate);
    if (distance <= limit) {
      limit = distance - 1;
      best = candidate;
    }
  }
  return best.empty() ? "" : ", did you mean '" + std::string(best) + "'?";
}

}  // namespace interlace
