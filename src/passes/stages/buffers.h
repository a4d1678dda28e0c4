// buffers.h — buffers that the model changes (running statistics, counters) have their next values as soon as these are
// made, and not at the end of a micro-batch: in a pipeline the forward part of the next one comes before the backward
// part of this one.
//   before: %y = sub(%x, %b)   %n = mul(%b, 0.9) ..    %d = mul(%g, %b) {bwd} ..    assign(%b, %n)
//   after:  %c = clone(%b)  %y = sub(%x, %b)   %n = mul(%b, 0.9)   assign(%b, %n) ..    %d = mul(%g, %c) {bwd}
#pragma once

#include "ir/program.h"

namespace interlace::stages {

// In the micro-batch phase of a captured program. What the backward part reads of such a buffer, or of one that the
// forward part writes, is a copy of what it was. One whose next value is of the backward part stays as it is.
void ChangeBuffersForward(Program& program, Phase& phase);

}  // namespace interlace::stages
