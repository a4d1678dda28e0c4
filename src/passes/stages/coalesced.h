// coalesced.h — a transfer of many values belongs to no single stage (the sums of all norms' gradients, one call at the
// end of the backward part): before a program is cut each value gets a transfer of its own, and of those that stand
// side by side in a stage one is made again.
//
//   %a, %b = all_reduce.start(%x, %y)   ->   %a = all_reduce.start(%x)   %b = all_reduce.start(%y)   ->  and back
#pragma once

#include "ir/program.h"

namespace interlace::stages {

void TakeApart(Program& program, Phase& phase);
void PutTogether(Program& program, Phase& phase);

}  // namespace interlace::stages
