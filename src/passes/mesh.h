// mesh.h — declares the mesh: its axes and their sizes, the last fastest.
//   before: interlace 1 captured
//   after:  interlace 1 captured      mesh replica 2      mesh dp 2
// Runs before shard, replicate and zero1, which then take the sizes of their axes from it. Errors: a program that has a
// mesh already, a wrong axis (also one that does not lie beside what it is named with), two of one name.
#pragma once

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

// Options: axes=NAME:SIZE+NAME:SIZE...
Result<bool> DeclareMesh(Program& program, const PassOptions& options);

}  // namespace interlace
