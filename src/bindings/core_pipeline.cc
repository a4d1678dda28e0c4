// core_pipeline.cc — `_core.solve_stages`: the choice between stages on frontiers given as numbers, for the test against a
// MILP solver and for benchmarks.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <ctime>
#include <map>
#include <tuple>

#include "bindings/core.h"
#include "plan/inter_stage.h"

namespace py = pybind11;

namespace interlace {
namespace {

using plan::Frontier;
using plan::StageKey;

using GivenFrontiers = std::function<std::vector<std::tuple<double, double, int32_t, int32_t>>(int32_t layers, bool embedding, bool head,
                                                                                            int32_t devices, int32_t in_flight)>;
using GivenBoundary = std::function<double(std::pair<int32_t, int32_t> from, std::pair<int32_t, int32_t> to, bool inside)>;

py::dict SolveStages(plan::InterStageProblem problem, const GivenFrontiers& given, const GivenBoundary& boundary, int32_t top) {
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
        frontier({l, i == 0, i == last, count, problem.micro_batches, std::min(problem.stages - i, problem.micro_batches)});
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
      stages.append(py::dict(py::arg("layers") = shape.layers, py::arg("dp") = shape.layout.dp, py::arg("tp") = shape.layout.tp,
                             py::arg("first_device") = s.first_device, py::arg("stable_us") = s.point.cost.stable_us,
                             py::arg("extra_us") = s.point.cost.extra_us, py::arg("boundary_us") = s.boundary_us));
    }
    plans.append(py::dict(py::arg("cost_us") = p.cost_us, py::arg("stages") = stages));
  }
  return py::dict(py::arg("plans") = plans, py::arg("bound_us") = result.bound_us, py::arg("checks") = result.checks,
                  py::arg("wall_s") = wall, py::arg("cpu_s") = processor);
}

}  // namespace

void AddPipeline(py::module_& m) {
  m.def(
      "solve_stages",
      [](int32_t stages, int32_t layers, int32_t micro_batches, const GivenFrontiers& frontier, int32_t devices, int32_t per_node,
         std::vector<int32_t> counts, const GivenBoundary& boundary, int32_t top) {
        plan::InterStageProblem p;
        p.stages = stages, p.layers = layers, p.micro_batches = micro_batches, p.devices = devices, p.per_node = per_node;
        p.counts = counts.empty() ? plan::FreeDeviceCounts(devices, per_node) : std::move(counts);
        return SolveStages(std::move(p), frontier, boundary, top);
      },
      py::arg("stages"), py::arg("layers"), py::arg("micro_batches"), py::arg("frontier"), py::arg("devices"), py::arg("per_node"),
      py::arg("counts") = std::vector<int32_t>{}, py::arg("boundary") = GivenBoundary{}, py::arg("top") = 1,
      "The best cut of `layers` into `stages`; `frontier(layers, embedding, head, devices, in_flight)` gives a list of "
      "(stable_us, extra_us, dp, tp), `boundary((dp, tp), (dp, tp), inside_node)` microseconds. No counts: all that fit nodes.");
}

}  // namespace interlace
