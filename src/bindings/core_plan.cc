// core_plan.cc — the planner from text to text: reading, checking and finding plans (docs/planner.md).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>

#include "bindings/core.h"
#include "plan/plan_json.h"
#include "plan/plan_text.h"
#include "plan/planning.h"

namespace py = pybind11;

namespace interlace {
namespace {

Status CheckPlan(const plan::PlanFile& file, const std::string& cluster_text, const std::string& cluster_file,
                 bool over_memory) {
  if (cluster_text.empty()) return plan::VerifyPlan(file, nullptr, over_memory);
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, cluster_file));
  return plan::VerifyPlan(file, &cluster, over_memory);
}

// A plan that keeps its rules, by itself and on a cluster if there is one.
Result<plan::PlanFile> CheckedPlan(const std::string& text, const std::string& file, const std::string& cluster_text,
                                   const std::string& cluster_file, bool over_memory = false) {
  INTERLACE_ASSIGN(plan::PlanFile parsed, plan::ParsePlan(text, file));
  Status status = CheckPlan(parsed, cluster_text, cluster_file, over_memory);
  if (!status.ok()) return Error{status.error().message, file};
  return parsed;
}

Result<std::string> ReadPlan(const std::string& text, const std::string& file, const std::string& cluster_text,
                             const std::string& cluster_file, bool over_memory) {
  INTERLACE_ASSIGN(plan::PlanFile plan, CheckedPlan(text, file, cluster_text, cluster_file, over_memory));
  return plan::PlanJson(plan);
}

using Progress = std::function<void(const std::string& what, int64_t done, int64_t total, double best_us)>;

std::string FindPlans(plan::PlanRequest request, const std::string& cluster, const std::string& cluster_file,
                      const Progress& progress) {
  py::gil_scoped_release unlocked;
  request.cluster = Take(LoadCluster(cluster, cluster_file));
  plan::PlanProgress say;
  if (progress) {
    say = [&](std::string_view what, int64_t done, int64_t total, double best_us) {
      py::gil_scoped_acquire locked;
      progress(std::string(what), done, total, best_us);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    };
  }
  return Take(plan::MakePlans(request, say));
}

Result<std::string> Predicted(const std::string& text, const std::string& file, const std::string& model,
                              const std::string& cluster_text, const std::string& cluster_file, bool over_memory) {
  INTERLACE_ASSIGN(plan::PlanFile parsed, plan::ParsePlan(text, file));
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, cluster_file));
  Result<plan::PlanFile> predicted = plan::PredictPlan(parsed, model, cluster, over_memory);
  if (!predicted.ok()) return Error{predicted.error().ToString(), file};
  return plan::PrintPlan(*predicted);
}

Result<std::tuple<double, int64_t, double>> Ran(plan::PlanPredictor& predictor, const std::string& text,
                                                const std::string& cluster_text, const std::string& cluster_file) {
  INTERLACE_ASSIGN(plan::PlanFile parsed, plan::ParsePlan(text, "plan"));
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, cluster_file));
  INTERLACE_ASSIGN(plan::PlanFile predicted, predictor.Predict(parsed, cluster, true));
  INTERLACE_ASSIGN(const double error, predictor.ErrorOf(predicted, cluster));
  int64_t peak = 0;
  for (const plan::PlanStage& stage : predicted.plan.stages)
    peak = std::max({peak, stage.cost.peak_forward, stage.cost.peak_backward});
  return std::tuple(predicted.plan.pipeline_us, peak, error);
}

Result<std::string> Explained(const std::string& text, const std::string& model, const std::string& cluster_text,
                              const std::string& cluster_file) {
  INTERLACE_ASSIGN(plan::PlanFile parsed, plan::ParsePlan(text, "plan"));
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, cluster_file));
  return plan::ExplainPlan(parsed, model, cluster);
}

Result<std::string> Trace(const std::string& text, const std::string& file) {
  INTERLACE_ASSIGN(plan::PlanFile parsed, plan::ParsePlan(text, file));
  INTERLACE_TRY(plan::VerifyPlan(parsed));
  return plan::PlanTrace(parsed);
}

}  // namespace

