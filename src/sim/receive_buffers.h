// receive_buffers.h — memory that reductions on CPUs keep: what the other ranks send arrives in buffers of the runtime
// (src/runtime/comm_socket.cc), which are taken when a reduction starts, given back when it is waited for, and never freed.
#pragma once

#include <cstdint>

#include "sim/lowered.h"

namespace interlace {

// Bytes of all of them after one step, by the runtime's own rule: the smallest free one that fits, else the largest free one is
// replaced. 0 without collectives.
int64_t ReceiveBufferBytes(const Lowered& program);

}  // namespace interlace
