// model_text.h — the text of a model to plan for: facts, how tensor parallel cuts its parameters, and one captured
// program (docs/ir.md) for each kind of layer. Written by python/interlace/plan/layers.py.
//
//   interlace-model 1
//   name "llama-3-8b"                      facts, one a line: name, family, blocks, dtype, hidden, heads, kv_heads,
//   blocks 32                              vocab, sequence, flash, tied (one parameter of embedding and head, or none)
//   parallel column 0 "model.layers.0."    cut along dimension 0: column | row | vocabulary
//   parallel column 1 blocks 3 "h.0."      in each of three fused blocks
//   program block 412                      the next 412 lines are the program; embedding, block and head, each once
//
// A program has the inputs "hidden" (not the embedding's) and "hidden.grad" (not the head's): the activation that
// enters the layer and the gradient of the one that leaves it, and their counterparts as outputs. Files are hostile
// input.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "plan/layer_cost.h"

namespace interlace::plan {

std::string_view RoleName(Role role);  // "embedding", "block", "head"

struct ParallelParameter {
  enum class Kind : uint8_t { kColumn, kRow, kVocabulary };
  Kind kind = Kind::kColumn;
  int32_t dim = 0;
  int64_t blocks = 1;  // of fused weights each of so many equal blocks is cut
  std::string name;
};

struct ModelText {
  std::string name, family;
  int32_t blocks = 0;
  DType dtype = DType::kF32;
  int64_t hidden = 0, heads = 0, kv_heads = 0, vocab = 0, sequence = 0;
  bool flash = true;
  std::string tied;  // "" when embedding and head share no parameter
  std::vector<ParallelParameter> parallel;
  std::array<Program, kRoles> programs;  // by Role
};

// Error: "file:line:col: what" with the line and a caret; a program that does not verify, or lacks its activations.
Result<ModelText> ReadModelText(std::string_view text, std::string_view file);

}  // namespace interlace::plan
