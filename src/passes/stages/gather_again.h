// gather_again.h — rows that products over several ranks gather, gathered a second time for the gradients of weights: a
// rank then keeps its own part of them until these are made, and not all.
//   before: %g = all_gather(%x)   mm(%g, %w) ..              ..   mm(%g, %d) {bwd}   grad
//   after:  %g = all_gather(%x)   mm(%g, %w) ..   %h = all_gather(%x) {bwd}   mm(%h, %d) {bwd}   grad
#pragma once

#include <vector>

#include "ir/program.h"
#include "passes/stages/messages.h"

namespace interlace::stages {

// In the micro-batch phase of a captured program, whose transfers are apart (coalesced.h) and of whose ops a layout has
// said when they run. How many it has gathered again; changes no bit.
int64_t GatherAgain(Program& program, Phase& phase, const std::vector<Turn>& turns);
// Of what a phase has from its begin: each gather starts where the one before it is waited for, and travels beside what
// is made of that.
void StartAhead(const Program& program, Phase& phase);

}  // namespace interlace::stages
