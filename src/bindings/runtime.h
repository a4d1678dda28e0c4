// runtime.h — what the files of the Python module `_runtime` share.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "base/result.h"
#include "runtime/executor.h"

namespace interlace {

// Becomes `_runtime.Error`, a RuntimeError.
class RuntimeError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value; an error is thrown as an Exception.
template <typename Exception = RuntimeError, typename T>
T Unwrap(Result<T> result) {
  if (!result.ok()) throw Exception(result.error().ToString());
  return std::move(*result);
}

// A method as a function that throws its error and runs without the interpreter lock.
template <auto Method>
struct Unlocked;
template <typename Class, typename Value, typename... Args, Result<Value> (Class::*Method)(Args...)>
struct Unlocked<Method> {
  static auto Call(Class& self, std::decay_t<Args>... args) {
    pybind11::gil_scoped_release released;
    if constexpr (std::is_same_v<Value, Ok>) {
      Unwrap((self.*Method)(std::forward<Args>(args)...));
    } else {
      return Unwrap((self.*Method)(std::forward<Args>(args)...));
    }
  }
};

// Collectives and tier copies without a program (runtime_measure.cc).
void BindMeasure(pybind11::module_& m);
// Kernels one by one (testing/runtime_testing.cc): null unless the build has INTERLACE_TESTING.
[[gnu::weak]] void BindTesting(pybind11::module_& m);
// States written beside the steps (runtime_snapshot.cc).
void BindSnapshot(pybind11::module_& m, pybind11::class_<Executor>& executor);
// What is looked at before every step (runtime_looks.cc).
void BindLooks(pybind11::module_& m);
// The cipher of the transport, for other ways (runtime_encryption.cc).
void BindEncryption(pybind11::module_& m);
// What was recorded of a step (runtime_trace.cc).
void BindTrace(pybind11::module_& m, pybind11::class_<Executor>& executor);

}  // namespace interlace
