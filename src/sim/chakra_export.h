// chakra_export.h — a simulated step, or one that ran (measured.h), as Chakra execution traces (trace/chakra.h), one
// file a rank.
//
// Every op that takes time or moves bytes is a node; views, releases and waits are not. A wait becomes a control
// dependency of the next compute node on the transfer; a transfer depends on the compute op before it, which issued it,
// and on the transfer before it on its lane. Data dependencies follow storages, over views and placed results.
#pragma once

#include <string>

#include "sim/simulate.h"

namespace interlace {

// `rank` is one of the simulated ranks; where equal ranks were folded into one, its file is that of each.
std::string SimulationChakra(const Simulation& simulation, int32_t rank);

}  // namespace interlace
