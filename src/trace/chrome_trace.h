// chrome_trace.h — a timeline as the JSON that chrome://tracing, Perfetto and the tools for PyTorch's profiler (Kineto)
// read.
//
// Names are Kineto's, so that those tools see what they know: compute and collectives are cat "kernel" (collectives
// named ncclDevKernel_*, with "Collective name" and message sizes), copies "gpu_memcpy", waits "cuda_sync", launches
// "cuda_runtime"; a process is a rank, a thread is a stream, one per lane. Flows go from a transfer to the wait for it;
// counters hold memory. Exposed communication computed from this file is that of sim/simulator.h.
#pragma once

#include <string>

#include "base/result.h"
#include "trace/timeline.h"

namespace interlace {

// Stream number of a lane: 7 for compute, as PyTorch's default stream on Kineto's pages.
int StreamOf(TraceLane lane);

// One file. rank < 0: all ranks in it; else that rank alone, which is what tools for distributed runs read.
std::string WriteChromeTrace(const Timeline& timeline, int32_t rank = -1);

}  // namespace interlace
