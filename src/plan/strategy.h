// strategy.h — how one pipeline stage is trained, and what that costs. Data only.
//
// A stage is `layers` transformer blocks, perhaps with the embedding before them and the head after them, on dp * tp
// devices. Times are microseconds, sizes bytes of one device unless said otherwise. Source of the words: Mist, sections
// 4 and 5.
#pragma once

#include <cstdint>
#include <vector>

namespace interlace::plan {

struct Strategy {
  int32_t layers = 1;  // transformer blocks
  bool embedding = false, head = false;
  int32_t micro_batch = 1;          // b: samples of one data-parallel rank in one micro-batch
  int32_t dp = 1, tp = 1;           // tensor parallel carries sequence parallel with it
  int32_t micro_batches = 1;        // G: accumulation steps
  int32_t in_flight = 1;            // p: micro-batches whose activations live at once (stages - index, at most G)
  int32_t zero = 0;                 // 0: replicated, 1: states sharded, 2: and gradients, 3: and weights
  int32_t full = 0, selective = 0;  // blocks recomputed wholly, and by their selective list; the others are kept
  float weights_out = 0, gradients_out = 0, states_out = 0, activations_out = 0;  // WO GO OO AO: share held on the host
};

struct StageCost {
  double stable_us = 0;  // t: one micro-batch in the steady state
  double extra_us = 0;   // d: what the first and the last micro-batch take beyond it
  int64_t peak_forward = 0, peak_backward = 0;
  int64_t host_bytes = 0;  // of one device's share
};

// The same times by pass: stable_us = forward_us + backward_us, extra_us = first_us + last_us.
struct PassTimes {
  double forward_us = 0, backward_us = 0;  // of a micro-batch in the steady state
  double first_us = 0;  // what the first forward takes beyond it: states loaded, updated and gathered
  double last_us = 0;   // what the last backward takes beyond it: gradients reduced and moved
};

// What decides which strategies a stage may choose among (Mist 5.3).
struct StageKey {
  int32_t layers = 1;
  bool embedding = false, head = false;
  int32_t devices = 1;        // inside one node, or whole nodes
  int32_t micro_batches = 1;  // G
  int32_t in_flight = 1;
  friend bool operator==(const StageKey&, const StageKey&) = default;
};

struct FrontierPoint {
  Strategy strategy;
  StageCost cost;
};
// Pareto set of (stable_us, extra_us), sorted by stable_us; every point fits the device's and the host's memory.
using Frontier = std::vector<FrontierPoint>;

}  // namespace interlace::plan
