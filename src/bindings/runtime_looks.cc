// runtime_looks.cc — what Python looks at before every step, of as many values as a model has: whether any has changed.
// In a third of the time of loops there, of which most is that of memory no cache holds; a step on a device waits for it.
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <string>
#include <vector>

#include "bindings/runtime.h"

namespace py = pybind11;

namespace interlace {

namespace {

// By position: dictionaries that do not hold the very values beside them, in this order.
std::vector<size_t> Differing(const py::tuple& tables) {
  std::vector<size_t> found;
  for (size_t i = 0; i < tables.size(); ++i) {
    PyObject* const pair = PyTuple_GET_ITEM(tables.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyDict_Check(PyTuple_GET_ITEM(pair, 0)) ||
        !PyTuple_Check(PyTuple_GET_ITEM(pair, 1)))
      throw py::type_error("differing takes pairs of a dict and a tuple");
    PyObject *const dict = PyTuple_GET_ITEM(pair, 0), *const values = PyTuple_GET_ITEM(pair, 1);
    bool same = PyDict_Size(dict) == PyTuple_GET_SIZE(values);
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t place = 0;
    for (Py_ssize_t n = 0; same && PyDict_Next(dict, &place, &key, &value) != 0; ++n)
      same = n < PyTuple_GET_SIZE(values) && PyTuple_GET_ITEM(values, n) == value;
    if (!same) found.push_back(i);
  }
  return found;
}

const at::Tensor& TensorOf(PyObject* object) {
  if (!THPVariable_Check(object)) throw py::type_error("a list of tensors is wanted");
  return THPVariable_Unpack(object);
}

// Of each tensor: whether it requires a gradient, and the address of its data, 0 where it has none.
py::bytes Marks(const py::list& tensors) {
  std::string out(tensors.size() * sizeof(uintptr_t), '\0');
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = TensorOf(PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i)));
    const auto at = tensor.has_storage() ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) : 0;
    const uintptr_t mark = 2 * at + (tensor.requires_grad() ? 1 : 0);  // addresses of user memory leave the highest bit
    std::memcpy(out.data() + i * sizeof mark, &mark, sizeof mark);
  }
  return out;
}

// What register_hook and register_post_accumulate_grad_hook were given, tensor by tensor.
py::list Hooks(const py::list& tensors) {
  py::list found;
  for (const py::handle& item : tensors) {
    (void)TensorOf(item.ptr());
    const auto* const tensor = reinterpret_cast<THPVariable*>(item.ptr());
    for (PyObject* const table : {tensor->backward_hooks, tensor->post_accumulate_grad_hooks}) {
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t place = 0;
      while (table != nullptr && PyDict_Check(table) && PyDict_Next(table, &place, &key, &value) != 0)
        found.append(py::handle(value));
    }
  }
  return found;
}

}  // namespace

void BindLooks(py::module_& m) {
  m.def("differing", &Differing, py::arg("tables"), "Positions of (dict, tuple) whose dict holds other values than these objects.");
  m.def("marks", &Marks, py::arg("tensors"), "Equal for equal lists of tensors that lie where they lay and want the gradients they wanted.");
  m.def("hooks", &Hooks, py::arg("tensors"), "Hooks of their gradients, in order.");
}

}  // namespace interlace
