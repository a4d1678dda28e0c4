// report_data.h — what the report page shows beyond SimulationJson: when each phase runs, memory by kind over time,
// what fills the peak, the critical path in pieces. Of the rank that ends last.
//
//   {"rank": 0, "phases": [{"name", "start_us", "end_us"}],
//    "memory": {"kinds": [...], "time_us": [...], "bytes": [[by kind], ...], "peak_us": , "at_peak": [{"kind",
//    "module", ...}]}, "path": [{"start_us", "end_us", "lane"}]}
#pragma once

#include <string>

#include "sim/simulate.h"

namespace interlace {

Result<std::string> ReportData(const Simulation& simulation);

}  // namespace interlace
