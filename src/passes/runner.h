// runner.h — runs a pipeline: times every pass, verifies what changed, dumps texts, leaves a repro file when a pass
// fails.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "passes/pipeline.h"

namespace interlace {

class Program;

struct RunOptions {
  bool verify = true;           // the input, and the program after every pass that changed it
  std::string dump_dir = {};    // 00-input.il, 01-canonicalize.il, ... are written here when not empty
  std::string repro_file = {};  // where to write the repro; empty: dump_dir/repro.il, or nowhere without a dump_dir
  bool uses_up = false;         // a program that nobody needs when a pass fails: no copy of it is made
};

struct PassReport {
  std::string pass;  // with its options
  double seconds = 0;
  bool changed = false;
  int64_t ops = 0;  // in all phases, afterwards
};

// Runs the passes on `program`. Error: the pass by name and what it says; the program is then as it was before the
// whole pipeline (unless it may be used up), and the repro file holds the text before the failing pass under the
// command that runs it again.
Result<std::vector<PassReport>> RunPasses(Program& program, const std::vector<PassCall>& calls,
                                          const RunOptions& options = {});

// Passes on a program that nobody needs when one fails, without the verifier: for many tries.
Status RunUnverified(Program& program, const std::vector<PassCall>& calls);

}  // namespace interlace
