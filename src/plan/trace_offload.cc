// The exact trade-off between t and t + d over the offload ratios (simplex.h).
#include <algorithm>
#include <cmath>

#include "plan/offload_facet.h"

namespace interlace::plan {
namespace {

constexpr int kRounds = 6;
constexpr double kSmall = OffloadFacet::kSmall;

class Tracer {
 public:
  Tracer(const StageSums& sums, const OffloadRegion& region, int32_t layers, int32_t full, int32_t selective,
         const IsBeaten& beaten)
      : sums_(sums),
        region_(region),
        beaten_(beaten),
        overlaps_(OverlapsOf(sums, layers, full, selective)),
        layers_(layers),
        full_(full),
        selective_(selective) {}

  std::vector<TradeOff> Run() {
    for (size_t row = 0; row < region_.rows.size(); ++row) TraceFacet(row);
    Prune(0);
    return std::move(out_);
  }

 private:
  // The facet where a peak just fits: bounded by ratios, the other peaks and the host.
  void TraceFacet(size_t row) {
    OffloadFacet facet(region_, row);
    if (facet.empty()) return;
    std::vector<Ratios> corners;
    facet.Lines(corners, lines_);
    if (corners.empty()) return;
    // Kinks that cut the facet, found by asking at points spread over it: mixes of its corners by a fixed sequence.
    std::sort(corners.begin(), corners.end());
    auto same = [](const Ratios& a, const Ratios& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](double l, double r) { return std::abs(l - r) < kSmall; });
    };
    corners.erase(std::unique(corners.begin(), corners.end(), same), corners.end());
    auto ask = [&](const Ratios& x) {
      kinks_.clear();
      for (const Overlapped& amounts : overlaps_) AddKinks(sums_.factors, amounts, x, kinks_);
      for (Affine& p : kinks_) {
        for (int k = 0; k < kKinds; ++k) p.a[k] = region_.allowed[k] ? p.a[k] : 0;
        if (!OffloadFacet::Normalize(p)) continue;
        // Only where corners lie on both sides.
        bool above = false, below = false;
        for (const Ratios& corner : corners) above |= p.At(corner) > kSmall, below |= p.At(corner) < -kSmall;
        if (above && below) facet.AddPlane(p);
      }
    };
    Ratios centre{};
    for (const Ratios& corner : corners) {
      for (int k = 0; k < kKinds; ++k) centre[k] += corner[k] / static_cast<double>(corners.size());
    }
    ask(centre);
    for (const Ratios& corner : corners) ask(Between(corner, centre, 0.5)), ask(Between(corner, centre, 0.05));
    // Where an edge turns out to bend, the kinks there are not known yet.
    const size_t begin = out_.size();
    for (int round = 0; round < kRounds; ++round) {
      out_.resize(begin);
      facet.Lines(points_, lines_);
      AddEdges();
      Prune(begin);
      const size_t known = facet.planes();
      for (const auto& [from, to] : Bent(begin)) {
        for (double share : {0.1, 0.3, 0.5, 0.7, 0.9})
          ask(Between(Between(from, to, share), centre, 1e-3)), ask(Between(from, to, share));
      }
      if (facet.planes() == known) break;
    }
    // Where one end beats the other it stands for the edge.
    for (size_t i = begin; i < out_.size(); ++i) {
      TradeOff& e = out_[i];
      if (e.stable_us[0] <= e.stable_us[1] && e.total_us[0] <= e.total_us[1]) {
        e.to = e.from, e.stable_us[1] = e.stable_us[0], e.total_us[1] = e.total_us[0];
      } else if (e.stable_us[1] <= e.stable_us[0] && e.total_us[1] <= e.total_us[0]) {
        e.from = e.to, e.stable_us[0] = e.stable_us[1], e.total_us[0] = e.total_us[1];
      }
    }
  }

  static Ratios Between(const Ratios& a, const Ratios& b, double share) {
    Ratios x;
    for (int k = 0; k < kKinds; ++k) x[k] = a[k] + share * (b[k] - a[k]);
    return x;
  }

