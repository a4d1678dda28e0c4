// search_space.h — what a search walks through: variants of the captured program (what runs again in the backward part,
// how many micro-batches run side by side), and schedules: a coarse grid of settings, and small moves from one
// schedule.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "passes/decisions.h"
#include "passes/predict.h"

namespace interlace {

class SearchSpace {
 public:
  // Each number is an index in a ladder of values (search_space.cc).
  struct Settings {
    int32_t forward_bucket = 0, backward_bucket = 0, reduce_bucket = 0;
    int32_t forward_ahead = 0, backward_ahead = 0;
    int32_t late = 0;
    int32_t keep = 0;        // share of the bytes that can be kept, in eighths
    int32_t keep_order = 0;  // 0: small units first, 1: those whose backward comes soonest after their forward
  };

  SearchSpace() = default;
  // Error: a symbolic size.
  static Result<SearchSpace> Of(const Program& base);

  Schedule Make(const Settings& settings) const;
  Settings AllKept() const;
  // Every unit is gathered by itself where it is needed, and every reduction waited for where it starts. The plain
  // program waits for a reduction when the next one starts, so two gradients live at a time.
  Settings LeastMemory() const { return {}; }
  // Where walks through the grid begin, and one step further in every direction.
  std::vector<Settings> Starts() const;
  std::vector<Settings> Neighbours(const Settings& settings) const;
  // Changes that may shorten what holds the compute lane longest, most promising first.
  std::vector<Schedule> Moves(const Schedule& schedule, const std::vector<Stall>& stalls) const;
  // Two neighbouring buckets in one, or a unit from the end of one to the other or alone: each, until `visit` says
  // false. A large program has thousands of them, of thousands of buckets each, so there is one at a time.
  static void Regroup(const Schedule& schedule, const std::function<bool(const Schedule&)>& visit);
  // "model.layers.0+model.layers.1": BlocksOf; empty when there are none.
  const std::string& blocks() const { return blocks_; }

 private:
  struct Item {
    UnitId unit = kNone;
    int64_t bytes = 0;
    std::string block;  // path of the outermost module list element it belongs to
  };
  std::vector<Schedule::Bucket> Buckets(const std::vector<Item>& items, int32_t size, int32_t ahead,
                                        const std::vector<char>& left_out) const;
  std::vector<UnitId> KeptUnits(const Settings& settings) const;
  void Move(const Schedule& from, const Stall& stall, std::vector<Schedule>& moves) const;
  Schedule KeepAlso(Schedule from, const std::vector<UnitId>& units) const;

  std::vector<Item> forward_, backward_, reduce_;  // in the order of need, of issue
  std::vector<UnitId> by_size_, by_distance_;      // units that can be kept
  std::vector<int64_t> bytes_;                     // by unit
  std::string blocks_;
};

// No, selective, and a quarter to full recomputation where `recompute`; where `breadth_first`, and gradients are
// reduced once a step, also 2 and 4 micro-batches side by side, which hides transfers behind all of them: without
// recomputation and, because it takes the memory of their activations, with what takes least time to give it back and
// with all of it. Where activations travel between ranks each of these without more micro-batches also with a
// micro-batch in two parts; and, for memory, without recomputation and with selective, rows gathered again for the
// backward part. Where `accumulate`, and gradients are reduced after each micro-batch, all of it once more with
// gradients that are reduced once a step. The first is the program as it is. `sharded`: what the strategy made of it; a
// stage of a pipeline recomputes what is of its own blocks, and gathers no rows again.
std::vector<CapturedDecisions> CapturedSpace(const Program& captured, const Program& sharded, bool recompute,
                                             bool breadth_first, bool accumulate = false);
// An eighth more and an eighth less recomputation than `chosen`, where that is a number of blocks and not among `all`.
std::vector<CapturedDecisions> NeighboursOf(const Program& captured, const Program& sharded,
                                            const CapturedDecisions& chosen, const std::vector<CapturedDecisions>& all);

// The elements of the model's outermost module lists (model.layers.0, ...), in the order of their parameters.
std::vector<std::string> BlocksOf(const Program& program);

}  // namespace interlace
