// decisions.h — what a search decides about a program, as data: it is searched over and compared in this form, carried
// out as passes, and printed as their text only where a program file or a person reads it.
//
//   captured   {.recompute = kBlocks, .blocks = {"layers.0"}, .width = 2}    recompute(mode=full,blocks=layers.0),...
//   schedule   {.keep = {0}, .forward = {{{1, 2}, 3}}}                       schedule(keep=u0,forward=u1+u2:3)
//   overlap_update, next_step = 0.25, offload(limit=...)                     reposition_update(share=0.250000),...
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "passes/pipeline.h"
#include "passes/schedule.h"

namespace interlace {

// On the captured program, before the strategy.
struct CapturedDecisions {
  enum class Recompute : uint8_t { kNothing, kSelective, kBlocks };
  Recompute recompute = Recompute::kNothing;
  std::vector<std::string> blocks;  // those of which something runs again; kSelective: none for all
  size_t all_blocks = 0;            // of so many; kBlocks
  int64_t width = 1;                // micro-batches side by side
  int64_t parts = 1;                // of a micro-batch, side by side
  bool regather = false;            // rows that tensor parallelism gathered are gathered again for the backward part
  bool reduce_last = false;         // gradients are reduced once a step, where the program says after each micro-batch
  friend bool operator==(const CapturedDecisions&, const CapturedDecisions&) = default;
};

struct Decisions {
  CapturedDecisions captured;
  std::optional<Schedule> schedule;
  std::vector<PassCall> heuristic;  // without a schedule: the passes that move transfers; none: the plain program
  bool overlap_update = false;
  double next_step = 0;             // share of the parameters whose updates are left to the next step
  int64_t ahead = 1;                // and by how many first uses they come before they are needed there
  std::optional<PassCall> offload;  // how storages leave memory; updates overlap then
  friend bool operator==(const Decisions&, const Decisions&) = default;
};

// The passes on the captured program, and those on the sharded one.
std::vector<PassCall> CallsOf(const CapturedDecisions& decisions);
std::vector<PassCall> CallsOf(const Decisions& decisions);
// What they are beside `origin` (a heuristic's name, "search"): "search, offload, selective recomputation".
std::string NameOf(const std::string& origin, const Decisions& decisions);

}  // namespace interlace