  // Edges that are not linear at their middle or at a third.
  std::vector<std::pair<Ratios, Ratios>> Bent(size_t begin) {
    std::vector<std::pair<Ratios, Ratios>> bent;
    Lanes lanes;
    Fill(lanes);
    constexpr double kShares[] = {0.5, 0.31};
    for (size_t i = begin; i < out_.size(); i += Lanes::kWidth / 2) {
      const size_t edges = std::min<size_t>(Lanes::kWidth / 2, out_.size() - i);
      for (size_t e = 0; e < 2 * edges; ++e)
        Put(lanes, e, Between(out_[i + e / 2].from, out_[i + e / 2].to, kShares[e % 2]));
      lanes.count = static_cast<int>(2 * edges);
      EvaluateLanes(sums_, lanes, Wanted::kTimes);
      for (size_t e = 0; e < 2 * edges; ++e) {
        const TradeOff& edge = out_[i + e / 2];
        auto off = [&](const std::array<double, 2>& ends, double value) {
          return std::abs(ends[0] + kShares[e % 2] * (ends[1] - ends[0]) - value) > 1e-8 * value;
        };
        if (off(edge.stable_us, lanes.stable_us[e]) || off(edge.total_us, lanes.total_us[e]))
          bent.emplace_back(edge.from, edge.to);
      }
    }
    return bent;
  }

  void Fill(Lanes& lanes) const {
    lanes.layers.fill(layers_), lanes.full.fill(full_), lanes.selective.fill(selective_), lanes.in_flight.fill(1);
  }
  static void Put(Lanes& lanes, size_t at, const Ratios& x) {
    lanes.wo[at] = x[0], lanes.go[at] = x[1], lanes.oo[at] = x[2], lanes.ao[at] = x[3];
  }

  // Evaluates the points of all lines and keeps the edges between neighbours that may be of use.
  void AddEdges() {
    values_.resize(points_.size());
    Lanes lanes;
    Fill(lanes);
    for (size_t i = 0; i < points_.size(); i += Lanes::kWidth) {
      lanes.count = static_cast<int>(std::min<size_t>(Lanes::kWidth, points_.size() - i));
      for (int e = 0; e < lanes.count; ++e) Put(lanes, e, points_[i + e]);
      EvaluateLanes(sums_, lanes, Wanted::kTimes);
      for (int e = 0; e < lanes.count; ++e) values_[i + e] = {lanes.stable_us[e], lanes.total_us[e]};
    }
    size_t from = 0;
    for (size_t to : lines_) {
      for (size_t i = from; i + 1 < to || i == from; ++i) {
        const size_t j = i + 1 < to ? i + 1 : i;
        const TradeOff edge{
            points_[i], points_[j], {values_[i].first, values_[j].first}, {values_[i].second, values_[j].second}};
        if (!beaten_ ||
            !beaten_(std::min(edge.stable_us[0], edge.stable_us[1]), std::min(edge.total_us[0], edge.total_us[1]))) {
          out_.push_back(edge);
        }
      }
      from = to;
    }
  }

  // Drops edges whose ideal corner some end beats.
  void Prune(size_t begin) {
    std::vector<std::pair<double, double>> ends, best;
    for (size_t i = begin; i < out_.size(); ++i) {
      const TradeOff& edge = out_[i];
      for (int e = 0; e < 2; ++e) ends.emplace_back(edge.stable_us[e], edge.total_us[e]);
    }
    std::sort(ends.begin(), ends.end());
    for (const auto& end : ends) {
      if (best.empty() || end.second < best.back().second) best.push_back(end);
    }
    std::vector<std::pair<double, double>> seen;
    auto end = std::remove_if(out_.begin() + static_cast<int64_t>(begin), out_.end(), [&](const TradeOff& edge) {
      const std::pair<double, double> corner{std::min(edge.stable_us[0], edge.stable_us[1]),
                                             std::min(edge.total_us[0], edge.total_us[1])};
      auto after = std::upper_bound(best.begin(), best.end(), corner,
                                    [](const auto& a, const auto& b) { return a.first < b.first; });
      if (after == best.begin()) return false;
      const auto& other = *std::prev(after);
      const bool single = edge.stable_us[0] == edge.stable_us[1] && edge.total_us[0] == edge.total_us[1];
      if (single && other == corner) {  // one of equal points is enough
        if (std::find(seen.begin(), seen.end(), corner) != seen.end()) return true;
        seen.push_back(corner);
        return false;
      }
      return other.second <= corner.second && other != corner;
    });
    out_.erase(end, out_.end());
  }

  const StageSums& sums_;
  const OffloadRegion& region_;
  const IsBeaten& beaten_;
  const std::vector<Overlapped> overlaps_;
  const int32_t layers_, full_, selective_;
  std::vector<Affine> kinks_;
  std::vector<Ratios> points_;                     // of all lines, one after another
  std::vector<std::pair<double, double>> values_;  // t and t + d there
  std::vector<size_t> lines_;                      // where each line's points end
  std::vector<TradeOff> out_;
};

}  // namespace

std::vector<TradeOff> TraceOffload(const StageSums& sums, const OffloadRegion& region, int32_t layers, int32_t full,
                                   int32_t selective, const IsBeaten& beaten) {
  return Tracer(sums, region, layers, full, selective, beaten).Run();
}

}  // namespace interlace::plan
