// recompute mode=budget. Of all saved storages that may be dropped, drop the one that frees most bytes per time to make
// it again, until the rest fits. What a drop frees and costs changes with the drops before it: an op that already runs
// again is free, an operand that would have to be saved instead takes its bytes. So a candidate is judged again when it
// comes up, and those that a newly repeated op feeds are judged at once, because they may have become better.
#include <algorithm>
#include <queue>

#include "cost/kernel_model.h"
#include "passes/inspect.h"
#include "passes/recompute_choice.h"

namespace interlace {

class BudgetSearch {
 public:
  BudgetSearch(RecomputeChoice& choice, const ClusterSpec& cluster)
      : choice_(choice),
        cluster_(cluster),
        kept_(choice.KeptWith(std::vector<char>(choice.droppable_.size(), 0))),
        candidate_(choice.droppable_.size(), 0) {}

  // The bytes saved in the end; choice.dropped_ is what was dropped. Error: a size that is not a number.
  Result<int64_t> Run(int64_t budget) {
    // What may be dropped and is not saved is made again on demand.
    choice_.dropped_ = choice_.droppable_;
    int64_t total = *choice_.SavedBytesOfAll();
    for (ValueId root : kept_.roots) {
      if (choice_.droppable_[root]) candidate_[root] = 1;
    }
    for (ValueId root : kept_.roots) choice_.dropped_[root] = 0;
    for (ValueId root : kept_.roots) {
      if (candidate_[root]) INTERLACE_TRY(Offer(root));
    }
    while (total > budget && !queue_.empty()) {
      ValueId root = queue_.top().root;
      queue_.pop();
      if (!candidate_[root]) continue;
      INTERLACE_ASSIGN(Gain gain, Judge(root));
      if (gain.freed <= 0) continue;
      if (!queue_.empty() && gain < queue_.top()) {
        queue_.push(std::move(gain));
        continue;
      }
      total -= gain.freed;
      INTERLACE_TRY(Drop(gain));
    }
    return total;
  }

 private:
  struct Gain {
    int64_t freed = 0;
    double us = 0;
    ValueId root = kNone;
    std::vector<int32_t> ops;    // that run again
    std::vector<ValueId> saves;  // what they read that was not saved
    // Less bytes per time, then fewer bytes, then the larger id.
    friend bool operator<(const Gain& a, const Gain& b) {
      double mine = static_cast<double>(a.freed) * b.us, other = static_cast<double>(b.freed) * a.us;
      if (mine != other) return mine < other;
      if (a.freed != b.freed) return a.freed < b.freed;
      return a.root > b.root;
    }
  };

  Result<Gain> Judge(ValueId root) {
    Gain gain;
    gain.root = root;
    INTERLACE_ASSIGN(gain.freed, Bytes(root));
    int32_t def = choice_.facts_.def[root];
    std::vector<ValueId> reads;
    if (!kept_.again[def]) {
      choice_.dropped_[root] = 1;
      kept_.again[def] = 1;
      gain.ops.push_back(def);
      choice_.Close(def, choice_.dropped_, kept_.again, gain.ops, reads);
      choice_.dropped_[root] = 0;
      for (int32_t op : gain.ops) kept_.again[op] = 0;
    }
    std::sort(gain.ops.begin(), gain.ops.end());  // one order of sums
    for (int32_t op : gain.ops) {
      INTERLACE_ASSIGN(KernelWork work, WorkOf(choice_.program_, choice_.At(op)));
      if (work.kind != KernelWork::Kind::kFree) gain.us += KernelUs(cluster_, work);
    }
    for (ValueId read : reads) {
      if (kept_.saved[read]) continue;
      kept_.saved[read] = 1;
      gain.saves.push_back(read);
    }
    for (ValueId read : gain.saves) {
      kept_.saved[read] = 0;
      INTERLACE_ASSIGN(int64_t bytes, Bytes(read));
      gain.freed -= bytes;
    }
    return gain;
  }

  Status Offer(ValueId root) {
    INTERLACE_ASSIGN(Gain gain, Judge(root));
    if (gain.freed > 0) queue_.push(std::move(gain));
    return Ok{};
  }

  Status Drop(const Gain& gain) {
    candidate_[gain.root] = 0;
    choice_.dropped_[gain.root] = 1;
    kept_.saved[gain.root] = 0;
    for (int32_t op : gain.ops) kept_.again[op] = 1;
    for (ValueId root : gain.saves) kept_.saved[root] = 1;
    std::vector<ValueId> again;
    auto fed = [&](ValueId root) {
      for (int32_t use : choice_.facts_.uses[root]) {
        for (ValueId result : choice_.At(use).results) {
          if (result == kNone) continue;
          ValueId owner = choice_.program_.RootOf(result);
          if (candidate_[owner]) again.push_back(owner);
        }
      }
    };
    for (int32_t op : gain.ops) {
      for (ValueId result : choice_.At(op).results) {
        if (result == kNone) continue;
        if (candidate_[result]) again.push_back(result);  // made together with what was dropped
        fed(choice_.program_.RootOf(result));
      }
    }
    for (ValueId root : gain.saves) fed(root);
    std::sort(again.begin(), again.end());
    again.erase(std::unique(again.begin(), again.end()), again.end());
    for (ValueId root : again) INTERLACE_TRY(Offer(root));
    return Ok{};
  }

  Result<int64_t> Bytes(ValueId root) const { return choice_.program_.StorageBytes(choice_.program_.value(root).type); }

  RecomputeChoice& choice_;
  const ClusterSpec& cluster_;
  RecomputeChoice::Kept kept_;
  std::vector<char> candidate_;  // by root: saved, may be dropped
  std::priority_queue<Gain> queue_;
};

Status RecomputeChoice::DropToBudget(int64_t bytes, const ClusterSpec& cluster) {
  std::optional<int64_t> all = SavedBytesOfAll();
  if (!all) return MakeError("mode=budget needs sizes that are numbers; bind the symbols first");
  INTERLACE_ASSIGN(int64_t least, BudgetSearch(*this, cluster).Run(bytes));
  if (least <= bytes) return Ok{};
  std::optional<int64_t> full = SavedBytes(droppable_);
  if (full && *full <= bytes) {
    DropAll();
    return Ok{};
  }
  if (full) least = std::min(least, *full);
  return MakeError(
      "bytes=", bytes, ": at least ", least, " bytes (", BytesText(least), " of ", BytesText(*all),
      ") are kept for the backward part: what enters a block and what lies outside of blocks; raise bytes or name "
      "larger blocks");
}

}  // namespace interlace
