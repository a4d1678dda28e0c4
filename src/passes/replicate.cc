#include "passes/replicate.h"

#include "passes/sharding.h"

namespace interlace {

Result<bool> Replicate(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(ShardingOptions sharding, ReadShardingOptions(program, options));
  INTERLACE_TRY(CheckShardable(program, sharding));
  Phase& phase = *program.MicroBatchPhase();
  PhaseFacts facts(program, phase);
  DeclareUnits(program, sharding, /*resident=*/true);
  PhaseEditor edit(program, phase);
  PlaceGradients(program, edit, facts, sharding, /*whole=*/true);
  edit.Finish();
  return true;
}

}  // namespace interlace
