// runtime_snapshot.cc — SnapshotWriter for Python: states written to files beside the training step.
#include <cerrno>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/runtime.h"
#include "io/snapshot_writer.h"

namespace py = pybind11;

namespace interlace {

namespace {

// An OSError with number and file, as Python's own functions raise it.
void Raise(const FileFailure& failure) {
  if (!failure) return;
  errno = failure.code;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, failure.path.c_str());
  throw py::error_already_set();
}

// (tensor, first element, end, index of the file, offset in bytes); the tensor is on the CPU and contiguous.
using PieceTuple = std::tuple<at::Tensor, int64_t, int64_t, int32_t, int64_t>;

std::vector<Piece> PiecesOf(const std::vector<PieceTuple>& tuples, size_t files) {
  std::vector<Piece> pieces;
  pieces.reserve(tuples.size());
  for (const auto& [tensor, begin, end, file, offset] : tuples) {
    if (!tensor.is_cpu() || !tensor.is_contiguous()) throw py::value_error("a piece must be contiguous on the CPU");
    if (begin < 0 || begin > end || end > tensor.numel()) throw py::index_error("a piece reaches beyond its tensor");
    if (file < 0 || static_cast<size_t>(file) >= files || offset < 0)
      throw py::index_error("a piece has no such place");
    const int64_t size = static_cast<int64_t>(tensor.element_size());
    const char* data = static_cast<const char*>(tensor.const_data_ptr()) + begin * size;
    pieces.push_back({data, (end - begin) * size, file, offset});
  }
  return pieces;
}

}  // namespace

void BindSnapshot(py::module_& m, py::class_<Executor>& executor) {
  py::class_<SnapshotWriter, std::shared_ptr<SnapshotWriter>>(m, "SnapshotWriter")
      .def(py::init([](std::vector<std::string> paths, int64_t chunk_bytes, int64_t staging_bytes) {
             if (chunk_bytes < kBlock || chunk_bytes % kBlock != 0)
               throw py::value_error("chunk_bytes must be a multiple of " + std::to_string(kBlock));
             return std::make_shared<SnapshotWriter>(
                 std::move(paths), SnapshotWriter::Options{.chunk_bytes = chunk_bytes, .staging_bytes = staging_bytes});
           }),
           py::arg("paths"), py::arg("chunk_bytes") = 1 << 20, py::arg("staging_bytes") = INT64_MAX)
      .def(
          "add",
          [](SnapshotWriter& self, const std::vector<PieceTuple>& pieces) { self.Add(PiecesOf(pieces, self.files())); },
          py::arg("pieces"), "The caller keeps the tensors, and leaves them as they are until wait_staged().")
      .def("close", &SnapshotWriter::Close, "Nothing more will be added.")
      .def("wait_staged", &SnapshotWriter::WaitStaged, py::call_guard<py::gil_scoped_release>())
      .def("staged", &SnapshotWriter::staged)
      .def(
          "wait_durable",
          [](SnapshotWriter& self) {
            FileFailure failure;
            {
              py::gil_scoped_release released;
              failure = self.WaitDurable();
            }
            Raise(failure);
            std::vector<std::tuple<int32_t, int64_t, int64_t, uint64_t>> sums;
            for (const RangeSum& s : self.sums()) sums.emplace_back(s.file, s.offset, s.bytes, s.sum);
            return sums;
          },
          "Until the disk has everything: (file, offset, bytes, checksum) of every range. OSError: what was refused.")
      .def("cancel", &SnapshotWriter::Cancel)
      .def("stats", [](SnapshotWriter& self) {
        const SnapshotWriter::Stats stats = self.stats();
        return py::dict(py::arg("staged_bytes") = stats.staged_bytes,
                        py::arg("staging_peak_bytes") = stats.staging_peak_bytes,
                        py::arg("stall_seconds") = stats.stall_seconds, py::arg("cpu_seconds") = stats.cpu_seconds,
                        py::arg("seconds") = stats.seconds);
      });
  m.def(
      "create_file",
      [](const std::string& path, const py::bytes& head, int64_t size) {
        const auto text = static_cast<std::string>(head);
        if (size < static_cast<int64_t>(text.size())) throw py::value_error("the head is larger than the file");
        FileFailure failure;
        {
          py::gil_scoped_release released;
          failure = CreateFile(path, text, size);
        }
        Raise(failure);
      },
      py::arg("path"), py::arg("head"), py::arg("size"), "A new file of that size with its room set aside.");
  executor
      .def(
          "set_snapshot",
          [](Executor& self, std::shared_ptr<SnapshotWriter> writer) {
            if (!writer) return self.SetBeforeUpdate(nullptr);
            self.SetBeforeUpdate([writer = std::move(writer)] { writer->WaitStaged(); });
          },
          py::arg("writer").none(true), "Updates wait until this writer has copied the states; None: no longer.")
      .def(
          "where",
          [](const Executor& self) {
            const Executor::Place place = self.Where();
            return py::dict(py::arg("step") = place.step, py::arg("op") = place.op, py::arg("units") = place.units,
                            py::arg("module") = place.module);
          },
          "The step and op that run now, or ran last; may be asked from any thread.");
}

}  // namespace interlace
