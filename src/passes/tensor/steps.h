// steps.h — what an op costs and leaves behind when weights are cut, by what it meets: so that it is found out once.
//
// What the cutter makes of an op depends on little: how the storages of its operands lie (Cutter::AppendState), here
// numbered in the order in which they were met. Of the thousands of ways to cut a model most meet the same at most ops:
//
//   op            operands lie        compute, transfers     then lie
//   %34 = mm      #3, #7              12.1, 0 us             %34: #4 (a sum)
//   %66 = add     #4, #2              1.0, 8.2 us            %66: #2 (rows); %34: #9 (a sum with a copy cut by rows)
//
// A way whose every op has met the same before is added up from what was seen, in a hundredth of the time (Add). Where
// one has not, the cutter runs, and what it does is seen (estimate.cc).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "ir/program.h"
#include "passes/tensor/cutter.h"
#include "passes/tensor/roles.h"

namespace interlace::tensor {

// For several threads, each with a Walker and a cutter of its own.
class Steps {
 public:
  // Of one op.
  struct Left {
    double compute = 0, transfers = 0;
    bool gathers_weight = false;  // a weight is made whole again for the op
    bool impossible = false;      // the cutter refuses it
    ValueId summed_last = kNone;  // a gradient whose sum over ranks is made behind all ops
  };
  // Of all ops.
  struct Sum {
    double compute = 0, transfers = 0;
    bool gathers_weight = false, impossible = false;
    std::vector<ValueId> summed_last;
    void Add(const Left& left);
  };
  // A parameter that is cut.
  struct Start {
    ValueId param = kNone;
    Held held;
  };
  struct Walker {
    std::vector<int32_t> state;  // by storage
    std::vector<size_t> last;    // by op: which of those seen it was
    std::vector<int32_t> meets;
  };

  // A program whose ops and values keep their ids.
  explicit Steps(const Program& program);

  // All other parameters are whole. nullopt: an op meets what is new.
  std::optional<Sum> Add(const std::vector<Start>& starts, Walker& walker) const;

  // While the cutter runs: `Begin` for what it was given, `Meet` before each op, `See` after it, with what it cost.
  void Begin(const Cutter& cutter, const Start& start);
  void Meet(const Cutter& cutter, OpId op, Walker& walker);
  void See(const Cutter& cutter, OpId op, const Left& left, Walker& walker);

 private:
  struct Seen {
    Left left;
    std::vector<std::pair<ValueId, int32_t>> states;  // of storages after it, where they changed
  };
  struct Step {
    std::vector<ValueId> reads, touches;  // storages; touches: those that it may make or copy
    std::vector<int32_t> met;             // states of `reads`, one row for each of `seen`
    std::vector<Seen> seen;
  };
  int32_t StateOf(const Cutter& cutter, ValueId root);
  static const Seen* Find(const Step& step, const std::vector<int32_t>& meets, size_t& last);

  const ValueId remembered_;  // stands for what is known of indices and losses, as if it were a storage
  std::vector<OpId> order_;
  std::vector<Step> steps_;                         // by op; of views nothing
  std::map<std::vector<int64_t>, int32_t> states_;  // 0: whole, no copies
  std::map<std::tuple<ValueId, int32_t, int64_t>, int32_t> starts_;
  mutable std::shared_mutex mutex_;
};

}  // namespace interlace::tensor
