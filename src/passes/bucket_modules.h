// bucket_modules.h — which listed module owns each unit.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

// The bucket of every unit by id, -1 for none; buckets are numbered as their first unit. `modules` is "a+b.*"
// (bucket.h). Error: an entry that owns nothing (did you mean), entries that overlap, a unit with parameters of two
// buckets.
Result<std::vector<int32_t>> BucketsOfModules(const Program& program, const std::string& modules);

}  // namespace interlace
