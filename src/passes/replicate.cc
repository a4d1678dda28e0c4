// replicate.cc — data parallelism with whole parameters on every rank, in the state u0.full.
//   before: grad(%w, %dw) {bwd}
//   replicate:  %r into %grad+shard*rank_dp = reduce.start(%g) {bwd units=[u0]}   its own part of the sum ...
//               reduce.wait(%r) {bwd}                                             ... one reduce later
//               %s into %grad+0 = gather.start(%r) {bwd units=[u0]}               and the others' parts, in place
// An all-reduce made of the two halves that shard and zero1 use, so the bits are theirs.
//   zero1:      %r into %grad+0 = reduce.start(%g) {bwd units=[u0]}
// Gradients and optimizer states live in shards (ZeRO-1 and 2): in the update phase, which `update` adds, a rank
// updates its own part of u0.full and gathers the others' parts in place.
//
// On several axes (zero1(axis=replica+dp)) all their ranks have shards of their own: parts of a unit go between groups
// of neighbours once each way (transport/collectives.h), and the way back, after the update, may wait for the next step
// (reposition_update).
//
// Options: axis (dp), ranks, replicas (none), wait=next|now. Errors: as for shard.
#include <algorithm>
#include <string>

#include "passes/passes.h"
#include "passes/sharding.h"

namespace interlace {
namespace {

// `whole`: every rank ends with whole gradients.
Result<bool> MakeResident(Program& program, const PassOptions& options, bool whole) {
  INTERLACE_ASSIGN(ShardingOptions sharding, ReadShardingOptions(program, options));
  const bool deals =
      std::any_of(program.groups.begin(), program.groups.end(), [](const Group& g) { return g.orthogonal; });
  if (const size_t last = sharding.axis.rfind(','); deals && last != std::string::npos && sharding.replicas.empty()) {
    // Whole matrices are dealt to the ranks along one axis.
    sharding.replicas = sharding.axis.substr(0, last);
    sharding.axis.erase(0, last + 1);
    sharding.ranks = program.AxisSize(sharding.axis);
    sharding.copies = program.AxisSize(sharding.replicas);
  }
  INTERLACE_TRY(CheckShardable(program, sharding));
  ForEachPhaseOfUnits(program, sharding, /*resident=*/true, [&](PhaseEditor& edit, const PhaseFacts& facts) {
    PlaceGradients(program, edit, facts, sharding, whole);
  });
  return true;
}

}  // namespace

Result<bool> Replicate(Program& program, const PassOptions& options) {
  return MakeResident(program, options, /*whole=*/true);
}

Result<bool> Zero1(Program& program, const PassOptions& options) {
  return MakeResident(program, options, /*whole=*/false);
}

}  // namespace interlace
