// front.h — what is left of all that was tried: no other candidate is both faster and smaller. A memory limit picks
// from it the smallest within 1 % of the fastest that fits, so a higher limit never gives a slower step.
//
//   memory  ^ \.                     the limit ......|
//           |   `-.__                 picked: a      v
//           |       a `----b---- time          b is faster by less than 1 %
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "passes/trials.h"

namespace interlace {

// By rising memory and falling time.
std::vector<Candidate> FrontOf(const std::deque<Candidate>& tried);
// The smallest candidate of the front within `slack` of the fastest that fits; the front's size when none fits.
size_t PickFromFront(const std::vector<Candidate>& front, int64_t limit, double slack);

struct Picked {
  std::vector<Candidate> front;
  size_t chosen = 0;
};
// A limit is held to what a program takes with all in its place: that is more than what lives at once and dearer to
// know, so only what would be chosen is placed, until what is chosen fits. When nothing does, the first of the front is
// the least that any of those tried takes. `make`: the program of a candidate.
Result<Picked> Choose(std::deque<Candidate>& tried, const PassCosts& costs, double slack,
                      const std::function<Result<Program>(const Candidate&)>& make);

}  // namespace interlace
