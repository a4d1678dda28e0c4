#include "passes/tensor/steps.h"

#include <algorithm>
#include <mutex>

#include "passes/tensor/rules.h"
#include "passes/tensor/special.h"

namespace interlace::tensor {
namespace {

void Insert(std::vector<ValueId>& set, ValueId id) {
  if (std::find(set.begin(), set.end(), id) == set.end()) set.push_back(id);
}

}  // namespace

void Steps::Sum::Add(const Left& left) {
  compute += left.compute;
  transfers += left.transfers;
  gathers_weight = gathers_weight || left.gathers_weight;
  impossible = impossible || left.impossible;
  if (left.summed_last == kNone) return;
  if (std::find(summed_last.begin(), summed_last.end(), left.summed_last) == summed_last.end())
    summed_last.push_back(left.summed_last);
}

Steps::Steps(const Program& program)
    : remembered_(program.num_values()), steps_(static_cast<size_t>(program.num_ops())) {
  states_ = {{{0, 0, kNone}, 0}, {{kNone, kNone}, 0}};  // a storage; indices and losses
  std::map<ValueId, std::vector<ValueId>> gradients;  // of which parameters a value is a part of the gradient
  const std::vector<OpId>& ops = program.MicroBatchPhase()->ops;
  for (auto id = ops.rbegin(); id != ops.rend(); ++id) {
    const Op& op = program.op(*id);
    if (op.kind == OpKind::kView) continue;
    order_.push_back(*id);
    Step& step = steps_[*id];
    ForEachOperand(op, [&](ValueId operand) { Insert(step.reads, program.RootOf(operand)); });
    step.touches = step.reads;
    for (ValueId result : op.results) {
      if (result != kNone) Insert(step.touches, program.RootOf(result));
    }
    if (Special::Remembers(op)) {
      step.reads.push_back(remembered_);
      step.touches.push_back(remembered_);
    }
    // What an embedding's gradient is cut along, its parameter says (Cutter::FindGradientsOfRows).
    if (op.kind == OpKind::kGrad) {
      Insert(gradients[op.args[1].value], op.args[0].value);
    } else if (!op.results.empty() && gradients.count(op.results[0]) != 0) {
      const std::vector<ValueId> of = gradients[op.results[0]];
      for (ValueId param : of) Insert(step.reads, param);
      if (BaseName(op.name) != "aten.add") continue;
      ForEachOperand(op, [&](ValueId operand) {
        for (ValueId param : of) Insert(gradients[operand], param);
      });
    }
  }
  std::reverse(order_.begin(), order_.end());
}

int32_t Steps::StateOf(const Cutter& cutter, ValueId root) {
  std::vector<int64_t> state;
  if (root == remembered_) {
    cutter.AppendRemembered(state);
  } else {
    cutter.AppendState(root, state);
  }
  return states_.emplace(std::move(state), static_cast<int32_t>(states_.size())).first->second;
}

// From where one was found before: what is met next is mostly the same.
const Steps::Seen* Steps::Find(const Step& step, const std::vector<int32_t>& meets, size_t& last) {
  const size_t count = step.seen.size();
  for (size_t i = 0, at = last; i < count; ++i, at = at + 1 < count ? at + 1 : 0) {
    if (!std::equal(meets.begin(), meets.end(), step.met.begin() + static_cast<ptrdiff_t>(at * meets.size()))) continue;
    last = at;
    return &step.seen[at];
  }
  return nullptr;
}

std::optional<Steps::Sum> Steps::Add(const std::vector<Start>& starts, Walker& walker) const {
  std::shared_lock lock(mutex_);
  walker.state.assign(static_cast<size_t>(remembered_) + 1, 0);
  walker.last.resize(steps_.size());
  for (const Start& start : starts) {
    const auto known = starts_.find({start.param, start.held.dim, start.held.blocks});
    if (known == starts_.end()) return std::nullopt;
    walker.state[start.param] = known->second;
  }
  Sum sum;
  for (OpId op : order_) {
    const Step& step = steps_[op];
    walker.meets.clear();
    for (ValueId root : step.reads) walker.meets.push_back(walker.state[root]);
    const Seen* seen = Find(step, walker.meets, walker.last[op]);
    if (seen == nullptr) return std::nullopt;
    sum.Add(seen->left);
    if (sum.impossible) break;
    for (const auto& [root, state] : seen->states) walker.state[root] = state;
  }
  return sum;
}

void Steps::Begin(const Cutter& cutter, const Start& start) {
  std::unique_lock lock(mutex_);
  starts_[{start.param, start.held.dim, start.held.blocks}] = StateOf(cutter, start.param);
}

void Steps::Meet(const Cutter& cutter, OpId op, Walker& walker) {
  std::unique_lock lock(mutex_);
  walker.meets.clear();
  for (ValueId root : steps_[op].reads) walker.meets.push_back(StateOf(cutter, root));
}

void Steps::See(const Cutter& cutter, OpId op, const Left& left, Walker& walker) {
  std::unique_lock lock(mutex_);
  Step& step = steps_[op];
  if (Find(step, walker.meets, walker.last[op]) != nullptr) return;
  Seen seen{left, {}};
  for (ValueId root : step.touches) {
    const int32_t state = StateOf(cutter, root);
    const auto read = std::find(step.reads.begin(), step.reads.end(), root) - step.reads.begin();
    const int32_t before = static_cast<size_t>(read) < step.reads.size() ? walker.meets[read] : 0;
    if (state != before) seen.states.emplace_back(root, state);
  }
  step.met.insert(step.met.end(), walker.meets.begin(), walker.meets.end());
  step.seen.push_back(std::move(seen));
}

}  // namespace interlace::tensor
