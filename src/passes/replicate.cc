#include "passes/replicate.h"

#include "passes/sharding.h"

namespace interlace {
namespace {

// `whole`: every rank ends with whole gradients.
Result<bool> MakeResident(Program& program, const PassOptions& options, bool whole) {
  INTERLACE_ASSIGN(ShardingOptions sharding, ReadShardingOptions(program, options));
  INTERLACE_TRY(CheckShardable(program, sharding));
  Phase& phase = *program.MicroBatchPhase();
  PhaseFacts facts(program, phase);
  DeclareUnits(program, sharding, /*resident=*/true);
  PhaseEditor edit(program, phase);
  PlaceGradients(program, edit, facts, sharding, whole);
  edit.Finish();
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
