// arena_replay.h — an independent referee of a memory plan (ir/memory_plan.h): runs the steps of a program over the
// planned addresses without computing. Whatever an op writes (results, scratch, what the other ranks send) is marked in
// a model of the arena; whatever is read must still have the mark that it was given. It knows ops and addresses,
// nothing of lives.
#pragma once

#include "ir/memory_plan.h"

namespace interlace::testing {

// Of a program that moves no storages. Error: the op that finds other bytes than were written, or a value that is not
// where the plan has it.
Status ReplayPlan(const Program& program, const MemoryPlan& plan, int steps = 3);

}  // namespace interlace::testing
