// files.h — a text file read, and one written whole.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace interlace {

// Error: "cannot read PATH: why".
Result<std::string> ReadFile(const std::string& path);
// Under another name first, so that a reader never sees half of it. Error: "cannot write PATH: why".
Status WriteFile(const std::string& path, std::string_view text);

}  // namespace interlace
