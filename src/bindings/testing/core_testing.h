// core_testing.h — what the files of the Python module `_core.testing` share.
#pragma once

#include <pybind11/pybind11.h>

namespace interlace {

// The planner's choice between stages, and a model's layers tuned in any space (core_pipeline.cc).
void AddPipeline(pybind11::module_& m);
// What layers, and a stage of them, cost (core_layers.cc).
void AddLayers(pybind11::module_& m);
// What a simulated step is made of, for devices that are to take its times (core_pacing.cc).
void AddPacing(pybind11::module_& m);
// The reference interpreter (core_interpreter.cc).
void AddInterpreter(pybind11::module_& m);

}  // namespace interlace
