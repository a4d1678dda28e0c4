// print_profile.h — a profile as text, sorted by key, for tests and fuzzing; ParseProfile reads it back. The files
// themselves are written where the times are measured (python/interlace/cost).
#pragma once

#include <string>

#include "cost/profile_table.h"

namespace interlace {

std::string PrintProfile(const ProfileTable& table);

}  // namespace interlace
