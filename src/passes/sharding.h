// sharding.h — what shard, replicate and zero1 share: units and their states, and gradients that land in flat buffers.
//
//   Gradients of n > 1 ranks, one unit u after another:     of one rank, placed straight into the state:
//   %g = grad.begin() {units=[u]}                           %g into %grad+0 = grad.begin() {units=[u]} (pads with 0)
//   %dw: f32[..] into %g+0 = aten.mm(...)                   %dw: f32[..] into %grad+0 = aten.mm(...)
//   %r: f32[shard] into %grad+0 = reduce.start(%g)
//   ... until just before the next reduce.start (those of an eighth in all ride along; replicate: 8 MiB in all) ...
//   reduce.wait(%r)    release(%g)
// A gradient that is narrower than its parameter (see precision.h) is reduced as it is and widened into the state:
//   %r: bf16[shard] = reduce.start(%g)   ...   reduce.wait(%r)   release(%g)   %p: f32[shard] into %grad+0 = copy(%r)
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"
#include "passes/phase_editor.h"

namespace interlace {

// Attribute of a cast of a parameter at the captured level (set by `precision`): make it on the shard, and gather its
// result.
inline constexpr std::string_view kOnShard = "on_shard";

// Whether the elements fill a block of memory without gaps or overlaps, in any order of dimensions.
bool IsDense(const Type& type);
// Equal sizes and equal steps through memory, whatever the dtypes (the stride of a dimension of size 1 is never taken).
bool SameGeometry(const Type& a, const Type& b);

struct ShardingOptions {
  std::string axis = "dp";  // over which units are cut
  int64_t ranks = 1;        // along it
  std::string replicas;     // axes of ranks that hold the same shards and add up their gradients; empty: none
  int64_t copies = 1;       // ranks along them
  bool parts = false;       // gradients and optimizer states are parts of the shard, another on each of them
  // Nobody to add up gradients with: they are placed straight into the states.
  bool Alone() const { return ranks * copies == 1; }
  bool wait_next = true;  // wait for a reduce when a later one needs its place (gradients.cc), else at once
};

// Sizes come from the program's mesh where it has one (mesh.h), else from the option `ranks`. Error: a bad option, an
// axis that the mesh lacks, another size than it has.
Result<ShardingOptions> ReadShardingOptions(const Program& program, const PassOptions& options);

// Checks that the program is a captured one that can be cut into units. Error: what stands in the way.
Status CheckShardable(const Program& program, const ShardingOptions& options);

// Declares the axis and one unit per parameter, with the state `shard`, or `full` when the parameters are resident
// (always so with one rank); resident parameters and their views then lie in that state.
void DeclareUnits(Program& program, const ShardingOptions& options, bool resident);

// Declares the units and calls `change` for each phase, with what it was like before.
template <typename F>
void ForEachPhaseOfUnits(Program& program, const ShardingOptions& options, bool resident, F&& change) {
  std::vector<PhaseFacts> facts;
  for (const Phase& phase : program.phases) facts.emplace_back(program, phase);
  DeclareUnits(program, options, resident);
  for (size_t p = 0; p < program.phases.size(); ++p) {
    PhaseEditor edit(program, program.phases[p]);
    change(edit, facts[p]);
    edit.Finish();
  }
}

// Replaces the `grad` markers of the phase. `whole`: every rank ends with the whole summed gradient (its own part
// reduced, the others gathered in place), else with its shard.
void PlaceGradients(Program& program, PhaseEditor& edit, const PhaseFacts& facts, const ShardingOptions& options,
                    bool whole);

}  // namespace interlace
