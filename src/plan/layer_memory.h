// layer_memory.h — the memory of one layer's program as expressions in b, s and tp: what stays between the passes, and
// the bytes alive at every op of the forward and of the backward part.
//
// Bytes are counted by storage, as ir/liveness.h does, from the definition to the last op that touches it:
//
//     hidden ─────────┬───────────────────────────────┐      results that a backward op reads live from one pass to
//     norm, q, k, v ──┼────────────┐                  │      the other: saved. The activation that enters counts as
//     scores          │            │                  │      this layer's, the one that leaves as the next one's.
//     ────────────── forward ─── saved ─── backward ──┴──
//
// Not counted: parameters and their gradients (a stage holds them whole or in shards, by its strategy), the batch, and
// what all layers share (rotary tables, masks), which is `shared`.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace::plan {

// Candidates of a peak: the largest of their values under a binding.
using Candidates = std::vector<Dim>;

struct LayerMemory {
  Dim saved;           // bytes alive between the passes
  Dim shared;          // of inputs that all layers share and the backward part reads
  Dim boundary;        // of the activation that enters (the embedding's: that leaves)
  Candidates forward;  // bytes alive at an op, `saved` among them; expressions that differ, in op order
  Candidates backward;
};

// Adds expressions to program.dims. Error: an expression that overflows, no forward or backward part.
Result<LayerMemory> MemoryOfLayer(Program& program);

// Bytes alive at each op of a phase, its own results among them, of a captured layer or of one that passes have cut
// into units.
struct LiveBytes {
  std::vector<Dim> at;  // by place in the phase
  int32_t middle = 0;   // first op of the backward part
  Dim saved, shared, boundary;
};
// `receives`: what a reduction receives has memory until it is waited for (CPU transports). Error: as above.
Result<LiveBytes> CountLive(Program& program, const Phase& phase, bool receives);

// The largest candidate. Error: an unbound symbol, 64 bits.
Result<int64_t> Largest(const DimTable& dims, const Candidates& candidates, const Binding& binding);

// The first op of the backward part, as an index into the phase; the number of ops when there is none.
int32_t FirstBackward(const Program& program, const Phase& phase);

}  // namespace interlace::plan
