// inter_stage_solver.h — the solver behind inter_stage.h, in three parts: what does not depend on limits
// (inter_stage_tables.cc), whether a plan exists within limits T and H (inter_stage_check.cc), and the search over them
// (inter_stage.cc). Inside the room only.
#pragma once

#include <algorithm>
#include <queue>
#include <utility>
#include <vector>

#include "plan/inter_stage.h"

namespace interlace::plan {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

// One point of a stage's frontier: t, and e = t + d. Of two points with t <= t' and e <= e' the second is never needed:
// the objective sees a stage only through t and e + A.
struct Corner {
  double t = 0, e = 0;
  const FrontierPoint* source = nullptr;
};
struct Cell {  // the points of (stage, layout, layers), t rising, e falling; stages may share them
  uint32_t begin = 0, end = 0;
};
struct Step {  // one stage of a plan
  int32_t layout = 0, layers = 0;
  uint32_t point = 0;
  double boundary = 0;
};
struct Staircase {
  std::vector<Step> steps;
  double largest = 0, end = 0, cost = kNever;  // max t, E, objective
};
struct Link {                     // a suffix seen across a boundary
  double boundary = 0, rest = 0;  // rest = A of the suffix + boundary
};
// What the best of a set of plans is known to lie in: largest t in (t_lo, t_hi], E above h_lo.
struct Box {
  double t_lo, t_hi, h_lo, bound;
  bool operator>(const Box& o) const { return bound > o.bound; }
};

class InterStageSolver {
 public:
  InterStageSolver(const InterStageProblem& problem, const InterStageOptions& options)
      : p_(problem), o_(options), weight_(problem.micro_batches - 1) {}

  InterStageResult Run();

 private:
  size_t CellIndex(int32_t stage, int32_t layout, int32_t layers) const {
    return (static_cast<size_t>(stage) * layouts_.size() + layout) * (p_.layers + 1) + layers;
  }
  size_t StateIndex(int32_t stage, int32_t devices, int32_t layers) const {
    return static_cast<size_t>(device_index_[stage][devices]) * (p_.layers + 1) + layers;
  }
  int32_t most() const { return std::min(p_.most_layers, p_.layers - (p_.stages - 1) * p_.fewest_layers); }

  // ---- tables ----

  void CollectPoints();

  struct LayoutCell {
    int32_t layout = 0;
    Cell points;
  };
  // Adds the points of a stage of so many devices, those of each layout one after another.
  std::vector<LayoutCell> CellsOf(const Frontier& frontier, int32_t devices);

  int32_t FindLayout(const Layout& layout);

  // stage_node: a stage that begins with `left` devices unused is inside a node, or begins where one does.
  bool Fits(int32_t left, int32_t count) const {
    int32_t begin = (p_.devices - left) % p_.per_node;
    return begin == 0 || begin + count <= p_.per_node;
  }

  // Whether the boundary before the last `left` devices lies within a node.
  bool Inside(int32_t left) const { return (p_.devices - left) % p_.per_node != 0; }

  // Devices that stages i and later may share: those that the stages before and after can use up.
  void ReachableDevices();

  // prefix_[i]: the least sum of t of the stages before i, by what they leave over. Layouts and boundaries are ignored.
  void BestPrefixes();

  // ---- within limits ----

  // Layers that a stage can hold, and the stages from i on, or before i, on so many devices, when no t is above T.
  void Windows(double limit);

  // Layers that stages i and later may share: [first, second].
  //   layers_before: L - (what stages before i can hold) <= first     layers_after: second <= what i and later can hold
  //   fewest: every stage has at least fewest_layers
  std::pair<int32_t, int32_t> Window(int32_t i, int32_t index) const {
    int32_t before = hold_before_[i][index], after = hold_after_[i][index];
    if (before < 0 || after < 0) return {1, 0};
    return {std::max(p_.layers - before, (p_.stages - i) * p_.fewest_layers),
            std::min(after, p_.layers - i * p_.fewest_layers)};
  }

  // What stage i with layout x sees of the suffix (l, n) behind it: pairs with rising rest and falling boundary.
  void Links(int32_t i, int32_t l, int32_t n, size_t x, std::vector<Link>& links) const;

  // The first point of a cell within the limits behind a link, or `end`.
  uint32_t First(const Cell& cell, const Link& link, double t_limit, double h_limit) const {
    uint32_t at = cell.begin;
    // end_limit: d_i + A_i <= H, with A_i = t_i + boundary_i + A_{i+1}
    while (at < cell.end && points_[at].e + link.rest > h_limit) ++at;
    // stage_limit: t_i + boundary_i <= T
    return at < cell.end && points_[at].t + link.boundary <= t_limit ? at : cell.end;
  }

  // The plan of the least sum of t with every t <= T and E <= H.
  bool Check(double t_limit, double h_limit, Staircase& out);

  bool Dead(int32_t i, int32_t n, int32_t l) const;

  // Goes the way that Check found, by finding each step again.
  void Trace(int32_t x, double t_limit, double h_limit, Staircase& out);

  // ---- search ----

  // The best plan below `cutoff` that `allowed_` leaves; lowers `bound` where it has to stop early.
  Staircase Best(double cutoff, double& bound);
  void Push(Box& box, std::priority_queue<Box, std::vector<Box>, std::greater<>>& open) const;
  double SumOf(const Staircase& plan) const;

  struct Branch {  // plans that begin as `plan` does for `fixed` stages and then avoid `without`
    Staircase plan;
    int32_t fixed = 0;
    std::vector<size_t> without;  // cells of stage `fixed`
    bool operator>(const Branch& o) const { return plan.cost > o.plan.cost; }
  };

  // Lawler: the plans other than the best are split by the first stage in which they differ from it.
  void TopK(InterStageResult& out);

  // The layouts that all stages may have beside this one.
  bool Alike(int32_t a, int32_t b) const { return p_.one_layout ? a == b : layouts_[a].tp == layouts_[b].tp; }
  void AllowAlike(int32_t layout);
  void Fix(int32_t stage, const Step& step);

  InterStagePlan Finish(const Staircase& plan) const;

  const InterStageProblem& p_;
  const InterStageOptions& o_;
  const double weight_;  // G - 1
  std::vector<Layout> layouts_;
  std::vector<Corner> points_;
  std::vector<Cell> cells_;                                     // by stage, layout, layers
  std::vector<char> allowed_;                                   // the same
  std::vector<double> boundary_[2];                             // between nodes, inside one; by layout, layout
  std::vector<std::vector<int32_t>> device_index_, reachable_;  // by stage: of devices left; the devices left
  std::vector<std::vector<double>> prefix_;                     // by stage: [devices left, layers left]
  std::vector<std::vector<double>> rest_;  // by stage: [devices left, layers left, layout]: A, or infinity
  std::vector<int32_t> most_;              // by stage, layout
  std::vector<std::vector<int32_t>> hold_before_, hold_after_;  // by stage, devices left
  double longest_ = kNever;                                     // t of use
  int64_t checks_ = 0;
  bool stopped_ = false;
};

}  // namespace interlace::plan
