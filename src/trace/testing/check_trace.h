// check_trace.h — independent readers of the trace files that we write: what the tools that read them rely on.
#pragma once

#include <string_view>

#include "base/result.h"

namespace interlace {

// A Chrome trace: valid JSON; every event has its fields; slices of one thread nest; every flow has one start
// and one end, in that order in time, each within a slice; counters are numbers, not negative, in order of time. Error:
// the first violation.
Status CheckChromeTrace(std::string_view json);

// A memory snapshot: valid JSON with the fields of trace/memory_snapshot.h; live blocks of a device never overlap;
// every end matches a beginning; the blocks of the segments are what lives at the end. Error: the first violation.
Status CheckMemorySnapshot(std::string_view json);

}  // namespace interlace
