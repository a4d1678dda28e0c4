// roles.h — the weights of a model by what they are: one role for the same weight of all blocks, how it could be cut,
// and which biases go with it.
//
//   transformer.h.*.attn.c_attn.weight    whole | 0 | 1 | 1 blocks 3      12 parameters; its result is split in three
//     transformer.h.*.attn.c_attn.bias    cut where dimension 1 is
//
// A list of blocks is seen by its numbers; a module that has nothing but parameters (a Linear in a Sequential) is no
// block, and weights that differ in size between blocks have a role each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/tensor/plan.h"

namespace interlace::tensor {

struct Held {
  int32_t dim = -1;  // -1: whole
  int64_t blocks = 1;
  friend bool operator==(const Held&, const Held&) = default;
};

struct Bias {
  std::string pattern;
  std::vector<std::string> names;
  int32_t dim = 0;  // of the weight: the one that the bias walks along
};

struct Role {
  std::string pattern;
  std::vector<std::string> names;  // of the parameters
  int64_t bytes = 0;               // of all of them, with their biases
  int64_t trained_bytes = 0;       // of those that are not frozen
  std::string list;                // where its blocks lie: "model.layers."; empty: in no block
  std::vector<Held> choices;       // whole first; in blocks where what it makes is used in parts
  std::vector<Bias> biases;
  std::string undivided;  // why its longest dimension is no choice; empty: it is one
};

// Roles of all weights of two dimensions and more, in the order of their first use.
std::vector<Role> RolesOf(const Program& program, int64_t ranks);

// Error: an entry cuts a weight as one block whose result is used in several parts.
Status CheckBlocks(const std::vector<Role>& roles, const std::vector<PlanEntry>& plan);

// How each role is held: an index in its choices.
using Choices = std::vector<int32_t>;
std::vector<PlanEntry> PlanOf(const std::vector<Role>& roles, const Choices& choices);
std::string PrintHeld(const Held& held);  // "whole", "0", "1 blocks 3"

}  // namespace interlace::tensor
