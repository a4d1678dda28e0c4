// critical_path.h — what the step time is made of: a chain of ops and transfers, each begun when the one before it
// ended, from the end of the step back to its start; and the blame of each module for its part of that chain.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/engine.h"

namespace interlace {

struct PathPiece {
  enum class Kind : uint8_t { kCompute, kTransfer, kLaunch };  // kLaunch: the device waits for the host
  Kind kind = Kind::kCompute;
  int32_t rank = 0;
  OpId op = kNone;  // in the rank's program
  Lane lane = Lane::kCompute;
  int64_t start_ps = 0, end_ps = 0;
  int64_t slowed_ps = 0;  // beyond its time alone: sharing and interference
};

struct Blame {
  std::string module;  // path, "" for what belongs to none
  std::string lane;    // "compute" with its part ("compute fwd"), a lane, or "launch"
  int64_t time_ps = 0;
  int64_t slowed_ps = 0;
};

// In order of time; pieces follow one another without gaps and add up to the makespan.
std::vector<PathPiece> CriticalPath(const EngineInput& input, const EngineOutput& output);
// Summed by module and lane, largest first.
std::vector<Blame> BlameModules(const EngineInput& input, const std::vector<PathPiece>& path);
// The module an op is for: its own, or that of the first parameter of its units.
std::string ModuleOf(const Program& program, const Op& op);

}  // namespace interlace
