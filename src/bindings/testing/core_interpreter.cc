// core_interpreter.cc — `_core.testing.interpret`: the reference interpreter (ir/testing/interpreter.h), for tests that
// run programs on real ranks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "bindings/testing/core_testing.h"
#include "ir/program_set.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "ir/text.h"

namespace py = pybind11;

namespace interlace {
namespace {

Result<testing::RunResult> InterpretTexts(const std::string& axis, const std::vector<std::string>& texts,
                                          testing::InterpretOptions options) {
  ProgramSet set;
  set.axis = axis;
  for (const std::string& text : texts) {
    const std::string file = "stage" + std::to_string(set.stages.size()) + ".il";
    INTERLACE_ASSIGN(Program program, Parse(text, file));
    set.stages.push_back({file, std::move(program)});
  }
  if (set.stages.size() == 1) return testing::Interpret(set.stages[0].program, options);
  INTERLACE_TRY(CheckProgramSet(set));
  return testing::InterpretSet(set, options);
}

}  // namespace

void AddInterpreter(py::module_& m) {
  m.def(
      "random_program",
      [](uint64_t seed, int layers, int64_t max_width, bool cross_entropy) {
        return Print(testing::RandomProgram(
            {.seed = seed, .layers = layers, .max_width = max_width, .cross_entropy = cross_entropy}));
      },
      py::arg("seed"), py::arg("layers"), py::arg("max_width"), py::arg("cross_entropy"),
      "The text of a captured step that is legal but odd (ir/testing/random_program.h).");
  m.def(
      "interpret",
      [](const std::string& axis, const std::vector<std::string>& texts, int64_t steps,
         std::vector<std::vector<double>> hyper, std::map<std::string, std::vector<double>> params) {
        testing::InterpretOptions options;
        options.steps = steps;
        options.hyper = std::move(hyper);
        options.params = std::move(params);
        testing::RunResult result;
        {
          const py::gil_scoped_release unlocked;
          result = Take(InterpretTexts(axis, texts, std::move(options)));
        }
        py::dict out;
        out["outputs"] = result.outputs;
        out["params"] = result.params;
        out["norms"] = result.norms;
        return out;
      },
      py::arg("axis"), py::arg("texts"), py::arg("steps"), py::arg("hyper"), py::arg("params"),
      "A program, or the stages of a set, in plain loops: outputs by name, values of [(step * accumulation + "
      "micro_batch) * ranks + rank]; parameters after the last step; norms by step. Inputs are drawn; a program that "
      "gives them out as outputs shows them.");
}

}  // namespace interlace
