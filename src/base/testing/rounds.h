// rounds.h — how many random cases a test draws. For tests only.
//
// `make core-test` takes a sample; INTERLACE_SOAK=1, as `make soak` sets it, draws forty times as many.
#pragma once

#include <cstdlib>

namespace interlace {

inline int Rounds(int sample) {
  return std::getenv("INTERLACE_SOAK") != nullptr ? 40 * sample : sample;
}

}  // namespace interlace
