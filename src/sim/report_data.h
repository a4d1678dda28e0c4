// report_data.h — what the report page shows beyond SimulationJson: when each phase runs, memory by kind over time,
// what fills the peak, the critical path in pieces. All of it is of the rank that ends last.
//
//   {"rank": 0, "phases": [{"name", "start_us", "end_us"}],
//    "memory": {"kinds": [...], "time_us": [...], "bytes": [[by kind], ...], "peak_us": , "at_peak": [{"kind",
//    "module", ...}]}, "path": [{"start_us", "end_us", "lane"}],
//    "arena": null on accelerators, or {"top_bytes", "reserved_bytes", "live_bytes", "fragmentation",
//      "pieces": [[offset, bytes, start_us, end_us, kind, name, module], ...],
//      "left_out": how many more there are, "names": [...]}}
// Kinds are places in memory.kinds, name and module places in names.
#pragma once

#include <string>

#include "sim/simulate.h"

namespace interlace {

Result<std::string> ReportData(const Simulation& simulation);

}  // namespace interlace
