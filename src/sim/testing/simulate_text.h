// simulate_text.h — a prediction from texts alone, for tests and for fuzzing of the readers.
#pragma once

#include <string>
#include <string_view>

#include "sim/simulate.h"

namespace interlace {

// `cluster_text` is a file's text or a preset's name; `profile_text` may be "". `output` is "json", "summary", "trace"
// or "snapshot".
Result<std::string> SimulateText(std::string_view program_text, std::string_view cluster_text,
                                 std::string_view profile_text, std::string_view output,
                                 const SimulateOptions& options);

}  // namespace interlace
