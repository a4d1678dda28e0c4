// core_sim.cc — `_core.Simulator`, `_core.Simulation`: a predicted step and its results as texts; cluster presets.
//
// All of it runs with the interpreter lock released. A Simulator keeps its own verified copy of the program, which its
// simulations share: the same program on many machines is verified and copied once.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/suggest.h"
#include "bindings/core.h"
#include "ir/verifier.h"
#include "sim/chakra_export.h"
#include "sim/measured.h"
#include "sim/report_data.h"
#include "sim/simulate.h"

namespace py = pybind11;

namespace interlace {
namespace {

struct PySimulator {
  std::shared_ptr<const Program> program;
};

struct PySimulation {
  std::shared_ptr<const Program> program;
  Simulation simulation;
};

struct PyMeasured {
  std::shared_ptr<const Program> program;
  Simulation simulation;
};

using Times = std::vector<std::tuple<int32_t, int32_t, int64_t, int64_t>>;  // run, op, begin and end in nanoseconds

std::vector<MeasuredTime> ReadTimes(const Times& times) {
  std::vector<MeasuredTime> out;
  for (const auto& [run, op, begin, end] : times) out.push_back({run, op, begin, end});
  return out;
}

using Factors = std::vector<std::pair<std::string, double>>;

// Names of Python's keyword arguments and what they change.
Result<WhatIf> ReadWhatIf(const Factors& factors) {
  WhatIf out;
  const std::vector<std::pair<std::string_view, double WhatIf::*>> known = {{"compute", &WhatIf::compute},
                                                                            {"links", &WhatIf::links},
                                                                            {"latency", &WhatIf::latency},
                                                                            {"copies", &WhatIf::copies},
                                                                            {"launches", &WhatIf::launches}};
  for (const auto& [name, factor] : factors) {
    bool found = name == "interference";
    if (found) out.interference = factor != 0;
    for (auto [word, member] : known) {
      if (word == name) out.*member = factor, found = true;
    }
    if (found) continue;
    std::vector<std::string_view> words = {"interference"};
    for (auto [word, member] : known) words.push_back(word);
    return MakeError("unknown factor '", name, "'", DidYouMean(name, words));
  }
  return out;
}

Result<PySimulator> MakeSimulator(const Program& program) {
  INTERLACE_TRY(Verify(program));  // the engine relies on the rules
  return PySimulator{std::make_shared<const Program>(program.Clone())};
}

Result<PySimulation> Run(const PySimulator& simulator, const std::string& cluster_text, const std::string& cluster_file,
                         const std::string& profile_text, const std::string& profile_file, SimulateOptions options,
                         const Factors& what_if) {
  INTERLACE_ASSIGN(options.what_if, ReadWhatIf(what_if));
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, cluster_file));
  ProfileTable profile;
  if (!profile_text.empty()) {
    INTERLACE_ASSIGN(profile, ParseProfile(profile_text, profile_file));
  }
  PySimulation out;
  out.program = simulator.program;
  INTERLACE_ASSIGN(out.simulation, Simulate(*out.program, cluster, profile_text.empty() ? nullptr : &profile, options));
  return out;
}

Result<PyMeasured> MakeMeasured(const Program& program, const std::vector<std::pair<Times, Times>>& ranks) {
  INTERLACE_ASSIGN(PySimulator verified, MakeSimulator(program));
  std::vector<MeasuredRank> records;
  for (const auto& [ops, transfers] : ranks) records.push_back({ReadTimes(ops), ReadTimes(transfers)});
  PyMeasured out;
  out.program = verified.program;
  INTERLACE_ASSIGN(out.simulation, Measured(*out.program, records));
  return out;
}

void CheckRank(const Simulation& s, int32_t rank) {
  if (rank < 0 || rank >= static_cast<int32_t>(s.output.ranks.size())) {
    throw PythonError(Error{
        "rank " + std::to_string(rank) + " was not simulated; " + std::to_string(s.output.ranks.size()) + " were", {}});
  }
}

py::bytes ChakraOf(const Simulation& s, int32_t rank) {
  CheckRank(s, rank);
  std::string bytes;
  {
    py::gil_scoped_release unlocked;
    bytes = SimulationChakra(s, rank);
  }
  return py::bytes(bytes);
}

}  // namespace

