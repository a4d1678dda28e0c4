// residency.h — where the bytes of a storage are while a step runs: in memory, or out in the tier (docs/ir.md, "Out of
// memory").
//
//   state %6: f32[512] u0.exp_avg persistent out       lies in the tier between steps
//
//   ops                          %6           memory
//   reload.start(%6)             coming       taken from here
//   reload.wait(%6)              in           may be used
//   update.adamw(.., %6, ..)     in
//   offload.start(%6)            leaving      may be read
//   offload.wait(%6)             out          free from here
//
// States move over the whole step and keep their place from phase to phase; results and takes come back before the
// phase that took them out ends. Every step begins with each state where its declaration says, and nothing on its way.
#pragma once

#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ir/program.h"

namespace interlace {

enum class Place : uint8_t { kIn, kLeaving, kOut, kComing };
std::string_view PlaceName(Place place);  // "in memory", "on its way out", ...

// The place that an op moves its operands to; `from` is where they must be.
struct Move {
  Place from, to;
};
const Move* MoveOf(const Op& op);  // nullptr: not an offload or reload
// offload.start with clean=true: nothing is copied, because the tier still has these bytes, or because nothing needs
// them again (a state of one step whose memory comes back with fresh=true).
bool IsClean(const Op& op);
// reload.start with fresh=true: memory is taken, nothing is copied into it; it is written before it is read.
bool IsFresh(const Op& op);

struct Residency {
  std::vector<ValueId> states;  // that move, or lie out between steps; in program order
  // Places of those states where a phase begins, in their order; by phase, at its first run.
  std::unordered_map<const Phase*, std::vector<Place>> at_begin;
};

// Of a program whose offloads and reloads are well paired (verifier.h).
Residency ComputeResidency(const Program& program);

// What is allocated for the whole step: parameters without a unit (a gather brings the others), buffers, constants, and
// states that do not move. Calls f(entry of its table).
template <typename F>
void ForEachPersistent(const Program& program, const Residency& residency, F&& f) {
  const std::unordered_set<ValueId> moving(residency.states.begin(), residency.states.end());
  const auto add = [&](const auto& entry) {
    if (program.RootOf(entry.value) == entry.value && !moving.contains(entry.value)) f(entry);
  };
  for (const Param& p : program.params) {
    if (p.unit == kNone) add(p);
  }
  for (const Buffer& b : program.buffers) add(b);
  for (const Const& c : program.consts) add(c);
  for (const State& s : program.states) add(s);
}

}  // namespace interlace
