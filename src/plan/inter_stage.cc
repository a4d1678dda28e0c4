#include "plan/inter_stage.h"

#include <algorithm>
#include <cmath>
#include <queue>

namespace interlace::plan {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// One point of a stage's frontier: t, and e = t + d. Of two points with t <= t' and e <= e' the second is never needed: the
// objective sees a stage only through t and e + A.
struct Corner {
  double t = 0, e = 0;
  const FrontierPoint* source = nullptr;
};
struct Cell {                             // the points of (stage, layout, layers), t rising, e falling
  uint32_t begin = 0, end = 0;
};
struct Step {                             // one stage of a plan
  int32_t layout = 0, layers = 0;
  uint32_t point = 0;
  double boundary = 0;
};
struct Staircase {
  std::vector<Step> steps;
  double largest = 0, end = 0, cost = kNever;  // max t, E, objective
};
struct Link {                             // a suffix seen across a boundary
  double boundary = 0, rest = 0;          // rest = A of the suffix + boundary
};
// What the best of a set of plans is known to lie in: largest t in (t_lo, t_hi], E above h_lo.
struct Box {
  double t_lo, t_hi, h_lo, bound;
  bool operator>(const Box& o) const { return bound > o.bound; }
};

class Solver {
 public:
  Solver(const InterStageProblem& problem, const InterStageOptions& options) : p_(problem), o_(options), weight_(problem.micro_batches - 1) {}

