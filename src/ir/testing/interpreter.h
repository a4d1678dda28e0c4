// interpreter.h — runs a program on all its ranks inside one process, without torch, in plain loops: the referee that
// says whether a pass kept the numbers.
//
// It is deliberately unforgiving. Memory holds NaN until something is computed into it; the result of a transfer
// arrives only at its wait; storages end where liveness ends them; `grad.begin` leaves NaN where a gradient must come.
// A program that waits too late, releases too early or forgets a gradient gives an error or NaN. Arithmetic is done in
// double and rounded to the value's dtype (f64 f32 bf16 and integers), so equal programs give equal bits.
//
// A captured program is run as the textbook says: each rank and micro-batch by itself, gradients added in rank order,
// the optimizer applied to whole parameters. A sharded program of the same training step must give the same bits.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "ir/program_set.h"

namespace interlace::testing {

struct InterpretOptions {
  int64_t steps = 2;
  uint64_t seed = 1;      // inputs, initial values and random streams
  int64_t int_below = 8;  // integer inputs are drawn from [0, int_below)
  // Per group, as in docs/architecture.md; t is set by the interpreter. Empty: values that exercise every term.
  std::vector<std::vector<double>> hyper = {};
  std::map<std::string, std::vector<double>> params = {};  // initial values by name; the others are drawn
  // For captured programs only; others carry these themselves.
  int64_t ranks = 1;
  int64_t replicas = 1;  // of them: gradients are added up within each block of ranks / replicas, then over the blocks
  int64_t accumulation = 1;
  std::string accumulate_mode = "reduce_each";
  std::optional<double> clip = {};
};

struct RunResult {
  // By name of the output: the values of [(step * accumulation + micro_batch) * ranks + rank].
  std::map<std::string, std::vector<std::vector<double>>> outputs;
  std::map<std::string, std::vector<double>> params;                // after the last step, the same on every rank
  std::map<std::string, std::vector<std::vector<double>>> buffers;  // after the last step, by rank
  std::vector<double> norms;                                        // by step, where the program computes one
};

// Error: invalid programs (not verified here), ops the interpreter lacks, reads of storage that is gone, ranks that
// disagree.
Result<RunResult> Interpret(const Program& program, const InterpretOptions& options = {});
// The stages of a checked set beside one another, and what all of them together gave. Their ranks are those of one
// stage: inputs are drawn as for a program on the mesh without the axis of the stages.
Result<RunResult> InterpretSet(const ProgramSet& set, const InterpretOptions& options = {});
// What differs first, bit by bit: "parameter 'fc1.weight' element 3: 0.1 and 0.2"; "" when nothing does. NaN differs
// from all.
std::string FirstDifference(const RunResult& a, const RunResult& b);

}  // namespace interlace::testing
