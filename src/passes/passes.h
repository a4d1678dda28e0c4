// passes.h — the passes that are one function each. The file of that name begins with a program before and after;
// names, options and help are in pass_table.cc, and the order they go in is in standard_pipeline.cc and docs/passes.md.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// On a captured program.
Result<bool> Canonicalize(Program& program, const PassOptions& options = {});
Result<bool> DeclareMesh(Program& program, const PassOptions& options = {});
Result<bool> StackProducts(Program& program, const PassOptions& options = {});
Result<bool> Split(Program& program, const PassOptions& options = {});
Result<bool> Tensor(Program& program, const PassOptions& options = {});
Result<bool> Overlap(Program& program, const PassOptions& options = {});
Result<bool> Borders(Program& program, const PassOptions& options = {});
Result<bool> Pipeline(Program& program, const PassOptions& options = {});
Result<bool> Order(Program& program, const PassOptions& options = {});
Result<bool> Precision(Program& program, const PassOptions& options = {});
Result<bool> Fuse(Program& program, const PassOptions& options = {});
Result<bool> Rematerialize(Program& program, const PassOptions& options = {});
Result<bool> Recompute(Program& program, const PassOptions& options = {});
Result<bool> BreadthFirst(Program& program, const PassOptions& options = {});

// The strategy, and the step.
Result<bool> Shard(Program& program, const PassOptions& options = {});
Result<bool> Replicate(Program& program, const PassOptions& options = {});
Result<bool> Zero1(Program& program, const PassOptions& options = {});
Result<bool> Accumulate(Program& program, const PassOptions& options = {});
Result<bool> Update(Program& program, const PassOptions& options = {});
Result<bool> ForwardOnly(Program& program, const PassOptions& options = {});

// When transfers and updates go, after that.
Result<bool> Bucket(Program& program, const PassOptions& options = {});
Result<bool> Prefetch(Program& program, const PassOptions& options = {});
Result<bool> Unshard(Program& program, const PassOptions& options = {});
Result<bool> Reorder(Program& program, const PassOptions& options = {});
Result<bool> OverlapUpdate(Program& program, const PassOptions& options = {});
Result<bool> TransientGradients(Program& program, const PassOptions& options = {});
Result<bool> RepositionUpdate(Program& program, const PassOptions& options = {});

// To compare offload with.
Result<bool> OffloadDeepCompile(Program& program, const PassOptions& options = {});
Result<bool> OffloadSync(Program& program, const PassOptions& options = {});

}  // namespace interlace
