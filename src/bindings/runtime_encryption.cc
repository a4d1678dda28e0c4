// runtime_encryption.cc — the transport's cipher (transport/cipher.h) for what goes between ranks by other ways: the
// values of the store, and what torch's process groups carry.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings/runtime.h"
#include "transport/cipher.h"

namespace py = pybind11;

namespace interlace {

namespace {

py::bytearray ByteArray(size_t size) {
  return py::reinterpret_steal<py::bytearray>(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
}

void CheckKey(const std::string& key) {
  if (key.size() != Cipher::kKeyBytes) throw py::value_error("a key has 32 bytes");
}

// `data` and its tag behind it.
py::bytearray Seal(const std::string& key, uint64_t number, const py::buffer& data) {
  CheckKey(key);
  const py::buffer_info from = data.request();
  const auto size = static_cast<size_t>(from.size * from.itemsize);
  py::bytearray out = ByteArray(size + sizeof(FrameTag));
  char* const to = PyByteArray_AS_STRING(out.ptr());
  {
    const py::gil_scoped_release unlocked;
    Cipher cipher(key, /*encrypts=*/true);
    cipher.Begin(number);
    cipher.Apply(from.ptr, to, size);
    const FrameTag tag = cipher.Tag();
    std::memcpy(to + size, tag.data(), sizeof tag);
  }
  return out;
}

std::optional<py::bytearray> Unseal(const std::string& key, uint64_t number, const py::buffer& data) {
  CheckKey(key);
  const py::buffer_info from = data.request();
  const auto size = static_cast<size_t>(from.size * from.itemsize);
  FrameTag tag;
  if (size < sizeof tag) return std::nullopt;
  const size_t bytes = size - sizeof tag;
  std::memcpy(tag.data(), static_cast<const char*>(from.ptr) + bytes, sizeof tag);
  py::bytearray out = ByteArray(bytes);
  char* const to = PyByteArray_AS_STRING(out.ptr());
  bool whole;
  {
    const py::gil_scoped_release unlocked;
    Cipher cipher(key, /*encrypts=*/false);
    cipher.Begin(number);
    cipher.Apply(from.ptr, to, bytes);
    whole = cipher.Verify(tag);
  }
  if (!whole) return std::nullopt;
  return out;
}

}  // namespace

void BindEncryption(py::module_& m) {
  m.def(
      "find_crypto", [](const std::vector<std::string>& names) { Unwrap(FindCrypto(names)); },
      py::arg("names") = std::vector<std::string>(),
      "Error: neither the platform's libcrypto nor one of these libraries is here.");
  m.def("seal", &Seal, py::arg("key"), py::arg("number"), py::arg("data"),
        "The bytes encrypted, and a tag of 16 bytes. A key (32 bytes) has each number once.");
  m.def("unseal", &Unseal, py::arg("key"), py::arg("number"), py::arg("data"),
        "What was sealed with this key as this number; None: something else.");
}

}  // namespace interlace
