#include "plan/alternatives.h"

#include <algorithm>
#include <utility>

namespace interlace::plan {

Status SetBytes(StageOptions& stage, std::string_view dtype, bool as_run) {
  stage.as_run = as_run;
  if (dtype == "bfloat16") {
    stage.weight_bytes = 2, stage.gradient_bytes = as_run ? 4 : 2,
    stage.state_bytes = 12;  // float32 master and two moments
  } else if (dtype == "float32") {
    stage.weight_bytes = 4, stage.gradient_bytes = 4, stage.state_bytes = 8;
  } else {
    return MakeError("dtype '", dtype, "' is neither bfloat16 nor float32");
  }
  return Ok{};
}

Result<Baseline> SpacesOf(std::string_view name, const Training& training) {
  INTERLACE_ASSIGN(const Baseline* known, FindBaseline(name));
  Baseline out = *known;
  for (Space& space : out.spaces) {
    INTERLACE_TRY(SetBytes(space.stage, training.dtype, training.runnable));
    if (!training.runnable) continue;
    StageOptions& stage = space.stage;
    space.one_tp = training.tied;  // the runtime adds up gradients of stages that cut products alike
    // What leaves a CPU's memory goes to a file: a plan by hand may say so, the search does not.
    if (training.cpu) stage.weights_out = stage.gradients_out = stage.states_out = stage.activations_out = false;
  }
  return out;
}

std::vector<Baseline> AlternativesOf(const Baseline& searched, const Plan& best) {
  std::vector<Baseline> out;
  auto add = [&](std::string name, std::string what, auto&& change) {
    Baseline& one = out.emplace_back(Baseline{std::move(name), std::move(what), searched.spaces});
    for (Space& space : one.spaces) change(space), space.name = one.name;
  };
  auto any = [&](auto&& is) {
    return std::any_of(best.stages.begin(), best.stages.end(),
                       [&](const PlanStage& stage) { return is(stage.strategy); });
  };
  if (best.stages.size() > 1) add("one stage", "no pipeline", [](Space& s) { s.stages = {1}; });
  if (any([](const Strategy& s) { return s.tp > 1; }))
    add("no tensor parallel", "tp 1", [](Space& s) { s.stage.tensor_parallel = {1}; });
  if (any([](const Strategy& s) { return s.weights_out + s.gradients_out + s.states_out + s.activations_out > 0; })) {
    add("no offload", "everything stays on the device", [](Space& s) {
      s.stage.weights_out = s.stage.gradients_out = s.stage.states_out = s.stage.activations_out = false;
    });
  }
  if (any([](const Strategy& s) { return s.full + s.selective > 0; })) {
    add("no recomputation", "all activations kept", [](Space& s) { s.stage.full = s.stage.selective = false; });
  }
  if (any([](const Strategy& s) { return s.zero > 0; })) {
    add("no ZeRO", "states, gradients and weights on every rank", [](Space& s) {
      s.stage.zero = {true, false, false, false};
    });
  }
  if (any([](const Strategy& s) { return s.dp > 1 && s.zero < 3; })) {
    add("ZeRO 3", "weights sharded everywhere", [](Space& s) { s.stage.zero = {false, false, false, true}; });
  }
  if (best.stages.size() == 1 && searched.spaces.front().stages.empty()) {
    add("two stages or more", "a pipeline", [](Space& s) {
      for (int32_t count = 2; count <= 64; ++count) s.stages.push_back(count);
    });
  }
  return out;
}

}  // namespace interlace::plan
