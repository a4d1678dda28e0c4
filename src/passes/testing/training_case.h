// training_case.h — random programs with what a step of them is: ranks, accumulation, clipping, and the passes up to
// the optimizer's. For tests only.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/pass_test_support.h"

namespace interlace {

// The furthest that two runs lie apart, relative to the largest number of the two.
inline double Apart(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double most = 1e-300, apart = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return std::isfinite(a[i]) || std::isfinite(b[i]) ? INFINITY : 0;
    most = std::max({most, std::fabs(a[i]), std::fabs(b[i])});
    apart = std::max(apart, std::fabs(a[i] - b[i]));
  }
  return apart / std::max(most, 1e-6);
}

struct TrainingCase {
  testing::RandomProgramOptions shape;
  testing::InterpretOptions run;
  std::string start;  // canonicalize,shard(...),accumulate(...),update(...)

  Program Captured() const { return testing::RandomProgram(shape); }
  // What textbook training of the captured program gives.
  testing::RunResult Expected() const {
    Result<testing::RunResult> result = testing::Interpret(Captured(), run);
    EXPECT_TRUE(result.ok()) << result.error().ToString();
    return std::move(*result);
  }
};

// One to three ranks; every fourth accumulates over three micro-batches, `clips` of five clip. `random` gives the
// number of layers.
inline TrainingCase MakeTrainingCase(uint64_t seed, uint64_t clips, std::mt19937_64& random) {
  TrainingCase out;
  out.shape.seed = seed + 900;
  out.shape.layers = 2 + static_cast<int>(random() % 5);
  out.shape.max_width = 24;
  out.run.steps = 3;
  out.run.ranks = 1 + static_cast<int64_t>(seed % 3);
  out.run.accumulation = seed % 4 == 3 ? 3 : 1;
  const bool clip = seed % 5 >= 5 - clips;
  if (clip) out.run.clip = 0.5;
  out.start = "canonicalize,shard(ranks=" + std::to_string(out.run.ranks) +
              "),accumulate(steps=" + std::to_string(out.run.accumulation) +
              "),update(clip=" + (clip ? "0.5" : "none") + ")";
  return out;
}

}  // namespace interlace