  InterStageResult Run() {
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

 private:
  size_t CellIndex(int32_t stage, int32_t layout, int32_t layers) const {
    return (static_cast<size_t>(stage) * layouts_.size() + layout) * (p_.layers + 1) + layers;
  }
  size_t StateIndex(int32_t stage, int32_t devices, int32_t layers) const {
    return static_cast<size_t>(device_index_[stage][devices]) * (p_.layers + 1) + layers;
  }
  int32_t most() const { return std::min(p_.most_layers, p_.layers - (p_.stages - 1) * p_.fewest_layers); }

  // ---- tables ----

  void CollectPoints() {
    struct Raw {
      int32_t stage, layout, layers;
      Corner point;
    };
    std::vector<Raw> raw;
    for (int32_t i = 0; i < p_.stages; ++i) {
      for (int32_t count : p_.counts) {
        if (count > p_.devices) continue;
        for (int32_t l = p_.fewest_layers; l <= most(); ++l) {
          StageKey key{l, i == 0, i == p_.stages - 1, count, p_.micro_batches, std::min(p_.stages - i, p_.micro_batches)};
          for (const FrontierPoint& f : p_.frontier(key)) {
            double t = f.cost.stable_us, e = t + std::max(f.cost.extra_us, 0.0);
            if (LayoutOf(f.strategy).devices() != count || !(t >= 0) || !std::isfinite(e)) continue;
            raw.push_back({i, FindLayout(LayoutOf(f.strategy)), l, {t, e, &f}});
          }
        }
      }
    }
    std::stable_sort(raw.begin(), raw.end(), [&](const Raw& a, const Raw& b) {
      size_t x = CellIndex(a.stage, a.layout, a.layers), y = CellIndex(b.stage, b.layout, b.layers);
      return x != y ? x < y : a.point.t != b.point.t ? a.point.t < b.point.t : a.point.e < b.point.e;
    });
    cells_.assign(static_cast<size_t>(p_.stages) * layouts_.size() * (p_.layers + 1), {});
    for (const Raw& r : raw) {
      Cell& cell = cells_[CellIndex(r.stage, r.layout, r.layers)];
      uint32_t next = static_cast<uint32_t>(points_.size());
      if (cell.begin == cell.end) cell = {next, next};
      if (cell.end > cell.begin && points_[cell.end - 1].e <= r.point.e) continue;
      points_.push_back(r.point);
      cell.end = next + 1;
    }
    size_t n = layouts_.size();
    for (int inside = 0; inside < 2; ++inside) {
      boundary_[inside].assign(n * n, 0);
      if (!p_.boundary_us) continue;
      for (size_t x = 0; x < n; ++x) {
        for (size_t y = 0; y < n; ++y) boundary_[inside][x * n + y] = p_.boundary_us(layouts_[x], layouts_[y], inside != 0);
      }
    }
    allowed_.assign(cells_.size(), 1);
  }

  int32_t FindLayout(const Layout& layout) {
    // Where boundaries cost nothing and layouts may differ, only the number of devices matters.
    Layout seen = p_.boundary_us || p_.one_layout ? layout : Layout{1, layout.devices(), 1};
    auto at = std::find(layouts_.begin(), layouts_.end(), seen);
    if (at == layouts_.end()) at = layouts_.insert(layouts_.end(), seen);
    return static_cast<int32_t>(at - layouts_.begin());
  }

  // A stage may begin with `left` devices unused: it is inside a node, or begins where one does.
  bool Fits(int32_t left, int32_t count) const {
    int32_t begin = (p_.devices - left) % p_.per_node;
    return begin == 0 || begin + count <= p_.per_node;
  }

  // Whether the boundary before the last `left` devices lies within a node.
  bool Inside(int32_t left) const { return (p_.devices - left) % p_.per_node != 0; }

  // Devices that stages i and later may share: those that the stages before and after can use up.
  void ReachableDevices() {
    size_t all = static_cast<size_t>(p_.devices) + 1;
    std::vector<std::vector<char>> before(p_.stages + 1, std::vector<char>(all)), after = before;
    before[0][p_.devices] = 1;
    after[p_.stages][0] = 1;
    for (int32_t i = 0; i < p_.stages; ++i) {
      for (int32_t n = 0; n <= p_.devices; ++n) {
        for (int32_t c : p_.counts) {
          if (n >= c && before[i][n] && Fits(n, c)) before[i + 1][n - c] = 1;
        }
      }
    }
    for (int32_t i = p_.stages - 1; i >= 0; --i) {
      for (int32_t n = 0; n <= p_.devices; ++n) {
        for (int32_t c : p_.counts) {
          if (n >= c && after[i + 1][n - c] && Fits(n, c)) after[i][n] = 1;
        }
      }
    }
    device_index_.assign(p_.stages + 1, std::vector<int32_t>(all, -1));
    reachable_.resize(p_.stages + 1);
    for (int32_t i = 0; i <= p_.stages; ++i) {
      for (int32_t n = 0; n <= p_.devices; ++n) {
        if (!before[i][n] || !after[i][n]) continue;
        device_index_[i][n] = static_cast<int32_t>(reachable_[i].size());
        reachable_[i].push_back(n);
      }
    }
  }

  // prefix_[i]: the least sum of t of the stages before i, by what they leave over. Layouts and boundaries are ignored.
  void BestPrefixes() {
    prefix_.resize(p_.stages);
    rest_.resize(p_.stages);
    for (int32_t i = 0; i < p_.stages; ++i) {
      prefix_[i].assign(reachable_[i].size() * (p_.layers + 1), kNever);
      rest_[i].assign(prefix_[i].size() * layouts_.size(), kNever);
    }
    longest_ = o_.cutoff_us / p_.micro_batches;  // the objective is at least G * max t
    Windows(longest_);
    prefix_[0][StateIndex(0, p_.devices, p_.layers)] = 0;
    for (int32_t i = 0; i + 1 < p_.stages; ++i) {
      for (int32_t c : p_.counts) {
        std::vector<double> least(p_.layers + 1, kNever);  // t by layers
        int32_t most = 0;
        for (size_t x = 0; x < layouts_.size(); ++x) {
          if (layouts_[x].devices() != c) continue;
          for (int32_t k = 1; k <= most_[i * layouts_.size() + x]; ++k) {
            const Cell& cell = cells_[CellIndex(i, static_cast<int32_t>(x), k)];
            if (cell.end == cell.begin) continue;
            least[k] = std::min(least[k], points_[cell.begin].t);
            most = std::max(most, k);
          }
        }
        for (int32_t n : reachable_[i]) {
          if (most == 0 || n < c || device_index_[i + 1][n - c] < 0 || !Fits(n, c)) continue;
          auto [low, high] = Window(i, device_index_[i][n]);
          auto [low2, high2] = Window(i + 1, device_index_[i + 1][n - c]);
          double* to = &prefix_[i + 1][StateIndex(i + 1, n - c, 0)];
          for (int32_t l = low; l <= high; ++l) {
            double sum = prefix_[i][StateIndex(i, n, l)];
            if (sum == kNever) continue;
            for (int32_t k = std::max(1, l - high2); k <= std::min(most, l - low2); ++k) to[l - k] = std::min(to[l - k], sum + least[k]);
          }
        }
      }
    }
  }

  // ---- within limits ----

  // Layers that a stage can hold, and the stages from i on, or before i, on so many devices, when no t is above T.
  void Windows(double limit) {
    size_t n = layouts_.size();
    most_.assign(p_.stages * n, 0);
    for (int32_t i = 0; i < p_.stages; ++i) {
      for (size_t x = 0; x < n; ++x) {
        for (int32_t l = most(); l > 0; --l) {
          size_t at = CellIndex(i, static_cast<int32_t>(x), l);
          if (cells_[at].end == cells_[at].begin || !allowed_[at] || points_[cells_[at].begin].t > limit) continue;
          most_[i * n + x] = l;
          break;
        }
      }
    }
    hold_after_.assign(p_.stages + 1, {});
    hold_before_.assign(p_.stages + 1, {});
    for (int32_t i = 0; i <= p_.stages; ++i) {
      hold_after_[i].assign(reachable_[i].size(), -1);
      hold_before_[i].assign(reachable_[i].size(), -1);
    }
    hold_after_[p_.stages][0] = 0;
    hold_before_[0][0] = 0;
    auto each = [&](int32_t i, auto&& use) {
      for (int32_t left : reachable_[i]) {
        for (size_t x = 0; x < n; ++x) {
          int32_t c = layouts_[x].devices();
          if (most_[i * n + x] == 0 || left < c || device_index_[i + 1][left - c] < 0 || !Fits(left, c)) continue;
          use(device_index_[i][left], device_index_[i + 1][left - c], most_[i * n + x]);
        }
      }
    };
    for (int32_t i = 0; i < p_.stages; ++i) {
      each(i, [&](int32_t from, int32_t to, int32_t l) {
        if (hold_before_[i][from] >= 0) hold_before_[i + 1][to] = std::max(hold_before_[i + 1][to], hold_before_[i][from] + l);
      });
    }
    for (int32_t i = p_.stages - 1; i >= 0; --i) {
      each(i, [&](int32_t from, int32_t to, int32_t l) {
        if (hold_after_[i + 1][to] >= 0) hold_after_[i][from] = std::max(hold_after_[i][from], hold_after_[i + 1][to] + l);
      });
    }
  }

  // Layers that stages i and later may share: [first, second].
  std::pair<int32_t, int32_t> Window(int32_t i, int32_t index) const {
    int32_t before = hold_before_[i][index], after = hold_after_[i][index];
    if (before < 0 || after < 0) return {1, 0};
    return {std::max(p_.layers - before, (p_.stages - i) * p_.fewest_layers), std::min(after, p_.layers - i * p_.fewest_layers)};
  }

  // What stage i with layout x sees of the suffix (l, n) behind it: pairs with rising rest and falling boundary.
  void Links(int32_t i, int32_t l, int32_t n, size_t x, std::vector<Link>& links) const {
    links.clear();
    if (i + 1 == p_.stages) {
      links.push_back({});
      return;
    }
    size_t count = layouts_.size();
    const double* rest = &rest_[i + 1][StateIndex(i + 1, n, l) * count];
    const double* boundary_of = &boundary_[Inside(n)][x * count];
    for (size_t y = 0; y < count; ++y) {
      if (rest[y] == kNever) continue;
      double boundary = boundary_of[y];
      links.push_back({boundary, rest[y] + boundary});
    }
    if (links.size() < 2) return;
    std::sort(links.begin(), links.end(),
              [](const Link& a, const Link& b) { return a.rest != b.rest ? a.rest < b.rest : a.boundary < b.boundary; });
    size_t kept = 1;
    for (size_t k = 1; k < links.size(); ++k) {
      if (links[k].boundary < links[kept - 1].boundary) links[kept++] = links[k];
    }
    links.resize(kept);
  }

  // The first point of a cell within the limits behind a link, or `end`.
  uint32_t First(const Cell& cell, const Link& link, double t_limit, double h_limit) const {
    uint32_t at = cell.begin;
    while (at < cell.end && points_[at].e + link.rest > h_limit) ++at;
    return at < cell.end && points_[at].t + link.boundary <= t_limit ? at : cell.end;
  }

  // The plan of the least sum of t with every t <= T and E <= H.
  bool Check(double t_limit, double h_limit, Staircase& out) {
    ++checks_;
    Windows(t_limit);
    size_t count = layouts_.size();
    std::vector<Link> links;
    for (int32_t i = p_.stages - 1; i >= 0; --i) {
      std::fill(rest_[i].begin(), rest_[i].end(), kNever);
      bool last = i + 1 == p_.stages;
      for (int32_t n2 : reachable_[i + 1]) {
        auto [low2, high2] = last ? std::pair<int32_t, int32_t>{0, 0} : Window(i + 1, device_index_[i + 1][n2]);
        for (int32_t l2 = low2; l2 <= high2; ++l2) {
          if (!last && Dead(i + 1, n2, l2)) continue;
          for (size_t x = 0; x < count; ++x) {
            int32_t n = n2 + layouts_[x].devices();
            if (most_[i * count + x] == 0 || n > p_.devices || device_index_[i][n] < 0 || !Fits(n, layouts_[x].devices())) continue;
            auto [low, high] = Window(i, device_index_[i][n]);
            int32_t from = std::max(low - l2, p_.fewest_layers), to = std::min(high - l2, most_[i * count + x]);
            if (from > to) continue;
            Links(i, l2, n2, x, links);
            for (int32_t k = from; k <= to; ++k) {
              size_t at = CellIndex(i, static_cast<int32_t>(x), k);
              const Cell& cell = cells_[at];
              if (cell.begin == cell.end || !allowed_[at]) continue;
              double& best = rest_[i][StateIndex(i, n, k + l2) * count + x];
              double room = h_limit - prefix_[i][StateIndex(i, n, k + l2)];
              for (const Link& link : links) {
                if (points_[cell.begin].t + link.rest >= best) break;
                uint32_t point = First(cell, link, t_limit, h_limit);
                if (point == cell.end) continue;
                double sum = points_[point].t + link.rest;
                if (sum <= room && sum < best) best = sum;
              }
            }
          }
        }
      }
    }
    const double* first = &rest_[0][StateIndex(0, p_.devices, p_.layers) * count];
    size_t x = static_cast<size_t>(std::min_element(first, first + count) - first);
    if (first[x] == kNever) return false;
    Trace(static_cast<int32_t>(x), t_limit, h_limit, out);
    return true;
  }

  bool Dead(int32_t i, int32_t n, int32_t l) const {
    const double* rest = &rest_[i][StateIndex(i, n, l) * layouts_.size()];
    return std::all_of(rest, rest + layouts_.size(), [](double r) { return r == kNever; });
  }

  // Goes the way that Check found, by finding each step again.
  void Trace(int32_t x, double t_limit, double h_limit, Staircase& out) {
    out.steps.clear();
    size_t count = layouts_.size();
    int32_t n = p_.devices, l = p_.layers;
    for (int32_t i = 0; i < p_.stages; ++i) {
      double want = rest_[i][StateIndex(i, n, l) * count + x];
      int32_t n2 = n - layouts_[x].devices();
      Step step{x, 0, 0, 0};
      int32_t next = -1;
      for (int32_t k = 1; k <= l && step.layers == 0; ++k) {
        size_t at = CellIndex(i, x, k);
        if (cells_[at].begin == cells_[at].end || !allowed_[at] || (i + 1 == p_.stages) != (k == l)) continue;
        for (size_t y = 0; y < count && step.layers == 0; ++y) {
          Link link;
          if (i + 1 < p_.stages) {
            double rest = rest_[i + 1][StateIndex(i + 1, n2, l - k) * count + y];
            if (rest == kNever) continue;
            link.boundary = boundary_[Inside(n2)][x * count + y];
            link.rest = rest + link.boundary;
          }
          uint32_t point = First(cells_[at], link, t_limit, h_limit);
          if (point == cells_[at].end || points_[point].t + link.rest != want) continue;
          step.layers = k;
          step.point = point;
          step.boundary = link.boundary;
          next = static_cast<int32_t>(y);
        }
      }
      out.steps.push_back(step);
      n = n2, l -= step.layers, x = next;
    }
    double after = 0, end = 0;
    out.largest = 0;
    for (size_t i = out.steps.size(); i-- > 0;) {
      const Corner& point = points_[out.steps[i].point];
      double t = point.t + out.steps[i].boundary;
      out.largest = std::max(out.largest, t);
      end = std::max(end, point.e + out.steps[i].boundary + after);
      after += t;
    }
    out.end = std::max(end, after);
    out.cost = weight_ * out.largest + out.end;
  }

  // ---- search ----

  // The best plan below `cutoff` that `allowed_` leaves; lowers `bound` where it has to stop early.
  Staircase Best(double cutoff, double& bound, const Staircase* start = nullptr) {
    Staircase best;
    best.cost = cutoff;
    if (start != nullptr && start->cost < cutoff) best = *start;
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
  void Push(Box& box, std::priority_queue<Box, std::vector<Box>, std::greater<>>& open) const {
    box.bound = weight_ * box.t_lo + box.h_lo;
    open.push(box);
  }
  double SumOf(const Staircase& plan) const {
    double sum = 0;
    for (size_t i = plan.steps.size(); i-- > 0;) sum = points_[plan.steps[i].point].t + (sum + plan.steps[i].boundary);
    return sum;
  }

  struct Branch {                         // plans that begin as `plan` does for `fixed` stages and then avoid `without`
    Staircase plan;
    int32_t fixed = 0;
    std::vector<size_t> without;          // cells of stage `fixed`
    bool operator>(const Branch& o) const { return plan.cost > o.plan.cost; }
  };

  // Lawler: the plans other than the best are split by the first stage in which they differ from it.
  void TopK(InterStageResult& out) {
    std::vector<Layout> alike = p_.one_layout ? layouts_ : std::vector<Layout>{Layout{}};
    std::vector<double> costs(static_cast<size_t>(std::max(o_.top, 1)), o_.cutoff_us);  // the best so far, for the cutoff
    auto cutoff = [&] { return costs.back(); };
    auto note = [&](double cost) {
      costs.insert(std::upper_bound(costs.begin(), costs.end(), cost), cost);
      costs.pop_back();
    };
    std::priority_queue<Branch, std::vector<Branch>, std::greater<>> open;
    double bound = kNever;
    Staircase warm;
    if (!o_.warm.empty()) warm = Warm();
    for (size_t x = 0; x < alike.size(); ++x) {
      if (p_.one_layout) AllowOnly(static_cast<int32_t>(x));
      const std::vector<char> base = allowed_;
      bool usable = warm.cost < kNever && (!p_.one_layout || warm.steps[0].layout == static_cast<int32_t>(x));
      Branch whole;
      whole.plan = Best(cutoff(), bound, usable ? &warm : nullptr);
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
        if (p_.one_layout) {
          AllowOnly(branch.plan.steps[0].layout);
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

  void AllowOnly(int32_t layout) {
    size_t n = layouts_.size(), run = static_cast<size_t>(p_.layers) + 1;
    for (size_t cell = 0; cell < allowed_.size(); ++cell) allowed_[cell] = static_cast<int32_t>(cell / run % n) == layout;
  }
  void Fix(int32_t stage, const Step& step) {
    size_t run = layouts_.size() * (p_.layers + 1);
    std::fill(allowed_.begin() + static_cast<int64_t>(stage * run), allowed_.begin() + static_cast<int64_t>((stage + 1) * run), 0);
    allowed_[CellIndex(stage, step.layout, step.layers)] = 1;
  }
  // The best plan of the shapes given, if they still make one.
  Staircase Warm() {
    Staircase plan;
    if (static_cast<int32_t>(o_.warm.size()) != p_.stages) return plan;
    for (int32_t i = 0; i < p_.stages; ++i) {
      const StageShape& shape = o_.warm[i];
      size_t known = layouts_.size();
      int32_t x = FindLayout(shape.layout);
      if (layouts_.size() > known) layouts_.pop_back();
      if (static_cast<size_t>(x) >= known || shape.layers < 1 || shape.layers > p_.layers) {
        std::fill(allowed_.begin(), allowed_.end(), 1);
        return plan;
      }
      Fix(i, {x, shape.layers, 0, 0});
    }
    double unused = kNever;
    plan = Best(o_.cutoff_us, unused);
    if (plan.steps.empty()) plan.cost = kNever;
    std::fill(allowed_.begin(), allowed_.end(), 1);
    return plan;
  }

  InterStagePlan Finish(const Staircase& plan) const {
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

  const InterStageProblem& p_;
  const InterStageOptions& o_;
  const double weight_;                   // G - 1
  std::vector<Layout> layouts_;
  std::vector<Corner> points_;
  std::vector<Cell> cells_;               // by stage, layout, layers
  std::vector<char> allowed_;             // the same
  std::vector<double> boundary_[2];       // between nodes, inside one; by layout, layout
  std::vector<std::vector<int32_t>> device_index_, reachable_;  // by stage: of devices left; the devices left
  std::vector<std::vector<double>> prefix_;                     // by stage: [devices left, layers left]
  std::vector<std::vector<double>> rest_;                       // by stage: [devices left, layers left, layout]: A, or infinity
  std::vector<int32_t> most_;                                   // by stage, layout
  std::vector<std::vector<int32_t>> hold_before_, hold_after_;  // by stage, devices left
  double longest_ = kNever;            // t of use
  int64_t checks_ = 0;
  bool stopped_ = false;
};

}  // namespace

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
    return MakeError(p.layers, " layers are too few for ", p.stages, " stages; take at most ", p.layers / p.fewest_layers, " stages");
  }
  for (int32_t count : p.counts) {
    if (count < 1 || (count < p.per_node ? p.per_node % count : count % p.per_node) != 0) {
      return MakeError("a stage of ", count, " devices neither divides a node of ", p.per_node, " nor is whole nodes");
    }
  }
  return Solver(p, options).Run();
}

}  // namespace interlace::plan
