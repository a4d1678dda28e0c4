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

// Encrypts and puts the tag behind, or decrypts what is before the tag; nothing: that is not what was sealed.
std::optional<py::bytearray> ApplyCipher(const std::string& key, uint64_t number, const py::buffer& data, bool seals) {
  if (key.size() != Cipher::kKeyBytes) throw py::value_error("a key has 32 bytes");
  const py::buffer_info given = data.request();
  const auto* const from = static_cast<const char*>(given.ptr);
  auto bytes = static_cast<size_t>(given.size * given.itemsize);
  FrameTag tag;
  if (!seals && bytes < sizeof tag) return std::nullopt;
  if (!seals) bytes -= sizeof tag;
  const auto room = static_cast<Py_ssize_t>(seals ? bytes + sizeof tag : bytes);
  auto out = py::reinterpret_steal<py::bytearray>(PyByteArray_FromStringAndSize(nullptr, room));
  char* const to = PyByteArray_AS_STRING(out.ptr());
  bool good = true;
  {
    const py::gil_scoped_release unlocked;
    Cipher cipher(key, seals);
    cipher.Begin(number);
    cipher.Apply(from, to, bytes);
    if (!seals) std::memcpy(tag.data(), from + bytes, sizeof tag);
    if (seals) std::memcpy(to + bytes, (tag = cipher.Tag()).data(), sizeof tag);
    good = seals || cipher.Verify(tag);
  }
  if (!good) return std::nullopt;
  return out;
}

}  // namespace

void BindEncryption(py::module_& m) {
  m.def(
      "find_crypto", [](const std::vector<std::string>& names) { Unwrap(FindCrypto(names)); },
      py::arg("names") = std::vector<std::string>(),
      "Error: neither the platform's libcrypto nor one of these libraries is here.");
  const auto bind = [&m](const char* name, bool seals, const char* doc) {
    const auto apply = [seals](const std::string& key, uint64_t number, const py::buffer& data) {
      return ApplyCipher(key, number, data, seals);
    };
    m.def(name, apply, py::arg("key"), py::arg("number"), py::arg("data"), doc);
  };
  bind("seal", true, "The bytes encrypted, and a tag of 16 bytes. A key (32 bytes) has each number once.");
  bind("unseal", false, "What was sealed with this key as this number; None: something else.");
}

}  // namespace interlace
