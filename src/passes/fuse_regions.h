// fuse_regions.h — which ops of a phase become regions: what pass `fuse` (fuse.cc) finds before it changes anything.
//
// The level of an op is the number of ops that no region has (products, attention, convolutions, ...) on the longest
// path to it. A region is a connected component of ops of one level and one part (forward, backward), so nothing
// outside lies between two of its ops. Ops of the backward part that were captured early sink to the level of their
// users: no forward region makes what backward can make itself. Two components of one level that read the same value,
// of as many elements as they make, are one region, which reads it once; not more, for all they give is there at once.
//
// Sizes that are not numbers, ops that draw, write or are unknown here, and what someone writes stay outside.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "passes/phase_editor.h"

namespace interlace {

// What fuse is asked for.
struct FuseOptions {
  int64_t least = 2;                 // ops of a region
  std::vector<std::string> modules;  // paths that a region's modules begin with; none: all
};

class FuseRegions {
 public:
  enum class Kind : uint8_t { kFuse, kView, kOther };
  struct Region {
    std::vector<int32_t> ops;    // indices into the phase's ops, ascending
    std::vector<ValueId> gives;  // what is read outside, directly or through a view there that someone reads
  };

  FuseRegions(const Program& program, const Phase& phase, const FuseOptions& options);

  const Op& At(int32_t index) const { return program_.op(phase_.ops[index]); }
  // Ops whose order is kept whatever they read: draws of one generator, modules in Python.
  bool IsOrdered(int32_t index) const { return At(index).rng || At(index).kind == OpKind::kCallPython; }
  // The op that made the storage of an operand; -1: none of this phase.
  int32_t MakerOf(ValueId id) const { return facts.def[program_.RootOf(id)]; }
  // A view of what stays inside a region: those who read it are there too.
  bool IsInside(int32_t index) const;

  PhaseFacts facts;
  int32_t count;               // ops of the phase
  std::vector<Kind> kind;      // by op
  std::vector<int32_t> level;  // by op
  std::vector<Region> regions;
  std::vector<int32_t> region_of;  // by op; -1: none
  std::vector<char> outside;       // by root: read outside of the region that makes it

 private:
  bool IsChosen(const Op& op) const;
  bool MayFuse(const Op& op) const;
  void FindLevels();
  int32_t Find(int32_t i);
  void FindComponents();
  void FindRegions();
  void FindGives();
  void JoinReaders();

  const Program& program_;
  const Phase& phase_;
  const FuseOptions& options_;
  std::vector<int32_t> parent_;
};

// The name of an ATen op without its overload; "": another op.
std::string_view AtenName(const Op& op);

}  // namespace interlace
