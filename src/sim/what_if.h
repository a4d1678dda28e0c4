// what_if.h — the same program on machines that are faster or slower in one respect.
//
// Factors multiply times: links = 0.5 is twice the bandwidth, latency = 0 is none, compute = 0.5 is twice as fast. They
// apply to the cost of every op, measured or estimated alike, and to what devices share (host bandwidth, launches).
#pragma once

#include "cost/cluster.h"
#include "cost/profile_table.h"
#include "sim/lowered.h"

namespace interlace {

struct WhatIf {
  double compute = 1;        // kernels
  double links = 1;          // transfer part of collectives
  double latency = 1;        // of collectives
  double copies = 1;         // host and file copies, latency and transfer
  double launches = 1;       // host time to launch an op
  bool interference = true;  // false: what runs together does not slow each other beyond sharing a link
  bool plain() const;
};

// Error: a factor that is negative or above 1000.
Status CheckWhatIf(const WhatIf& what_if);
// What devices share; before the cost model is made. `profile` loses its interference where that is switched off.
void ApplyToCluster(const WhatIf& what_if, ClusterSpec& cluster, ProfileTable* profile);
// The costs of ops; after Lower. Error: a time beyond 64 bits.
Status ApplyToCosts(const WhatIf& what_if, Lowered& lowered);

}  // namespace interlace
