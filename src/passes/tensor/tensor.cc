// tensor.cc — tensor parallelism: parameters are cut over the ranks of a mesh axis, and what follows from that is
// propagated through the whole captured program, forward and backward.
//   before: param %1: f32[64,64] "q_proj.weight"       after: param %1: f32[32,64] "q_proj.weight" ... cut tp 0
//           %32: f32[64,64]{1,64} = view(%1)                  %g: f32[2048] = all_gather.start(%x) {axis=tp dim=0}
//           %34: f32[32,64] = aten.mm(%33, %32)               all_gather.wait(%g)
//           ... 4 heads ...                                   %34: f32[32,32] = aten.mm(view of %g, %32)
//           %64: f32[32,64] = aten.mm(%63, %62)               ... 2 heads ...
//           %66: f32[2,16,64] = aten.add.Tensor(%17, %65)     %64: f32[32,64] = aten.mm(%63, %62)        a sum over tp
//                                                             %s: f32[1024] = reduce_scatter.start(%64) {axis=tp dim=0}
//                                                             %66: f32[1,16,64] = aten.add.Tensor(...)    half the rows
// Options: axis, plan=auto (found by search, auto.h)|model (in the program's meta line "tensor")|FILE (plan.h says how
// it is written), sequence=true|false (between the products a rank has a part of the rows), regather=true|false (rows
// that the forward part gathered are gathered again by the backward part: memory for time), bucket=262144 (gradients of
// whole weights that have fewer bytes are summed together, behind the backward part).
// Runs after canonicalize and mesh, before the strategy.
// Sources: Megatron-LM (Shoeybi et al. 2019), sequence parallelism (Korthikanti et al. 2022, section 4.2.2), GSPMD (Xu
// et al. 2021).
#include <algorithm>
#include <utility>

#include "base/files.h"
#include "passes/cost_options.h"
#include "passes/passes.h"
#include "passes/tensor/apply.h"
#include "passes/tensor/auto.h"
#include "passes/tensor/plan.h"
#include "passes/tensor/roles.h"

namespace interlace {

Result<bool> Tensor(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::string axis, options.Name("axis", "tp"));
  INTERLACE_ASSIGN(const std::string sequence, options.Choice("sequence", {"true", "false"}));
  INTERLACE_ASSIGN(const std::string regather, options.Choice("regather", {"false", "true"}));
  INTERLACE_ASSIGN(const int64_t bucket, options.Int("bucket", tensor::CutterOptions().bucket, 0));
  bool declared = false;
  for (const Axis& one : program.mesh) declared = declared || one.name == axis;
  if (!declared) return MakeError("the mesh has no axis '", axis, "'; declare it first: mesh(axes=dp:1+", axis, ":2)");
  for (const Param& param : program.params) {
    for (const Cut& cut : param.cuts) {
      if (cut.axis == axis) return false;
    }
  }
  if (program.AxisSize(axis) == 1) return false;
  Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the program has no single micro-batch phase");
  if (!program.symbols.empty())
    return MakeError("size '", program.symbols[0].name, "' is not a number yet; bind it first");
  tensor::CutterOptions how;
  how.axis = axis;
  how.sequence = sequence == "true";
  how.regather = regather == "true";
  how.bucket = bucket;
  const std::string which = options.Text("plan", "auto");
  const std::string* text = program.Meta("tensor");
  std::vector<tensor::PlanEntry> plan;
  if (which == "model" && text == nullptr) {
    return MakeError(
        "the program has no plan for tensor parallelism (meta line \"tensor\"); write one: PARAMETER "
        "DIMENSION, for each weight that is cut; or let one be found: plan=auto");
  }
  const bool file = which != "auto" && which != "model";
  if (file) {
    INTERLACE_ASSIGN(const std::string content, ReadFile(which));
    INTERLACE_ASSIGN(plan, tensor::ReadPlan(content));
    INTERLACE_TRY(tensor::CheckBlocks(tensor::RolesOf(program, program.AxisSize(axis)), plan));
  } else if (text != nullptr) {
    INTERLACE_ASSIGN(plan, tensor::ReadPlan(*text));
  }
  std::vector<std::string> notes;
  if (which == "auto") {
    INTERLACE_ASSIGN(const PassCosts costs, ReadCosts(program, options));
    INTERLACE_ASSIGN(const tensor::FoundPlan found, tensor::FindPlan(program, plan, how, costs));
    plan = found.judged[0].plan;
    tensor::WriteReasons(program, found);
    notes = found.undivided;
  }
  INTERLACE_ASSIGN(const tensor::Applied applied, tensor::ApplyPlan(program, plan, how, file));
  program.SetMeta("tensor", tensor::PrintPlan(plan));
  for (std::string& note : tensor::NotesOf(applied)) {
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(std::move(note));
  }
  std::string told;
  for (const std::string& note : notes) told += (told.empty() ? "" : "\n") + note;
  if (!told.empty()) program.SetMeta("tensor.notes", std::move(told));
  program.Compact();
  return true;
}

}  // namespace interlace
