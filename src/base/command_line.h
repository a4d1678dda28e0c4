// command_line.h — what our commands share: `--name=value`, `--name value`, switches, one input that is a file or "-".
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"

namespace interlace {

// A switch, a text, or a text that may be given several times.
using Flag = std::pair<std::string_view, std::variant<bool*, std::string*, std::vector<std::string>*>>;

// Fills what the flags point at, and `input` with what is no option. Error: an unknown option (did you mean), a value
// that lacks or is too much, a second input.
Status ReadFlags(const std::vector<std::string>& args, const std::vector<Flag>& flags, std::string& input);
// A file, or standard input for "-".
Result<std::string> ReadInput(const std::string& path);

}  // namespace interlace
