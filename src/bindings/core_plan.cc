// core_plan.cc — the planner from text to text: reading, checking and finding plans (docs/planner.md).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/core.h"
#include "plan/plan_json.h"
#include "plan/plan_text.h"

namespace py = pybind11;

namespace interlace {
namespace {

Status CheckPlan(const plan::PlanFile& file, const std::string& cluster_text, const std::string& cluster_file) {
  if (cluster_text.empty()) return plan::VerifyPlan(file);
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, cluster_file));
  return plan::VerifyPlan(file, &cluster);
}

Result<std::string> ReadPlan(const std::string& text, const std::string& file, const std::string& cluster_text,
                             const std::string& cluster_file) {
  INTERLACE_ASSIGN(plan::PlanFile parsed, plan::ParsePlan(text, file));
  Status status = CheckPlan(parsed, cluster_text, cluster_file);
  if (!status.ok()) return Error{status.error().message, file};
  return plan::PlanJson(parsed);
}

}  // namespace

void AddPlanner(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def(
      "read_plan",
      [](const std::string& text, const std::string& file, const std::string& cluster, const std::string& cluster_file) {
        return Take(ReadPlan(text, file, cluster, cluster_file));
      },
      py::arg("text"), py::arg("file") = "plan", py::arg("cluster") = "", py::arg("cluster_file") = "cluster", Unlocked(),
      "A plan file as JSON. Error: what cannot be read, or the rules that the plan breaks, by itself and on a cluster.");
}

}  // namespace interlace
