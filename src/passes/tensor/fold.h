// fold.h — a captured program with its repeated blocks folded: of blocks that compute alike three stay, the first, one
// that stands for all between, and the last. What it says of the middle one counts for each that it stands for.
//
//   embedding, layers.0 ... layers.79, head     →     embedding, layers.0, layers.1 (78 times), layers.79, head
//
// Whoever used a value of a block that went uses that of its twin, the same op of the block that stands for it: in the
// forward part layers.1, in the backward part layers.79, which both ran before.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ir/program.h"

namespace interlace::tensor {

struct Folded {
  Program program;
  std::vector<double> times;  // by module: blocks that an op of it stands for
};

// A program with one micro-batch phase.
Folded Fold(const Program& program);

// "model.layers.3" of "model.layers.3.mlp"; empty: in no list.
std::string_view BlockOfPath(std::string_view path);

}  // namespace interlace::tensor
