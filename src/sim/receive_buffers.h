// receive_buffers.h — memory of reductions on CPUs: what the other ranks send arrives in a buffer in the step's arena,
// which lives from the start of the reduction until it is waited for (ir/memory_plan.h).
#pragma once

#include <cstdint>
#include <vector>

#include "sim/lowered.h"

namespace interlace {

// By distinct phase and place of the op: bytes of the buffers that live while it runs; empty without such reductions.
std::vector<std::vector<int64_t>> ReceiveBytesAtOps(const Lowered& program);

}  // namespace interlace
