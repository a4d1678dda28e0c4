// offload_facet.h — the part of an offload region where one peak just fits, cut by planes into pieces. Inside the room
// only (simplex.h).
#pragma once

#include <vector>

#include "plan/offload_kinks.h"

namespace interlace::plan {

class OffloadFacet {
 public:
  static constexpr double kSmall = 1e-9;  // of ratios and of planes whose largest coefficient is 1

  // Where row `row` of the region is tight; bounded by the ratios, the other peaks and the host.
  OffloadFacet(const OffloadRegion& region, size_t row);
  bool empty() const { return empty_; }  // the peak does not depend on the ratios

  // A plane (= 0) that cuts the facet; one that is known is left aside.
  void AddPlane(Affine plane);
  size_t planes() const { return planes_.size(); }

  // The points where planes cross each line of the facet, in order, a line being where (dimensions - 2) planes meet:
  // those of all lines one after another, and where each line's end.
  void Lines(std::vector<Ratios>& points, std::vector<size_t>& ends);

  // Scaled so that the largest coefficient is 1; false where it does not depend on the ratios.
  static bool Normalize(Affine& plane);

 private:
  struct Line {  // x = at + s * along, of use from s = low to high
    Ratios at{}, along{};
    double low = 0, high = 1;
  };
  // Where the facet and the planes meet; false: they are parallel.
  bool Solve(const Affine* a, const Affine* b, Line& line) const;
  bool Clip(Line& line) const;  // to what is inside; false: nothing
  void Follow(const Affine* a, const Affine* b, std::vector<Ratios>& points, std::vector<size_t>& ends);
  bool Inside(Ratios& x) const;  // rounds x into the ratios' range

  const OffloadRegion& region_;
  std::vector<int> free_;  // kinds that may be on the host
  Affine tight_;
  bool empty_ = false;
  std::vector<Affine> planes_;
  std::vector<double> cuts_;
};

}  // namespace interlace::plan