void AddSimulation(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  using Slow = std::vector<std::pair<int64_t, double>>;
  auto arguments = [](auto&& define) {
    define(
        py::arg("cluster"), py::arg("profile") = "", py::arg("slow") = Slow{}, py::arg("every_rank") = false,
        py::arg("machine") = "", py::arg("foreign") = false, py::arg("what_if") = Factors{},
        py::arg("cluster_file") = "cluster", py::arg("profile_file") = "profile", Unlocked(),
        "cluster: a preset's name or the text of a cluster file; profile: its text; slow: (rank, factor) pairs;\n"
        "machine: the fingerprint that the profile must have unless foreign; what_if: (name, factor) pairs on times\n"
        "(sim/what_if.h).");
  };
  py::class_<PySimulator> simulator(m, "Simulator", "A program to be simulated on one machine after another.");
  simulator.def(py::init([](const Program& program) { return Take(MakeSimulator(program)); }), py::arg("program"),
                Unlocked(), "Error: the first rules that the program breaks.");
  py::class_<PySimulation> simulation(m, "Simulation", "A predicted step of a program (docs/cost_model.md).");
  arguments([&](auto&&... rest) {
    simulator.def(
        "run",
        [](const PySimulator& self, const std::string& cluster, const std::string& profile, const Slow& slow,
           bool every_rank, const std::string& machine, bool foreign, const Factors& what_if,
           const std::string& cluster_file, const std::string& profile_file) {
          return Take(Run(self, cluster, cluster_file, profile, profile_file, {slow, every_rank, machine, foreign, {}},
                          what_if));
        },
        rest...);
    simulation.def(
        py::init([](const Program& program, const std::string& cluster, const std::string& profile, const Slow& slow,
                    bool every_rank, const std::string& machine, bool foreign, const Factors& what_if,
                    const std::string& cluster_file, const std::string& profile_file) {
          return Take(Run(Take(MakeSimulator(program)), cluster, cluster_file, profile, profile_file,
                          {slow, every_rank, machine, foreign, {}}, what_if));
        }),
        py::arg("program"), rest...);
  });
  simulation.def_property_readonly("ranks", [](const PySimulation& s) { return s.simulation.ranks; })
      .def_property_readonly("simulated_ranks", [](const PySimulation& s) { return s.simulation.output.ranks.size(); })
      .def_property_readonly(
          "step_us", [](const PySimulation& s) { return static_cast<double>(s.simulation.makespan_ps()) / 1e6; })
      .def_property_readonly(
          "lower_bound_us",
          [](const PySimulation& s) { return static_cast<double>(s.simulation.lower_bound_ps()) / 1e6; })
      .def_property_readonly("peak_bytes", [](const PySimulation& s) { return s.simulation.memory.peak.bytes; })
      .def_property_readonly("taken_bytes", [](const PySimulation& s) { return s.simulation.memory.taken_bytes; })
      .def(
          "json", [](const PySimulation& s) { return SimulationJson(s.simulation); }, Unlocked())
      .def(
          "summary", [](const PySimulation& s) { return SimulationSummary(s.simulation); }, Unlocked())
      .def(
          "report_data", [](const PySimulation& s) { return Take(ReportData(s.simulation)); }, Unlocked(),
          "JSON for the report page: memory by kind over time, what fills the peak, the pieces of the critical path.")
      .def(
          "trace", [](const PySimulation& s, int32_t rank) { return SimulationTrace(s.simulation, rank); },
          py::arg("rank") = -1, Unlocked(), "Chrome/Perfetto JSON of all ranks, or of one.")
      .def(
          "snapshot", [](const PySimulation& s) { return Take(SimulationSnapshot(s.simulation)); }, Unlocked(),
          "The dictionary of torch.cuda.memory._snapshot() as JSON.")
      .def(
          "chakra", [](const PySimulation& s, int32_t rank) { return ChakraOf(s.simulation, rank); },
          py::arg("rank") = 0, "The Chakra execution trace of a simulated rank.");
  py::class_<PyMeasured>(m, "Measured", "A step that ran, for the formats of a simulated one (sim/measured.h).")
      .def(py::init([](const Program& program, const std::vector<std::pair<Times, Times>>& ranks) {
             return Take(MakeMeasured(program, ranks));
           }),
           py::arg("program"), py::arg("ranks"), Unlocked(),
           "ranks: what Executor.times() gave on each, from one origin. Error: times of another program.")
      .def(
          "snapshot", [](const PyMeasured& s) { return Take(SimulationSnapshot(s.simulation)); }, Unlocked(),
          "The dictionary of torch.cuda.memory._snapshot() as JSON: storages at their planned addresses, at the "
          "measured times.")
      .def(
          "chakra", [](const PyMeasured& s, int32_t rank) { return ChakraOf(s.simulation, rank); }, py::arg("rank") = 0,
          "The Chakra execution trace of a rank.");
  m.def(
      "preset_cluster", [](const std::string& name) { return Take(PresetCluster(name)); }, py::arg("name"), Unlocked(),
      "The cluster file of a preset such as h100-80gb-32.");
  m.def(
      "predict_collective",
      [](const std::string& cluster_text, const std::string& kind, int64_t bytes, int64_t ranks,
         const std::string& cluster_file) {
        OneCollective c = Take(PredictCollective(Take(LoadCluster(cluster_text, cluster_file)), kind, bytes, ranks));
        return std::tuple(c.us, c.time.latency_us, c.time.moved_bytes, c.group.nodes,
                          std::string(AlgorithmName(c.time.algorithm)), c.error);
      },
      py::arg("cluster"), py::arg("kind"), py::arg("bytes"), py::arg("ranks"), py::arg("cluster_file") = "cluster",
      "One collective over ranks that fill nodes: (us, of it latency, bytes sent by a rank, nodes, algorithm, standard "
      "deviation of ln(measured / predicted)).");
  m.def("preset_names", [] {
    std::vector<std::string> names;
    for (std::string_view name : PresetNames()) names.emplace_back(name);
    return names;
  });
  m.def(
      "cluster_devices",
      [](const std::string& text, const std::string& file) { return Take(LoadCluster(text, file)).devices; },
      py::arg("text"), py::arg("file") = "cluster", Unlocked(),
      "How many devices a cluster has; error: what is wrong with its file.");
}

}  // namespace interlace
