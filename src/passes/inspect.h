// inspect.h — what a program holds and costs, counted without running it: for `interlace inspect` and the trainer's
// summary.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace interlace {

class Program;

struct PhaseSummary {
  std::string name;
  int64_t repeats = 1;  // runs of the phase in a step
  int64_t ops = 0;
  std::map<std::string, int64_t> kinds;  // compute, view, gather, reduce, release, update, norm, ...
  std::optional<int64_t> peak_bytes;     // live bytes without what is persistent; nothing while a size is symbolic
};

struct ProgramSummary {
  std::string level;
  int64_t ops = 0;
  std::vector<PhaseSummary> phases;
  int64_t params = 0, param_elements = 0, trainable_elements = 0;
  int64_t units = 0;
  std::string largest_unit;  // "u3", or empty
  std::vector<std::string> largest_unit_params;
  int64_t largest_unit_bytes = 0;  // of the full buffer
  // Of one step and one rank.
  int64_t gathered_bytes = 0;  // received: (n - 1) shards a gather, or parts, of replicas
  int64_t reduced_bytes = 0;   // received: (n - 1) shards a reduce-scatter
  // Gradient bytes of one step: written by the op that makes them, copied there, added to what was there.
  int64_t placed_gradient_bytes = 0, copied_gradient_bytes = 0, added_gradient_bytes = 0;
  // What a rank holds between steps, and gradients and the like that live within one.
  int64_t persistent_bytes = 0, step_bytes = 0;
  std::optional<int64_t> activation_peak_bytes;  // the largest peak of a micro-batch phase
  std::vector<std::string> not_cut;  // of tensor parallelism: what every rank has or computes whole, and why
};

ProgramSummary Summarize(const Program& program);
// The summary as lines for people.
std::string SummaryText(const ProgramSummary& summary);
// "12.3 MiB"
std::string BytesText(int64_t bytes);

}  // namespace interlace
