// core.h — what the files of the Python module `_core` share.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "base/result.h"

namespace interlace {

// Becomes `_core.Error`, a ValueError.
struct PythonError : std::runtime_error {
  explicit PythonError(const Error& error) : std::runtime_error(error.ToString()) {}
};

template <typename T>
T Take(Result<T> result) {
  if (!result.ok()) throw PythonError(result.error());
  return std::move(*result);
}

// Simulation, cluster presets, checkers of the trace formats (core_sim.cc).
void AddSimulation(pybind11::module_& m);
// Program sets (core_set.cc).
void AddSets(pybind11::module_& m);
// Plans: read, checked, found (core_plan.cc).
void AddPlanner(pybind11::module_& m);
// Readers of trace files, parts of the planner (testing/core_testing.cc): null unless the build has INTERLACE_TESTING.
[[gnu::weak]] void AddTesting(pybind11::module_& m);

}  // namespace interlace
