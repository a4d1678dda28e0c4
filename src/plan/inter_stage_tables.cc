// What the solver between stages knows before any limit: points, devices that stages may share, and the least time
// before each.
#include <tuple>

#include "plan/inter_stage_solver.h"

namespace interlace::plan {

void InterStageSolver::CollectPoints() {
  // Stages next to each other often have the same frontier, and then the same points.
  struct Seen {
    const Frontier* frontier = nullptr;
    std::vector<LayoutCell> cells;
  };
  std::vector<Seen> seen(p_.counts.size() *
                         (static_cast<size_t>(p_.layers) + 1));  // of the stage before, by count and layers
  struct Placed {
    int32_t stage, layers;
    LayoutCell cell;
  };
  std::vector<Placed> placed;
  for (int32_t i = 0; i < p_.stages; ++i) {
    for (size_t c = 0; c < p_.counts.size(); ++c) {
      if (p_.counts[c] > p_.devices) continue;
      for (int32_t l = p_.fewest_layers; l <= most(); ++l) {
        const Frontier& frontier = p_.frontier(
            {l, i == 0, i == p_.stages - 1, p_.counts[c], p_.micro_batches, std::min(p_.stages - i, p_.micro_batches)});
        Seen& before = seen[c * (static_cast<size_t>(p_.layers) + 1) + l];
        if (before.frontier != &frontier) before = {&frontier, CellsOf(frontier, p_.counts[c])};
        for (const LayoutCell& cell : before.cells) placed.push_back({i, l, cell});
      }
    }
  }
  cells_.assign(static_cast<size_t>(p_.stages) * layouts_.size() * (p_.layers + 1), {});
  for (const Placed& each : placed) cells_[CellIndex(each.stage, each.cell.layout, each.layers)] = each.cell.points;
  size_t n = layouts_.size();
  for (int inside = 0; inside < 2; ++inside) {
    boundary_[inside].assign(n * n, 0);
    if (!p_.boundary_us) continue;
    for (size_t x = 0; x < n; ++x) {
      for (size_t y = 0; y < n; ++y)
        boundary_[inside][x * n + y] = p_.boundary_us(layouts_[x], layouts_[y], inside != 0);
    }
  }
  allowed_.assign(cells_.size(), 1);
}

std::vector<InterStageSolver::LayoutCell> InterStageSolver::CellsOf(const Frontier& frontier, int32_t devices) {
  struct Raw {
    int32_t layout;
    Corner point;
  };
  std::vector<Raw> raw;
  for (const FrontierPoint& f : frontier) {
    double t = f.cost.stable_us, e = t + std::max(f.cost.extra_us, 0.0);
    if (LayoutOf(f.strategy).devices() != devices || !(t >= 0) || !std::isfinite(e)) continue;
    raw.push_back({FindLayout(LayoutOf(f.strategy)), {t, e, &f}});
  }
  std::sort(raw.begin(), raw.end(), [](const Raw& a, const Raw& b) {
    return std::tie(a.layout, a.point.t, a.point.e, a.point.source) <
           std::tie(b.layout, b.point.t, b.point.e, b.point.source);
  });
  std::vector<LayoutCell> cells;
  for (const Raw& r : raw) {
    const auto next = static_cast<uint32_t>(points_.size());
    if (cells.empty() || cells.back().layout != r.layout) {
      cells.push_back({r.layout, {next, next}});
    } else if (points_.back().e <= r.point.e) {
      continue;
    }
    points_.push_back(r.point);
    cells.back().points.end = next + 1;
  }
  return cells;
}

int32_t InterStageSolver::FindLayout(const Layout& layout) {
  // Where boundaries cost nothing and layouts may differ, only the number of devices matters.
  Layout seen = p_.boundary_us || p_.one_layout || p_.one_tp ? layout : Layout{1, layout.devices(), 1};
  auto at = std::find(layouts_.begin(), layouts_.end(), seen);
  if (at == layouts_.end()) at = layouts_.insert(layouts_.end(), seen);
  return static_cast<int32_t>(at - layouts_.begin());
}

void InterStageSolver::ReachableDevices() {
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

void InterStageSolver::BestPrefixes() {
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
          for (int32_t k = std::max(1, l - high2); k <= std::min(most, l - low2); ++k)
            to[l - k] = std::min(to[l - k], sum + least[k]);
        }
      }
    }
  }
}

void InterStageSolver::Windows(double limit) {
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
      if (hold_before_[i][from] >= 0)
        hold_before_[i + 1][to] = std::max(hold_before_[i + 1][to], hold_before_[i][from] + l);
    });
  }
  for (int32_t i = p_.stages - 1; i >= 0; --i) {
    each(i, [&](int32_t from, int32_t to, int32_t l) {
      if (hold_after_[i + 1][to] >= 0)
        hold_after_[i][from] = std::max(hold_after_[i][from], hold_after_[i + 1][to] + l);
    });
  }
}

}  // namespace interlace::plan
