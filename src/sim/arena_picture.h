// arena_picture.h — what lies where in the arena of a step, and when: the blocks of its memory plan (ir/memory_plan.h)
// at the times of a simulated rank's ops.
//
//   address
//   ▲  ┌──u1 gathered──┐  ┌─%40─┐    a piece: one block from the op that makes it to the last that touches it;
//   │  ┌─────%12───────┴──┐          what phases hand on is one piece, and so is what begins before the step
//   └──┴──────────────────┴─────► time
//
// Kernels' workspaces are in it as far as the profile knows them. Only CPUs have an arena, and only for
// programs that move no storages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/lowered.h"
#include "sim/memory_kinds.h"
#include "trace/timeline.h"

namespace interlace {

struct ArenaPiece {
  int64_t offset = 0, bytes = 0;
  int64_t start_ps = 0, end_ps = 0;
  int64_t first = 0,
          last = 0;  // slots of the step in program order: a piece ends behind what begins in the slots before
  MemoryKind kind = MemoryKind::kTemporaries;
  OpId op = kNone;   // that makes it, or that it is inside of; kNone: handed on, a state
  std::string name;  // "%12 aten.mm", "u3.exp_avg", "inside aten.mm"
  std::string module;
};

struct ArenaPicture {
  int64_t top_bytes = 0;   // the memory that the arena has
  int64_t live_bytes = 0;  // the largest sum of what lives at once
  double fragmentation = 0;
  std::vector<ArenaPiece> pieces;  // by their first slot, then by block
};

// Error: the program has no plan (ir/memory_plan.h), or moves storages and so has no arena.
Result<ArenaPicture> DrawArena(const Lowered& program, const std::vector<int64_t>& start_ps,
                               const std::vector<int64_t>& end_ps);

// Beginnings and ends of what is persistent, and of the pieces at their addresses.
Result<std::vector<MemoryEvent>> ArenaEvents(const Lowered& program, const ArenaPicture& picture, int32_t rank);

}  // namespace interlace
