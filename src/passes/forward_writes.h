// forward_writes.h — a part of canonicalize; the file of that name says what it does.
#pragma once

#include "ir/program.h"

namespace interlace {

// Of a captured program's canonical phase; then views may be repeated, and copies dead. Whether anything changed.
bool ForwardWrites(Program& program, Phase& phase);

}  // namespace interlace
