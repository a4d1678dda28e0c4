// clock.h — nanoseconds of a clock of the system.
#pragma once

#include <time.h>

#include <cstdint>

namespace interlace {

inline int64_t NanosOf(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Of the steady clock, which all ranks of a host share.
inline int64_t NanosNow() {
  return NanosOf(CLOCK_MONOTONIC);
}

}  // namespace interlace
