// stage_program.h — a pipeline as one synthetic program a stage, so that the simulator can be the referee of the
// recurrence (recurrence.h): ops for the forward and the backward of each micro-batch, for what a stage does first and
// last, and messages between neighbours.
//
// Synthetic: the ops stand for whole passes with the times of a plan; a `meta synthetic` line says so. They are not in
// the vocabulary of docs/ir.md, so the texts can be read but not compiled. Receives are posted ahead, so that a message
// moves as soon as it is sent and the one before it has come through.
//
//   %0: f32[1] = recv.start() {fwd lane=p2p}        # one for each message, all at the beginning
//   stage.first() {upd}
//   recv.wait(%0) {fwd lane=p2p}
//   stage.forward(%0) {fwd}
//   send.start() {fwd lane=p2p}
#pragma once

#include <memory>
#include <vector>

#include "ir/program.h"
#include "plan/recurrence.h"
#include "sim/engine.h"

namespace interlace::plan::testing {

struct StagePrograms {
  std::vector<std::unique_ptr<Program>> programs;  // by stage
  std::vector<std::unique_ptr<Lowered>> lowered;
};
StagePrograms MakeStagePrograms(const std::vector<PipelineStage>& stages, int32_t micro_batches);

// Every stage as one rank. Error: times beyond 64 bits.
Result<EngineOutput> SimulateStages(const StagePrograms& programs);

}  // namespace interlace::plan::testing
