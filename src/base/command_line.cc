#include "base/command_line.h"

#include <iostream>
#include <iterator>

#include "base/files.h"
#include "base/suggest.h"

namespace interlace {

Status ReadFlags(const std::vector<std::string>& args, const std::vector<Flag>& flags, std::string& input) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "-" || !arg.starts_with("-")) {
      if (!input.empty()) return MakeError("one program at a time: ", input, " or ", arg, "?");
      input = arg;
      continue;
    }
    const size_t equals = arg.find('=');
    const std::string_view name = std::string_view(arg).substr(0, equals);
    const Flag* found = nullptr;
    std::vector<std::string_view> names;
    for (const Flag& flag : flags) {
      names.push_back(flag.first);
      if (flag.first == name) found = &flag;
    }
    if (found == nullptr) return MakeError("unknown option ", name, DidYouMean(name, names));
    if (bool* const* given = std::get_if<bool*>(&found->second)) {
      if (equals != std::string::npos) return MakeError(name, " takes no value");
      **given = true;
      continue;
    }
    if (equals == std::string::npos && i + 1 == args.size()) return MakeError(name, " needs a value");
    std::string value = equals == std::string::npos ? args[++i] : arg.substr(equals + 1);
    if (std::string* const* text = std::get_if<std::string*>(&found->second)) {
      **text = std::move(value);
    } else {
      std::get<std::vector<std::string>*>(found->second)->push_back(std::move(value));
    }
  }
  return Ok{};
}

Result<std::string> ReadInput(const std::string& path) {
  if (path != "-") return ReadFile(path);
  return std::string(std::istreambuf_iterator<char>(std::cin), {});
}

}  // namespace interlace
