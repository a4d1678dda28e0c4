// special.h — operators that are cut along a dimension that they sum over, or look up in, each by what it means.
//
//   embedding of a table cut by rows    a rank looks up what it has, zero elsewhere: the sum over ranks is the row
//   log_softmax over a cut vocabulary   a number a row from each rank (its logsumexp), never a whole row of logits
//   nll_loss on it                      each target is on one rank: two numbers are summed
//   in-place additions, as traced       a copy, of which the operator reads nothing else
//   random draws                        whole on every rank, so that a mask does not depend on the ranks
//
// Source: Megatron-LM (Shoeybi et al. 2019, section 3), for the vocabulary.
#pragma once

#include <string>

#include "base/result.h"
#include "ir/program.h"
#include "passes/tensor/cutter.h"

namespace interlace::tensor {

class Special {
 public:
  explicit Special(Cutter& cutter) : c_(cutter) {}
  // Whether the op was one of these, and is done.
  Result<bool> Visit(OpId id);
  // Whether what is done with such an op depends on what was done with others before (Cutter::AppendRemembered).
  static bool Remembers(const Op& op);

 private:
  bool Embedding(OpId id);
  bool EmbeddingBackward(OpId id);
  bool LogSoftmax(OpId id);
  bool LogSoftmaxBackward(OpId id);
  bool NllLoss(OpId id);
  bool NllLossBackward(OpId id);
  bool Dropout(OpId id);
  bool Overwrite(OpId id);
  bool Scatter(OpId id);
  bool Draw(OpId id);
  ValueId Counted(ValueId target, const Arg& ignored);
  ValueId RowSums(const Cutter::LossGradient& of, const Geometry& row);
  ValueId Filled(std::string fill, Geometry whole);
  ValueId Column(ValueId id);
  ValueId SeenAs(ValueId id, const Geometry& geometry);
  void Take(OpId id, Placement placement);
  void Instead(std::string name, std::vector<Arg> args, ValueId result, Placement placement,
               std::vector<NamedArg> named = {});
  const Cutter::LocalIndex& LocalIndex(ValueId index, int64_t rows, const Arg& other, const Arg* ignored);

  Cutter& c_;
};

}  // namespace interlace::tensor
