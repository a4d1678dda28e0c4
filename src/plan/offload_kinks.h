// offload_kinks.h — where t and t + d bend over the offload ratios. Inside the room only (simplex.h).
//
// What overlaps in a phase is linear in the ratios; Mist's Algorithm 1 makes a piecewise linear time of it, by which
// class of work is done first, second and so on. Two classes done at once: there a piece ends.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/simplex.h"

namespace interlace::plan {

// c + a . x
struct Affine {
  double c = 0;
  Ratios a{};
  double At(const Ratios& x) const { return c + a[0] * x[0] + a[1] * x[1] + a[2] * x[2] + a[3] * x[3]; }
  Affine& operator+=(const Affine& o) {
    c += o.c;
    for (int k = 0; k < kKinds; ++k) a[k] += o.a[k];
    return *this;
  }
  friend Affine operator+(Affine l, const Affine& r) { return l += r; }
  friend Affine operator*(double f, Affine v) {
    v.c *= f;
    for (double& a : v.a) a *= f;
    return v;
  }
  friend Affine operator-(const Affine& l, const Affine& r) { return l + -1 * r; }
};
// Of one layer kind in a phase, by class of work.
using Overlapped = std::array<Affine, 4>;  // compute, device-device, in, out

// What overlaps in a phase, of blocks, embedding and head. What is exposed is linear and makes no kink.
std::vector<Overlapped> OverlapsOf(const StageSums& sums, int32_t layers, int32_t full, int32_t selective);

// Adds the planes (= 0) on which the piece of Algorithm 1 that holds at x ends: two classes would be done at once.
void AddKinks(const OverlapFactors& factors, const Overlapped& amounts, const Ratios& x, std::vector<Affine>& planes);

}  // namespace interlace::plan
