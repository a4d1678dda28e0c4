// stage_writer.h — a captured program becomes what one rank of a pipeline runs of it: a phase for each place where a
// micro-batch stops on the rank (messages.h), with what comes in, what is made, and what is sent or kept for later
// ones.
//
// Storages that several phases need are saved by one and loaded by the next; views are made anew where they are used. A
// received storage that is no plain block of memory comes flat, and is seen as what it was.
#pragma once

#include <string>

#include "base/result.h"
#include "passes/stages/exchange.h"
#include "passes/stages/flow.h"
#include "passes/stages/messages.h"

namespace interlace::stages {

// `rank`: along `axis`; `unlike`: nullptr where stages have as many ranks. The program is that
// which `flow` and `layout` are of. Error: a storage that cannot be sent or would be needed too early, a rank with
// nothing to train.
Status WriteStage(Program& program, const Flow& flow, const Layout& layout, const Unlike* unlike, std::string axis,
                  int32_t rank);

}  // namespace interlace::stages
