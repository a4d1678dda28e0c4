// receive_buffers.h — memory of reductions on CPUs: what the other ranks send arrives in a buffer in the step's arena,
// which lives from the start of the reduction until it is waited for (ir/memory_plan.h). On devices that of the sums of
// which replicas get a part each.
#pragma once

#include <cstdint>
#include <vector>

#include "ir/program.h"

namespace interlace {

// By phase, of those of the program that are given, and place of the op: bytes of the buffers that live while it runs;
// empty without such reductions.
std::vector<std::vector<int64_t>> ReceiveBytesAtOps(const Program& program, const std::vector<const Phase*>& phases,
                                                    bool cpu);

}  // namespace interlace
