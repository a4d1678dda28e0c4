// core_pipeline.cc — the planner's parts for tests and benchmarks: `_core.testing.solve_stages`, the choice between
// stages on frontiers given as numbers, and `PlanLayers`, a model's layers on a cluster, tuned in any space
// (src/plan/baselines.h).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "bindings/core.h"
#include "bindings/testing/core_testing.h"
#include "plan/baselines.h"
#include "plan/captured_layers.h"
#include "plan/inter_stage.h"

namespace py = pybind11;

namespace interlace {
namespace {

using plan::Frontier;
using plan::StageKey;

using GivenFrontiers = std::function<std::vector<std::tuple<double, double, int32_t, int32_t>>(
    int32_t layers, bool embedding, bool head, int32_t devices, int32_t in_flight)>;
using GivenBoundary =
    std::function<double(std::pair<int32_t, int32_t> from, std::pair<int32_t, int32_t> to, bool inside)>;

py::dict SolveStages(plan::InterStageProblem problem, const GivenFrontiers& given, const GivenBoundary& boundary,
                     int32_t top) {
  using Key = std::tuple<int32_t, bool, bool, int32_t, int32_t>;
  std::map<Key, Frontier> known;
  // Python is asked before the clock starts: the solver asks for the same keys.
  auto frontier = [&](const StageKey& key) -> const Frontier& {
    auto [at, added] = known.try_emplace(Key{key.layers, key.embedding, key.head, key.devices, key.in_flight});
    if (!added) return at->second;
    for (auto [t, d, dp, tp] : given(key.layers, key.embedding, key.head, key.devices, key.in_flight)) {
      plan::FrontierPoint& point = at->second.emplace_back();
      point.strategy.layers = key.layers, point.strategy.dp = dp, point.strategy.tp = tp;
      point.cost.stable_us = t, point.cost.extra_us = d;
    }
    return at->second;
  };
  int32_t last = problem.stages - 1;
  for (int32_t i = 0; i <= last; ++i) {
    for (int32_t count : problem.counts) {
      for (int32_t l = 1; l <= problem.layers - last; ++l) {
        frontier(
            {l, i == 0, i == last, count, problem.micro_batches, std::min(problem.stages - i, problem.micro_batches)});
      }
    }
  }
  problem.frontier = frontier;
  std::map<std::tuple<int32_t, int32_t, int32_t, int32_t, bool>, double> crossed;
  if (boundary) {
    problem.boundary_us = [&](const plan::Layout& a, const plan::Layout& b, bool inside) {
      auto [at, added] = crossed.try_emplace({a.dp, a.tp, b.dp, b.tp, inside});
      if (added) at->second = boundary({a.dp, a.tp}, {b.dp, b.tp}, inside);
      return at->second;
    };
  }
  auto begin = std::chrono::steady_clock::now();
  std::clock_t cpu = std::clock();
  plan::InterStageResult result = Take(plan::SolveInterStage(problem, {.top = top}));
  double processor = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  py::list plans;
  for (const plan::InterStagePlan& p : result.plans) {
    py::list stages;
    for (const plan::StageChoice& s : p.stages) {
      const plan::StageShape shape = s.shape();
      stages.append(py::dict(py::arg("layers") = shape.layers, py::arg("dp") = shape.layout.dp,
                             py::arg("tp") = shape.layout.tp, py::arg("first_device") = s.first_device,
                             py::arg("stable_us") = s.point.cost.stable_us, py::arg("extra_us") = s.point.cost.extra_us,
                             py::arg("boundary_us") = s.boundary_us));
    }
    plans.append(py::dict(py::arg("cost_us") = p.cost_us, py::arg("stages") = stages));
  }
  return py::dict(py::arg("plans") = plans, py::arg("bound_us") = result.bound_us, py::arg("checks") = result.checks,
                  py::arg("wall_s") = wall, py::arg("cpu_s") = processor);
}

struct PlanLayers {
  std::unique_ptr<plan::LayerSource> layers;
  ClusterSpec cluster;
  int64_t sequence = 1;
  plan::Plan last;  // found last: where a search after a change may start
};

Result<PlanLayers> ReadPlanLayers(const std::string& model, const std::string& cluster, int64_t sequence) {
  PlanLayers out;
  out.sequence = sequence;
  INTERLACE_ASSIGN(out.cluster, LoadCluster(cluster, "cluster"));
  INTERLACE_ASSIGN(out.layers, plan::ReadLayers(model, "model", out.cluster, sequence));
  return out;
}

struct Tuned {
  plan::TuneResult result;
  double wall_s = 0, cpu_s = 0;
};

Result<Tuned> TuneSpace(const PlanLayers& of, const std::string& space, plan::TuneOptions options) {
  INTERLACE_ASSIGN(const plan::Baseline* baseline, plan::FindBaseline(space));
  options.sequence = of.sequence;
  Tuned out;
  auto begin = std::chrono::steady_clock::now();
  std::clock_t cpu = std::clock();
  INTERLACE_ASSIGN(out.result, plan::TuneBaseline(*baseline, *of.layers, of.cluster, options));
  out.cpu_s = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  out.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return out;
}

py::dict StageDict(const plan::PlanStage& stage) {
  const plan::Strategy& s = stage.strategy;
  py::dict d;
  d["layers"] = s.layers, d["first_device"] = stage.first_device;
  d["micro_batch"] = s.micro_batch, d["dp"] = s.dp, d["tp"] = s.tp, d["micro_batches"] = s.micro_batches;
  d["zero"] = s.zero, d["full"] = s.full, d["selective"] = s.selective;
  d["weights_out"] = s.weights_out, d["gradients_out"] = s.gradients_out;
  d["states_out"] = s.states_out, d["activations_out"] = s.activations_out;
  d["stable_us"] = stage.cost.stable_us, d["extra_us"] = stage.cost.extra_us, d["send_us"] = stage.send_us;
  d["peak_bytes"] = std::max(stage.cost.peak_forward, stage.cost.peak_backward),
  d["host_bytes"] = stage.cost.host_bytes;
  return d;
}

py::dict TunedDict(const Tuned& tuned) {
  py::list plans;
  for (const plan::Plan& plan : tuned.result.plans) {
    py::list stages;
    for (const plan::PlanStage& stage : plan.stages) stages.append(StageDict(stage));
    py::dict d;
    d["step_us"] = plan.step_us, d["pipeline_us"] = plan.pipeline_us, d["samples_per_s"] = plan.samples_per_s();
    d["stages"] = stages;
    plans.append(d);
  }
  const plan::TuneResult& r = tuned.result;
  py::dict d;
  d["plans"] = plans, d["bound_us"] = r.bound_us, d["complete"] = r.complete;
  d["pairs"] = r.pairs, d["pairs_solved"] = r.pairs_solved;
  d["frontiers"] = r.frontiers, d["points"] = r.points, d["checks"] = r.checks;
  d["wall_s"] = tuned.wall_s, d["cpu_s"] = tuned.cpu_s;
  return d;
}

}  // namespace

void AddPipeline(py::module_& m) {
  py::class_<PlanLayers>(m, "PlanLayers")
      .def(py::init([](const std::string& model, const std::string& cluster, int64_t sequence) {
             py::gil_scoped_release unlocked;
             return std::make_unique<PlanLayers>(Take(ReadPlanLayers(model, cluster, sequence)));
           }),
           py::arg("model_text"), py::arg("cluster"), py::arg("sequence"))
      .def(
          "tune",
          [](PlanLayers& of, const std::string& space, int64_t global_batch, int64_t device_bytes, int32_t top,
             double limit_s, bool from_last) {
            plan::TuneOptions options;
            plan::Plan last = of.last;
            if (from_last && !last.stages.empty()) options.warm = &last;
            options.global_batch = global_batch, options.device_bytes = device_bytes;
            options.top = top, options.time_limit_s = limit_s;
            Tuned tuned;
            {
              py::gil_scoped_release unlocked;
              tuned = Take(TuneSpace(of, space, options));
            }
            if (!tuned.result.plans.empty()) of.last = tuned.result.plans.front();
            return TunedDict(tuned);
          },
          py::arg("space"), py::arg("global_batch"), py::arg("device_bytes") = 0, py::arg("top") = 1,
          py::arg("limit_s") = 0.0, py::arg("from_last") = false,
          "The best plans of a space by name (plan_spaces()); none: nothing fits. from_last: after a change of batch "
          "or memory,\n"
          "starts from the plan found last.");
  m.def(
      "plan_spaces",
      [] {
        std::vector<std::pair<std::string, std::string>> out;
        for (const plan::Baseline& b : plan::Baselines()) out.emplace_back(b.name, b.help);
        return out;
      },
      "Names and meanings of the spaces that a plan can be searched in.");
  m.def(
      "solve_stages",
      [](int32_t stages, int32_t layers, int32_t micro_batches, const GivenFrontiers& frontier, int32_t devices,
         int32_t per_node, std::vector<int32_t> counts, const GivenBoundary& boundary, int32_t top) {
        plan::InterStageProblem p;
        p.stages = stages, p.layers = layers, p.micro_batches = micro_batches, p.devices = devices,
        p.per_node = per_node;
        p.counts = counts.empty() ? plan::FreeDeviceCounts(devices, per_node) : std::move(counts);
        return SolveStages(std::move(p), frontier, boundary, top);
      },
      py::arg("stages"), py::arg("layers"), py::arg("micro_batches"), py::arg("frontier"), py::arg("devices"),
      py::arg("per_node"), py::arg("counts") = std::vector<int32_t>{}, py::arg("boundary") = GivenBoundary{},
      py::arg("top") = 1,
      "The best cut of `layers` into `stages`; `frontier(layers, embedding, head, devices, in_flight)` gives a list of "
      "(stable_us, extra_us, dp, tp), `boundary((dp, tp), (dp, tp), inside_node)` microseconds. No counts: all that "
      "fit nodes.");
}

}  // namespace interlace
