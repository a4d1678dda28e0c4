// stage_tables.h — what a rank of a pipeline declares, once its phases are written (stage_writer.h).
#pragma once

#include "base/result.h"
#include "passes/stages/flow.h"
#include "passes/stages/messages.h"

namespace interlace::stages {

// Parameters of other ranks go, and constants that are read there only. Buffers are few, and all ranks keep them.
// Error: a rank with nothing to train.
Status DropForeign(Program& program, const Flow& flow, const Layout& layout, int32_t rank);

}  // namespace interlace::stages