void AddPlanner(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def(
      "read_plan",
      [](const std::string& text, const std::string& file, const std::string& cluster, const std::string& cluster_file,
         bool over_memory) { return Take(ReadPlan(text, file, cluster, cluster_file, over_memory)); },
      py::arg("text"), py::arg("file") = "plan", py::arg("cluster") = "", py::arg("cluster_file") = "cluster",
      py::arg("over_memory") = false, Unlocked(),
      "A plan file as JSON. Error: what cannot be read, or the rules that the plan breaks, by itself and on a "
      "cluster.");
  m.def(
      "make_plans",
      [](const std::string& model_text, const std::string& cluster, int64_t global_batch, int64_t sequence,
         const std::string& model, const std::string& space, const std::string& dtype, bool flash, bool runnable,
         int64_t memory_limit, int64_t host_limit, double time_limit_s, int32_t top, int32_t threads, bool why_not,
         const std::string& before, const std::string& before_file, const std::string& cluster_file,
         const Progress& progress) {
        plan::PlanRequest r;
        r.model_text = model_text, r.model = model, r.space = space, r.runnable = runnable, r.flash_attention = flash,
        r.dtype = dtype;
        r.global_batch = global_batch, r.sequence = sequence, r.memory_limit = memory_limit, r.host_limit = host_limit;
        r.time_limit_s = time_limit_s, r.top = top, r.threads = threads, r.why_not = why_not;
        if (!before.empty()) r.before = Take(CheckedPlan(before, before_file, "", "")).plan;
        return FindPlans(std::move(r), cluster, cluster_file, progress);
      },
      py::arg("model_text"), py::arg("cluster"), py::arg("global_batch"), py::arg("sequence"),
      py::arg("model") = "model", py::arg("space") = "full", py::arg("dtype") = "bfloat16", py::arg("flash") = true,
      py::arg("runnable") = false, py::arg("memory_limit") = 0, py::arg("host_limit") = 0,
      py::arg("time_limit_s") = 0.0, py::arg("top") = 1, py::arg("threads") = 0, py::arg("why_not") = true,
      py::arg("before") = "", py::arg("before_file") = "plan", py::arg("cluster_file") = "cluster",
      py::arg("progress") = Progress{},
      "The best plans, explained, as JSON (src/plan/planning.h). `progress(what, done, total, best_us)` is called now "
      "and then.");
  m.def(
      "predict_plan",
      [](const std::string& text, const std::string& model_text, const std::string& cluster, const std::string& file,
         const std::string& cluster_file,
         bool over_memory) { return Take(Predicted(text, file, model_text, cluster, cluster_file, over_memory)); },
      py::arg("text"), py::arg("model_text"), py::arg("cluster"), py::arg("file") = "plan",
      py::arg("cluster_file") = "cluster", py::arg("over_memory") = false, Unlocked(),
      "A plan file with its predictions made anew. Error: rules that it breaks, memory included unless over_memory.");
  py::class_<plan::PlanPredictor>(m, "PlanPredictor", "The plans of one model at one sequence length, predicted.")
      .def(py::init([](const std::string& model_text, int64_t sequence) {
             return Take(plan::PlanPredictor::Create(model_text, sequence));
           }),
           py::arg("model_text"), py::arg("sequence"), Unlocked())
      .def(
          "run",
          [](plan::PlanPredictor& self, const std::string& text, const std::string& cluster,
             const std::string& cluster_file) { return Take(Ran(self, text, cluster, cluster_file)); },
          py::arg("text"), py::arg("cluster"), py::arg("cluster_file") = "cluster", Unlocked(),
          "(pipeline_us, peak_bytes, error) of a plan, whether it fits or not: its 1F1B time, the largest peak of a "
          "device, "
          "the standard deviation of ln(measured / predicted).");
  m.def(
      "explain_plan",
      [](const std::string& text, const std::string& model_text, const std::string& cluster,
         const std::string& cluster_file) { return Take(Explained(text, model_text, cluster, cluster_file)); },
      py::arg("text"), py::arg("model_text"), py::arg("cluster"), py::arg("cluster_file") = "cluster", Unlocked(),
      "Where the bytes and times of a predicted plan's stages go, as the JSON list that make_plans calls "
      "\"explained\".");
  m.def(
      "plan_trace", [](const std::string& text, const std::string& file) { return Take(Trace(text, file)); },
      py::arg("text"), py::arg("file") = "plan", Unlocked(),
      "The pipeline of a plan as a Chrome trace whose ranks are stages.");
}

}  // namespace interlace
