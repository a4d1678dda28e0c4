// core_set.cc — `_core.ProgramSet`: the stages of a pipeline, a program each, checked together (ir/program_set.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "ir/program_set.h"
#include "ir/text.h"
#include "sim/simulate_set.h"

namespace py = pybind11;

namespace interlace {
namespace {

// A set is not copied, as its programs are not, which a vector of them does not tell.
struct PySet {
  std::unique_ptr<const ProgramSet> set;
};

PySet MakeSet(const std::string& axis, const std::vector<const Program*>& programs) {
  auto set = std::make_unique<ProgramSet>();
  set->axis = axis;
  for (const Program* program : programs)
    set->stages.push_back({"stage" + std::to_string(set->stages.size()) + ".il", program->Clone()});
  return {std::move(set)};
}

Result<PySet> ParseSet(const std::string& text, const std::map<std::string, std::string>& stages,
                       const std::string& file) {
  const ReadText read = [&](const std::string& name) -> Result<std::string> {
    const auto found = stages.find(name);
    if (found == stages.end()) return MakeError("no text was given for ", name);
    return found->second;
  };
  INTERLACE_ASSIGN(ProgramSet set, ParseProgramSet(text, file, read));
  return PySet{std::make_unique<const ProgramSet>(std::move(set))};
}

}  // namespace

void AddSets(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<PySet>(m, "ProgramSet")
      .def(py::init(&MakeSet), py::arg("axis"), py::arg("programs"), Unlocked(),
           "Copies of the programs of the stages along an axis; their files are called stage0.il, stage1.il, ...")
      .def_static(
          "parse",
          [](const std::string& text, const std::map<std::string, std::string>& stages, const std::string& file) {
            return Take(ParseSet(text, stages, file));
          },
          py::arg("text"), py::arg("stages"), py::arg("file") = "set", Unlocked(),
          "The set of a text; stages: the texts of its files by name. Error: file:line:col and why.")
      .def(
          "print", [](const PySet& self) { return PrintProgramSet(*self.set); }, Unlocked(), "The set's own text.")
      .def_property_readonly("axis", [](const PySet& self) { return self.set->axis; })
      .def(
          "texts",
          [](const PySet& self) {
            std::vector<std::pair<std::string, std::string>> out;
            for (const Stage& stage : self.set->stages) out.emplace_back(stage.file, Print(stage.program));
            return out;
          },
          Unlocked(), "Files of the stages, and their texts.")
      .def(
          "check", [](const PySet& self) { Take(CheckProgramSet(*self.set)); }, Unlocked(),
          "Error: a stage that is not valid, stages that do not fit, or that would wait for one another for ever.");
  m.def(
      "simulate_set",
      [](const PySet& set, const std::string& cluster, const std::string& profile, const std::string& output,
         bool every_rank, const std::string& machine, bool foreign) {
        return Take(SimulateSetText(*set.set, cluster, profile, output, {every_rank, machine, foreign}));
      },
      py::arg("set"), py::arg("cluster"), py::arg("profile") = "", py::arg("output") = "json",
      py::arg("every_rank") = false, py::arg("machine") = "", py::arg("foreign") = false, Unlocked(),
      "A predicted step of all stages together (sim/simulate_set.h). cluster: a preset's name or the text of a "
      "cluster\n"
      "file; profile: its text; output: \"json\", \"summary\" or \"trace\"; machine: the fingerprint that the profile "
      "must have\nunless foreign. Error: also what `check` finds.");
}

}  // namespace interlace
