// Whether a plan exists with every t <= T and E <= H, and which: one number per (stage, blocks left, devices left,
// layout).
#include "plan/inter_stage_solver.h"

namespace interlace::plan {

void InterStageSolver::Links(int32_t i, int32_t l, int32_t n, size_t x, std::vector<Link>& links) const {
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

bool InterStageSolver::Check(double t_limit, double h_limit, Staircase& out) {
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
        if (!p_.boundary_us) Links(i, l2, n2, 0, links);  // alike for every layout
        for (size_t x = 0; x < count; ++x) {
          int32_t n = n2 + layouts_[x].devices();
          if (most_[i * count + x] == 0 || n > p_.devices || device_index_[i][n] < 0 || !Fits(n, layouts_[x].devices()))
            continue;
          auto [low, high] = Window(i, device_index_[i][n]);
          int32_t from = std::max(low - l2, p_.fewest_layers), to = std::min(high - l2, most_[i * count + x]);
          if (from > to) continue;
          if (p_.boundary_us) Links(i, l2, n2, x, links);
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
              // whole_limit: least sum of t before stage i + A_i <= H
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

bool InterStageSolver::Dead(int32_t i, int32_t n, int32_t l) const {
  const double* rest = &rest_[i][StateIndex(i, n, l) * layouts_.size()];
  return std::all_of(rest, rest + layouts_.size(), [](double r) { return r == kNever; });
}

void InterStageSolver::Trace(int32_t x, double t_limit, double h_limit, Staircase& out) {
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

}  // namespace interlace::plan
