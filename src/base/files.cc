#include "base/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

namespace interlace {

Result<std::string> ReadFile(const std::string& path) {
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) return MakeError("cannot read ", path, ": is a directory");
  std::ifstream in(path, std::ios::binary);
  if (!in) return MakeError("cannot read ", path, ": ", std::strerror(errno));
  std::ostringstream text;
  text << in.rdbuf();
  if (in.bad()) return MakeError("cannot read ", path, ": ", std::strerror(errno));
  return std::move(text).str();
}

Status WriteFile(const std::string& path, std::string_view text) {
  // Devices and pipes cannot be renamed onto.
  std::error_code code;
  bool plain = !std::filesystem::exists(path, code) || std::filesystem::is_regular_file(path, code);
  std::string target = plain ? path + ".part" : path;
  {
    std::ofstream out(target, std::ios::binary | std::ios::trunc);
    if (out) out.write(text.data(), static_cast<std::streamsize>(text.size()));
    if (out) out.flush();
    if (!out) {
      Error error = MakeError("cannot write ", path, ": ", std::strerror(errno));
      if (plain) std::remove(target.c_str());
      return error;
    }
  }
  if (plain) {
    std::filesystem::rename(target, path, code);
    if (code) return MakeError("cannot write ", path, ": ", code.message());
  }
  return Ok{};
}

}  // namespace interlace
