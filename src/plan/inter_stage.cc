// The search over the limits (T, H), and the next best plans.
#include "plan/inter_stage_solver.h"

namespace interlace::plan {

Staircase InterStageSolver::Best(double cutoff, double& bound) {
  Staircase best;
  best.cost = cutoff;
  Staircase found;
  auto keep = [&] {
    if (found.cost < best.cost) best = found;
  };
  if (!Check(longest_, best.cost, found)) return best;
  keep();
  double least = 0;
  for (const Step& step : found.steps) least += points_[step.point].t + step.boundary;
  std::priority_queue<Box, std::vector<Box>, std::greater<>> open;
  double high = weight_ > 0 ? std::min((best.cost - least) / weight_, longest_) : longest_;
  open.push({least / p_.stages, std::max(high, least / p_.stages), least, weight_ * (least / p_.stages) + least});
  while (!open.empty()) {
    Box box = open.top();
    if (box.bound >= best.cost * (1 - o_.precision)) break;
    if (o_.stop && o_.stop()) {
      stopped_ = true;
      bound = std::min(bound, box.bound);
      return best;
    }
    open.pop();
    if (weight_ > 0) box.t_hi = std::min(box.t_hi, (best.cost - box.h_lo) / weight_);
    double wide = weight_ > 0 ? weight_ * (box.t_hi - box.t_lo) : 0;
    double room = best.cost - box.bound;  // = H still of use - h_lo
    if (room >= 4 * wide) {
      double middle = box.h_lo + room / 2;
      if (Check(box.t_hi, middle, found)) {
        keep();  // costs at most bound + wide + room / 2: the room shrinks by a quarter
        box.h_lo = std::max(box.h_lo, std::min(SumOf(found), middle));
      } else {
        box.h_lo = middle;
      }
      Push(box, open);
      continue;
    }
    double middle = box.t_lo + (box.t_hi - box.t_lo) / 2;
    Box lower = box;
    lower.t_hi = middle;
    box.t_lo = middle;
    Push(box, open);
    if (Check(lower.t_hi, best.cost - weight_ * lower.t_lo, found)) {
      keep();
      lower.h_lo = std::max(lower.h_lo, SumOf(found));
      Push(lower, open);
    }
  }
  bound = std::min(bound, best.cost);
  return best;
}

double InterStageSolver::SumOf(const Staircase& plan) const {
  double sum = 0;
  for (size_t i = plan.steps.size(); i-- > 0;) sum = points_[plan.steps[i].point].t + (sum + plan.steps[i].boundary);
  return sum;
}

void InterStageSolver::TopK(InterStageResult& out) {
  const bool choose = p_.one_layout || p_.one_tp;
  std::vector<int32_t> first;  // a layout of each kind that all stages may have
  for (int32_t x = 0; x < static_cast<int32_t>(layouts_.size()); ++x) {
    if (first.empty() || (choose && std::none_of(first.begin(), first.end(), [&](int32_t y) { return Alike(x, y); })))
      first.push_back(x);
  }
  std::vector<double> costs(static_cast<size_t>(std::max(o_.top, 1)), o_.cutoff_us);  // the best so far, for the cutoff
  auto cutoff = [&] { return costs.back(); };
  auto note = [&](double cost) {
    costs.insert(std::upper_bound(costs.begin(), costs.end(), cost), cost);
    costs.pop_back();
  };
  std::priority_queue<Branch, std::vector<Branch>, std::greater<>> open;
  double bound = kNever;
  for (int32_t x : first) {
    if (choose) AllowAlike(x);
    Branch whole;
    whole.plan = Best(cutoff(), bound);
    if (whole.plan.steps.empty()) continue;
    note(whole.plan.cost);
    open.push(std::move(whole));
  }
  out.bound_us = std::min(bound, o_.cutoff_us);
  while (!open.empty() && static_cast<int32_t>(out.plans.size()) < o_.top) {
    Branch branch = open.top();
    open.pop();
    out.plans.push_back(Finish(branch.plan));
    if (static_cast<int32_t>(out.plans.size()) == o_.top) break;
    for (int32_t j = branch.fixed; j < p_.stages && !stopped_; ++j) {
      if (choose) {
        AllowAlike(branch.plan.steps[0].layout);
      } else {
        std::fill(allowed_.begin(), allowed_.end(), 1);
      }
      for (int32_t i = 0; i < j; ++i) Fix(i, branch.plan.steps[i]);
      Branch other;
      other.fixed = j;
      if (j == branch.fixed) other.without = branch.without;
      other.without.push_back(CellIndex(j, branch.plan.steps[j].layout, branch.plan.steps[j].layers));
      for (size_t cell : other.without) allowed_[cell] = 0;
      double unused = kNever;
      other.plan = Best(cutoff(), unused);
      if (other.plan.steps.empty()) continue;
      note(other.plan.cost);
      open.push(std::move(other));
    }
  }
  out.complete = !stopped_;
}

void InterStageSolver::AllowAlike(int32_t layout) {
  size_t n = layouts_.size(), run = static_cast<size_t>(p_.layers) + 1;
  for (size_t cell = 0; cell < allowed_.size(); ++cell)
    allowed_[cell] = Alike(static_cast<int32_t>(cell / run % n), layout);
}

void InterStageSolver::Fix(int32_t stage, const Step& step) {
  size_t run = layouts_.size() * (p_.layers + 1);
  std::fill(allowed_.begin() + static_cast<int64_t>(stage * run),
            allowed_.begin() + static_cast<int64_t>((stage + 1) * run), 0);
  allowed_[CellIndex(stage, step.layout, step.layers)] = 1;
}

InterStagePlan InterStageSolver::Finish(const Staircase& plan) const {
  InterStagePlan out;
  out.cost_us = plan.cost;
  int32_t device = 0;
  for (const Step& step : plan.steps) {
    StageChoice& stage = out.stages.emplace_back();
    stage.point = *points_[step.point].source;
    stage.boundary_us = step.boundary;
    stage.first_device = device;
    device += layouts_[step.layout].devices();
  }
  return out;
}

InterStageResult InterStageSolver::Run() {
  CollectPoints();
  ReachableDevices();
  InterStageResult out;
  out.bound_us = o_.cutoff_us;
  if (layouts_.empty() || reachable_[0].empty()) return out;
  BestPrefixes();
  TopK(out);
  out.checks = checks_;
  return out;
}

void InterStageSolver::Push(Box& box, std::priority_queue<Box, std::vector<Box>, std::greater<>>& open) const {
  box.bound = weight_ * box.t_lo + box.h_lo;
  open.push(box);
}

std::vector<int32_t> FreeDeviceCounts(int32_t devices, int32_t per_node) {
  std::vector<int32_t> counts;
  int32_t node = std::min(devices, per_node);
  for (int32_t n = devices / node; n >= 1; --n) counts.push_back(n * node);
  for (int32_t rest = node, factor = 2; rest > 1; ++factor) {
    for (; rest % factor == 0; counts.push_back(rest)) rest /= factor;
  }
  std::reverse(counts.begin(), counts.end());
  return counts;
}

double PipelineObjective(int32_t micro_batches, const std::vector<std::pair<double, double>>& stages) {
  double largest = 0, sum = 0, late = 0;
  for (auto [t, d] : stages) {
    late = std::max(late, d - sum);
    largest = std::max(largest, t);
    sum += t;
  }
  return (micro_batches - 1) * largest + sum + late;
}

Result<InterStageResult> SolveInterStage(const InterStageProblem& p, const InterStageOptions& options) {
  if (p.stages < 1 || p.micro_batches < 1 || p.devices < 1 || p.per_node < 1 || p.fewest_layers < 1) {
    return MakeError("a pipeline needs at least one stage, micro-batch, device and layer");
  }
  if (p.layers < static_cast<int64_t>(p.stages) * p.fewest_layers) {
    return MakeError(p.layers, " layers are too few for ", p.stages, " stages; take at most ",
                     p.layers / p.fewest_layers, " stages");
  }
  for (int32_t count : p.counts) {
    if (count < 1 || (count < p.per_node ? p.per_node % count : count % p.per_node) != 0) {
      return MakeError("a stage of ", count, " devices neither divides a node of ", p.per_node, " nor is whole nodes");
    }
  }
  return InterStageSolver(p, options).Run();
}

}  // namespace interlace::plan
