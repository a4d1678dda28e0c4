// runtime_measure.cc — _runtime.Comm, _runtime.FileTier and _runtime.Cubins: collectives, tier copies and compiled
// regions without a program, for the profile of a machine (python/interlace/cost), for who gives regions to an executor
// (python/interlace/regions/cuda.py), and for tests.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/runtime.h"
#include "runtime/comm.h"
#include "runtime/region_driver.h"
#include "tier/tier.h"

namespace py = pybind11;

namespace interlace {

namespace {

std::unique_ptr<Comm> CreateComm(const std::string& name, int64_t rank, int64_t size, const std::string& backend,
                                 double timeout_s, const std::string& group, int64_t row) {
  return Unwrap(Comm::Create({name, rank, size, backend, group, {}, row}, timeout_s));
}

CubinRegion CubinRegionOf(const py::handle& region) {
  CubinRegion out{.key = region.attr("key").cast<std::string>(),
                  .operands = region.attr("operands").cast<int64_t>(),
                  .results = region.attr("results").cast<int64_t>(),
                  .workspace = region.attr("workspace").cast<int64_t>(),
                  .kernels = {}};
  for (const py::handle& kernel : region.attr("kernels")) {
    out.kernels.push_back({.name = kernel.attr("name").cast<std::string>(),
                           .image = kernel.attr("cubin").cast<std::string>(),
                           .blocks = kernel.attr("grid").cast<std::array<uint32_t, 3>>(),
                           .threads = kernel.attr("threads").cast<uint32_t>(),
                           .shared_bytes = kernel.attr("shared").cast<uint32_t>(),
                           .parameters = kernel.attr("parameters").cast<std::vector<std::pair<int64_t, int64_t>>>()});
  }
  return out;
}

}  // namespace

// Called by the module's own initialization (runtime.cc).
void BindMeasure(py::module_& m) {
  using Tensors = std::vector<at::Tensor>;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Comm>(m, "Comm")
      .def(py::init(&CreateComm), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("backend"),
           py::arg("timeout_s"), py::arg("group") = "", py::arg("row") = 0, no_gil)
      .def("start_gather", &Unlocked<&Comm::StartGather>::Call)
      .def("start_reduce", &Unlocked<&Comm::StartReduce>::Call)
      .def(
          "start_grid_reduce",
          [](Comm& c, Tensors flats, Tensors shards, std::vector<int> within, std::vector<int> across,
             std::string label) {
            const RankGrid grid{std::move(within), std::move(across)};
            return Unwrap(c.StartGridReduce(std::move(flats), std::move(shards), grid, std::move(label)));
          },
          no_gil)
      .def("start_all_reduce", &Unlocked<&Comm::StartAllReduce>::Call)
      .def("start_all_to_all", &Unlocked<&Comm::StartAllToAll>::Call)
      .def("start_broadcast", &Unlocked<&Comm::StartBroadcast>::Call)
      .def("start_send", &Unlocked<&Comm::StartSend>::Call)
      .def("start_recv", &Unlocked<&Comm::StartRecv>::Call)
      .def(
          "wait", [](Comm& c, int64_t ticket) { Unwrap(c.Wait(ticket)); }, no_gil)
      .def("progress", &Comm::Progress, no_gil, "Moves what can be moved without waiting.")
      .def("stats", [](const Comm& c) {
        const Comm::Stats s = c.stats();
        py::dict out;
        out["bytes_sent"] = s.bytes_sent;
        out["bytes_received"] = s.bytes_received;
        out["receive_buffer_peak_bytes"] = s.receive_buffer_peak_bytes;
        out["calls"] = s.calls;
        return out;
      });

  // The tensors of a transfer must stay, and stay as they are, until its ticket was waited for.
  py::class_<Tier>(m, "FileTier")
      .def(py::init([](const std::string& folder, int64_t rank, int64_t ranks) {
             return Unwrap(MakeFileTier({.folder = folder, .rank = rank, .ranks = ranks}));
           }),
           py::arg("folder"), py::arg("rank") = 0, py::arg("ranks") = 1)
      .def(
          "reserve", [](Tier& t, const std::string& name, int64_t bytes) { return Unwrap(t.Reserve(name, bytes)); },
          py::arg("name"), py::arg("bytes"))
      .def(
          "start_write",
          [](Tier& t, Tier::Region region, const at::Tensor& from) {
            return t.StartWrite(region, from.const_data_ptr(), static_cast<int64_t>(from.nbytes()));
          },
          no_gil)
      .def(
          "start_read",
          [](Tier& t, Tier::Region region, const at::Tensor& to) {
            return t.StartRead(region, to.mutable_data_ptr(), static_cast<int64_t>(to.nbytes()));
          },
          no_gil)
      .def(
          "wait", [](Tier& t, Tier::Ticket ticket) { Unwrap(t.Wait(ticket)); }, no_gil)
      .def_property_readonly("bytes_out", [](const Tier& t) { return t.stats().bytes_out; })
      .def_property_readonly("bytes_in", [](const Tier& t) { return t.stats().bytes_in; })
      .def_property_readonly("direct", [](const Tier& t) { return t.stats().direct; });

  py::class_<Cubins, std::shared_ptr<Cubins>>(m, "Cubins")
      .def(
          py::init([](const std::string& target, const std::string& device, const py::list& regions) {
            std::vector<CubinRegion> found;
            for (const py::handle& region : regions) found.push_back(CubinRegionOf(region));
            const py::gil_scoped_release released;
            return std::const_pointer_cast<Cubins>(Unwrap(Cubins::Load(target, c10::Device(device), std::move(found))));
          }),
          py::arg("target"), py::arg("device"), py::arg("regions"),
          "Compiled regions (regions/cuda.py) on a device; loaded until the process ends.")
      .def("refused", &Cubins::Refused, "By region: why the driver does not take it.")
      .def(
          "launch",
          [](const Cubins& c, const std::string& key, const std::vector<uintptr_t>& pointers,
             std::optional<uintptr_t> stream) {
            const CubinRegion* const region = c.Find(key);
            if (region == nullptr || std::ssize(pointers) != region->pointers())
              throw RuntimeError("no region " + key + " of " + std::to_string(pointers.size()) + " pointers is loaded");
            std::vector<void*> addresses;
            for (uintptr_t pointer : pointers) addresses.push_back(reinterpret_cast<void*>(pointer));
            Unwrap(c.Launch(*region, addresses, stream ? reinterpret_cast<void*>(*stream) : Unwrap(c.CurrentStream())));
          },
          py::arg("key"), py::arg("pointers"), py::arg("stream") = py::none(), no_gil,
          "A region's kernels, on addresses of operands, results and workspace; stream: a handle, else the current "
          "one.");
}

}  // namespace interlace
