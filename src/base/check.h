// check.h — CHECK(condition) << "context": a bug of ours; prints and aborts.
#pragma once

#include <cstdlib>
#include <iostream>
#include <sstream>

namespace interlace::internal {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition) {
    out_ << file << ":" << line << ": check failed: " << condition << " ";
  }
  [[noreturn]] ~CheckFailure() {
    std::cerr << out_.str() << std::endl;
    std::abort();
  }
  std::ostream& stream() { return out_; }

 private:
  std::ostringstream out_;
};

}  // namespace interlace::internal

#define CHECK(condition)      \
  if (condition) [[likely]] { \
  } else                      \
    ::interlace::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()
