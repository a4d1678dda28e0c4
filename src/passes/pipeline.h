// pipeline.h — the text of a pipeline, `canonicalize,shard(axis=dp,ranks=2),update(clip=1.0)`, as a list of passes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;
struct PassInfo;

struct PassCall {
  const PassInfo* pass = nullptr;
  PassOptions options;
  friend bool operator==(const PassCall&, const PassCall&) = default;
};

// Of a program: what was captured, and the passes that have made it of that.
struct Origin {
  const Program& captured;
  std::vector<PassCall> since;
};

// A pass of the table, by code.
PassCall MakeCall(std::string_view name, PassOptions options = {});

// Empty text is the empty pipeline. Error: syntax (with the column), unknown pass or option (did you mean), an option
// twice or with a wrong value, a required option that is missing.
Result<std::vector<PassCall>> ParsePipeline(std::string_view text);
std::string PrintPass(const PassCall& call);
std::string PrintPipeline(const std::vector<PassCall>& calls, size_t from = 0);

}  // namespace interlace
