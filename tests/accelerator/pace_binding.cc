// The mode "paced" as Python sees it.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine.h"

namespace soft {

namespace {

Pace& ThePace() {
  Pace* pace = Engine::Get().pace();
  TORCH_CHECK(pace != nullptr, "the soft device is not paced: call pace()");
  return *pace;
}

using PlainCost = std::tuple<int32_t, bool, bool, double, double>;

void SetProgram(const std::vector<PlainCost>& plain, const std::vector<std::vector<double>>& factors,
                const std::pair<double, double>& shares, int64_t per_node, double times, uintptr_t current_op) {
  std::vector<Cost> costs;
  for (const auto& [kind, sends, receives, latency_ns, work_ns] : plain)
    costs.push_back({static_cast<Cost::Kind>(kind), sends, receives, latency_ns * times, work_ns * times});
  Slowdown slowdown;
  slowdown.share = {shares.first, shares.second};
  slowdown.per_node = per_node;
  for (size_t set = 0; set < slowdown.factor.size(); ++set) {
    for (size_t kind = 0; kind < slowdown.factor[set].size(); ++kind) slowdown.factor[set][kind] = factors.at(set).at(kind);
  }
  ThePace().Program(std::move(costs), slowdown, reinterpret_cast<int32_t (*)()>(current_op));
}

}  // namespace

void BindPace(pybind11::module_& m) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> released;
  m.def("pace", [](const std::string& file, int rank, int ranks, bool virtual_time) {
    Engine::Get().SetPace(std::make_unique<Pace>(file, rank, ranks, virtual_time));
  }, py::arg("file"), py::arg("rank"), py::arg("ranks"), py::arg("virtual_time"), released);
  m.def("pace_program", &SetProgram, py::arg("costs"), py::arg("factors"), py::arg("shares"), py::arg("per_node"),
        py::arg("times"), py::arg("current_op"), released);
  m.def("paced_now_ns", [] { return ThePace().NowNs(); }, released, "The clock of the paced devices.");
  m.def("take_paced", [] {
    std::vector<std::tuple<int32_t, int32_t, double, double>> found;
    for (const Paced& p : ThePace().TakePaced()) found.emplace_back(p.op, p.stream, p.begin_ns, p.end_ns);
    return found;
  }, "(op, stream, begin and end in ns) of all on this rank that took time since the last call.");
}

}  // namespace soft
