// golden.h — compares text with a file under tests/golden; INTERLACE_UPDATE_GOLDEN=1 rewrites the file instead. Tests
// only.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace interlace::testing {

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// `name` is relative to tests/golden.
inline void ExpectGolden(const std::string& name, const std::string& text) {
  std::string path = std::string(INTERLACE_SOURCE_DIR) + "/tests/golden/" + name;
  if (const char* update = std::getenv("INTERLACE_UPDATE_GOLDEN"); update != nullptr && *update == '1') {
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  EXPECT_EQ(ReadFile(path), text) << path << " (INTERLACE_UPDATE_GOLDEN=1 rewrites it)";
}

}  // namespace interlace::testing
