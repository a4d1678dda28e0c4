// core_testing.cc — _core.testing: readers of the trace files that we write, parts of the planner and the interpreter,
// for tests and benchmarks. Only in builds with INTERLACE_TESTING: what pip installs does not have it.
#include "bindings/testing/core_testing.h"

#include <string>

#include "bindings/core.h"
#include "trace/testing/check_trace.h"

namespace py = pybind11;

namespace interlace {

// Called by the module's own initialization (core.cc).
void AddTesting(py::module_& module) {
  py::module_ m = module.def_submodule("testing", "Readers of trace files, parts of the planner, the interpreter.");
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def(
      "check_chrome_trace", [](const std::string& json) { Take(CheckChromeTrace(json)); }, py::arg("json"), Unlocked(),
      "Error: the first rule that a trace breaks.");
  m.def(
      "check_memory_snapshot", [](const std::string& json) { Take(CheckMemorySnapshot(json)); }, py::arg("json"),
      Unlocked(), "Error: the first rule that a snapshot breaks.");
  AddPipeline(m);
  AddLayers(m);
  AddPacing(m);
  AddInterpreter(m);
}

}  // namespace interlace
