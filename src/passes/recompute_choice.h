// recompute_choice.h — what the pass `recompute` may drop, and what it decides to drop.
//
// Everything is by storage: a value is named by the root it lies in, an op by its position in the phase. A storage is
// saved when a backward op, or an op that runs again, reads it and it is not dropped.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cost/cluster.h"
#include "ir/program.h"
#include "passes/phase_editor.h"

namespace interlace {

// The block of a module or parameter: the path up to the first component that is a number, `model.layers.3` of
// `model.layers.3.mlp.up`; empty without one.
std::string BlockOf(std::string_view path);

class RecomputeChoice {
 public:
  // The program and the phase must outlive it.
  RecomputeChoice(const Program& program, const Phase& phase);

  // Blocks are elements of lists of modules, or the modules of these paths. Error: no such module, paths that overlap,
  // no list at all.
  Status FindBlocks(const std::vector<std::string>& paths);
  void DropAll();
  // All but results of these ops ("aten.mm" means its overloads too). `asked`: by the user; otherwise attention's
  // scores are dropped as well. `keep`: "products" those ops, "second" of products in a block only the first, third,
  // ..., "all" all but attention's scores. Error: `asked` and no such op.
  Status DropAllBut(const std::vector<std::string>& saved_ops, bool asked, std::string_view keep);
  // All that may be dropped inside these blocks, beside what is dropped already. Error: no block of FindBlocks.
  Status DropBlocks(const std::vector<std::string>& paths);
  // Error: the budget cannot be met, sizes that are not numbers.
  Status DropToBudget(int64_t bytes, const ClusterSpec& cluster);

  int32_t first_backward() const { return first_backward_; }  // size of the list when there is none
  bool Dropped(ValueId root) const { return dropped_[root] != 0; }
  // Ops that the backward op at `index` needs again, ascending; those of earlier calls are not listed again.
  std::vector<int32_t> Needed(int32_t index);
  // Bytes kept for the backward part if so much is dropped; nothing while a size is symbolic.
  std::optional<int64_t> SavedBytes() const { return SavedBytes(dropped_); }
  std::optional<int64_t> SavedBytesOfAll() const;

 private:
  const Op& At(int32_t index) const { return program_.op(phase_.ops[index]); }
  bool MayRepeat(int32_t index) const;
  bool MakesScores(const Op& op) const;
  bool ChangesScores(const Op& op, ValueId result) const;
  void FindDroppable();
  // Adds to `ops` what must run again for the op at `index` and is not marked in `again`, and marks it; to `saved` the
  // storages of the forward part that those ops and it read.
  void Close(int32_t index, const std::vector<char>& dropped, std::vector<char>& again, std::vector<int32_t>& ops,
             std::vector<ValueId>& saved) const;
  struct Kept {
    std::vector<char> again;     // by index: runs again
    std::vector<char> saved;     // by root
    std::vector<ValueId> roots;  // the saved ones, in the order of their first reads
  };
  Kept KeptWith(const std::vector<char>& dropped) const;
  std::optional<int64_t> SavedBytes(const std::vector<char>& dropped) const;
  friend class BudgetSearch;

  const Program& program_;
  const Phase& phase_;
  PhaseFacts facts_;
  int32_t first_backward_ = 0, last_backward_ = -1;
  bool draws_in_order_ = false;  // random numbers as eager's generator gives them
  std::vector<std::string> blocks_;  // their paths
  std::vector<int32_t> block_of_module_;
  std::vector<char> droppable_, dropped_;  // by root
  std::vector<char> again_;                // by index: listed by Needed
};

}  // namespace interlace
