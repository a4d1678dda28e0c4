#include "plan/plan_json.h"

#include <algorithm>
#include <cmath>

#include "trace/json.h"

namespace interlace::plan {
namespace {

// A share as a person wrote it: 0.3, not the 0.30000001192092896 of the same float as a double.
double Share(float value) {
  return std::floor(static_cast<double>(value) * 1e7 + 0.5) / 1e7;
}

void WriteStage(JsonWriter& out, const PlanFile& file, size_t index) {
  const PlanStage& stage = file.plan.stages[index];
  const Strategy& s = stage.strategy;
  out.BeginObject().Fields("stage", static_cast<int64_t>(index), "layers", s.layers, "first_block", stage.first_block);
  out.Field("embedding", s.embedding).Field("head", s.head).Field("first_device", stage.first_device);
  out.Field("devices", int64_t{s.dp} * s.tp).Field("micro_batch", s.micro_batch).Field("dp", s.dp).Field("tp", s.tp);
  out.Field("zero", s.zero).Field("full", s.full).Field("selective", s.selective).Field("in_flight", s.in_flight);
  out.Key("offload").BeginObject().Field("weights", Share(s.weights_out)).Field("gradients", Share(s.gradients_out));
  out.Field("states", Share(s.states_out)).Field("activations", Share(s.activations_out)).EndObject();
  const StageCost& c = stage.cost;
  const PassTimes& p = stage.passes;
  out.Fields("t_us", c.stable_us, "d_us", c.extra_us, "forward_us", p.forward_us, "backward_us", p.backward_us);
  out.Field("first_us", p.first_us).Field("last_us", p.last_us).Field("send_us", stage.send_us);
  out.Field("peak_forward", c.peak_forward).Field("peak_backward", c.peak_backward);
  out.Field("peak_bytes", std::max(c.peak_forward, c.peak_backward)).Field("host_bytes", c.host_bytes).EndObject();
}

}  // namespace

void WritePlan(JsonWriter& out, const PlanFile& file) {
  const Plan& plan = file.plan;
  out.BeginObject().Field("model", plan.model).Field("cluster", plan.cluster).Field("devices", file.devices);
  out.Field("per_node", file.per_node).Field("blocks", file.blocks).Field("global_batch", plan.global_batch);
  out.Field("sequence", plan.sequence).Field("flash_attention", plan.flash_attention).Field("dtype", file.dtype);
  out.Field("memory_limit", file.memory_limit).Field("accumulation", plan.micro_batches()).Field("space", plan.space);
  out.Field("template", file.as_run ? "runtime" : "overlap");
  out.Field("step_us", plan.step_us).Field("pipeline_us", plan.pipeline_us).Field("bound_us", plan.bound_us);
  out.Field("gap", plan.gap()).Field("samples_per_s", plan.samples_per_s()).Key("stages").BeginArray();
  for (size_t i = 0; i < plan.stages.size(); ++i) WriteStage(out.NewLine(), file, i);
  out.EndArray().EndObject();
}

std::string PlanJson(const PlanFile& file) {
  JsonWriter out;
  WritePlan(out, file);
  return out.Take() + "\n";
}

}  // namespace interlace::plan
