// suggest.h — "did you mean": the known name nearest to a wrong one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace interlace {

// Number of single-character edits (insert, delete, replace, swap of neighbours) between two words.
int EditDistance(std::string_view a, std::string_view b);
// ", did you mean 'x'?" for the nearest of `known` (a third of the letters may differ), or "" when none is near.
std::string DidYouMean(std::string_view word, const std::vector<std::string_view>& known);

}  // namespace interlace
