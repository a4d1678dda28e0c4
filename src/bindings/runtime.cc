// runtime.cc — the Python module `_runtime`: the executor. Steps run with the interpreter lock released.
#include "bindings/runtime.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "base/suggest.h"
#include "ir/text.h"
#include "runtime/cpu_attention.h"
#include "runtime/cpu_products.h"
#include "runtime/region_driver.h"
#include "runtime/rule_loops.h"
#include "transport/shared_rings.h"

namespace py = pybind11;

namespace interlace {
namespace {

template <typename T>
T Take(const py::dict& dict, const char* key, T otherwise) {
  return dict.contains(key) ? dict[key].cast<T>() : otherwise;
}

AxisSpec AxisOf(const py::dict& dict) {
  AxisSpec spec;
  spec.name = dict["name"].cast<std::string>();
  spec.rank = dict["rank"].cast<int64_t>();
  spec.size = dict["size"].cast<int64_t>();
  spec.backend = Take<std::string>(dict, "backend", "none");
  spec.native = Take<std::string>(dict, "native", "");
  spec.beside = Take<std::string>(dict, "beside", "");
  return spec;
}

// A Python object whose reference is dropped under the interpreter lock, wherever that happens.
std::shared_ptr<py::object> Shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            py::gil_scoped_acquire lock;
            delete held;
          }};
}

// A graph that Python makes, torch.cuda.CUDAGraph: torch's registry has none for CUDA yet.
class PythonGraph final : public DeviceGraph {
 public:
  explicit PythonGraph(const py::object& make) : graph_(Shared(make())) {}
  void Begin(c10::MempoolId_t pool) override {
    const py::gil_scoped_acquire lock;
    const py::object shared = pool == c10::MempoolId_t{0, 0} ? py::object(py::none()) : py::cast(pool);
    Call("capture_begin", py::arg("pool") = shared, py::arg("capture_error_mode") = "thread_local");
  }
  void End() override {
    const py::gil_scoped_acquire lock;
    Call("capture_end");
  }
  void Replay() override {
    const py::gil_scoped_acquire lock;
    Call("replay");
  }
  c10::MempoolId_t Pool() override {
    const py::gil_scoped_acquire lock;
    return Call("pool").cast<c10::MempoolId_t>();
  }

 private:
  template <typename... Args>
  py::object Call(const char* name, Args&&... args) {
    try {
      return graph_->attr(name)(std::forward<Args>(args)...);
    } catch (const py::error_already_set& error) {
      throw RuntimeError(error.what());
    }
  }
  std::shared_ptr<py::object> graph_;
};

RuntimeOptions OptionsOf(const py::dict& dict) {
  for (const auto& item : dict) {
    const std::string key = py::str(item.first);
    static const std::vector<std::string_view> known = {
        "rng",    "seed",           "debug",         "skip_nonfinite", "opaque",      "tier",
        "arena",  "tier_bandwidth", "captured_here", "regions",        "region_keys", "say",
        "cubins", "graph",          "device_graphs", "join_updates",   "own_kernels"};
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw RuntimeError("unknown option \"" + key + "\"" + DidYouMean(key, known));
    }
  }
  RuntimeOptions options;
  const std::string rng = Take<std::string>(dict, "rng", "keyed");
  if (rng != "keyed" && rng != "compat")
    throw RuntimeError("the option rng is \"keyed\" or \"compat\", not \"" + rng + "\"");
  options.keyed_random = rng == "keyed";
  options.seed = Take<uint64_t>(dict, "seed", 0);
  options.debug = Take<bool>(dict, "debug", false);
  options.arena = Take<bool>(dict, "arena", true);
  options.join_updates = Take<bool>(dict, "join_updates", true);
  options.own_kernels = Take<bool>(dict, "own_kernels", true);
  options.captured_here = Take<bool>(dict, "captured_here", false);
  options.skip_nonfinite = Take<bool>(dict, "skip_nonfinite", false);
  options.tier = Take<std::string>(dict, "tier", "");
  options.tier_bandwidth = Take<double>(dict, "tier_bandwidth", 0);
  options.regions = Take<std::string>(dict, "regions", "");
  static const std::map<std::string, DeviceGraphs> graphs = {
      {"off", DeviceGraphs::kOff}, {"auto", DeviceGraphs::kAuto}, {"on", DeviceGraphs::kOn}};
  const auto wanted = graphs.find(Take<std::string>(dict, "device_graphs", "off"));
  if (wanted == graphs.end()) throw RuntimeError("the option device_graphs is \"off\", \"auto\" or \"on\"");
  options.device_graphs = wanted->second;
  options.region_keys = Take<std::vector<std::string>>(dict, "region_keys", {});
  if (dict.contains("cubins") && !dict["cubins"].is_none())
    options.cubins = dict["cubins"].cast<std::shared_ptr<Cubins>>();
  if (dict.contains("say")) {
    options.say = [callable = Shared(dict["say"])](const std::string& text) {
      py::gil_scoped_acquire lock;
      (*callable)(text);
    };
  }
  if (dict.contains("graph")) {
    options.make_graph = [make = Shared(dict["graph"])] {
      const py::gil_scoped_acquire lock;
      return std::make_unique<PythonGraph>(*make);
    };
  }
  if (dict.contains("opaque") && !dict["opaque"].is_none()) {
    const auto callable = Shared(dict["opaque"]);
    options.opaque = [callable](const std::string& module, const std::string& part,
                                const std::vector<at::Tensor>& inputs) {
      py::gil_scoped_acquire lock;
      return (*callable)(module, part, inputs).cast<std::vector<at::Tensor>>();
    };
  }
  return options;
}

py::dict DictOf(const DebugRecord& record) {
  py::list results;
  for (const ValueReport& value : record.results) {
    results.append(py::dict(py::arg("value") = "%" + std::to_string(value.value), py::arg("type") = value.type,
                            py::arg("min") = value.min, py::arg("max") = value.max, py::arg("mean") = value.mean,
                            py::arg("nonfinite") = value.nonfinite));
  }
  return py::dict(py::arg("index") = record.index, py::arg("phase") = record.phase,
                  py::arg("micro_batch") = record.micro_batch, py::arg("name") = record.name,
                  py::arg("text") = record.text, py::arg("module") = record.module, py::arg("source") = record.source,
                  py::arg("results") = results);
}

py::dict StepDict(const StepResult& result) {
  py::dict outputs;
  for (const auto& [name, tensors] : result.outputs) outputs[py::str(name)] = tensors;
  py::dict dict;
  dict["outputs"] = outputs;
  dict["norm"] = result.has_norm ? py::object(py::float_(result.norm)) : py::none();
  dict["finite"] = result.finite;
  dict["note"] = result.note;
  dict["nonfinite"] = result.nonfinite ? py::object(DictOf(*result.nonfinite)) : py::none();
  return dict;
}

py::dict StatsDict(const ExecutorStats& stats) {
  py::dict counts;
  for (const auto& [name, count] : stats.op_counts) counts[py::str(name)] = count;
  py::dict dict;
  dict["steps"] = stats.counters.steps;
  dict["ops"] = stats.counters.ops;
  dict["instructions"] = stats.instructions;
  dict["op_counts"] = counts;
  dict["persistent_bytes"] = stats.persistent_bytes;
  dict["live_bytes"] = stats.live_bytes;
  dict["peak_bytes"] = stats.peak_bytes;
  dict["peak_op"] = stats.peak_op;
  dict["placed_bytes"] = stats.counters.placed_bytes;
  dict["copied_bytes"] = stats.counters.copied_bytes;
  dict["looped_updates"] = stats.counters.looped_updates;
  dict["skipped_updates"] = stats.counters.skipped_updates;
  dict["bytes_sent"] = stats.comm.bytes_sent;
  dict["bytes_received"] = stats.comm.bytes_received;
  dict["receive_buffer_peak_bytes"] = stats.comm.receive_buffer_peak_bytes;
  dict["collectives"] = stats.comm.calls;
  dict["tier_bytes_out"] = stats.tier.bytes_out;
  dict["tier_bytes_in"] = stats.tier.bytes_in;
  dict["tier_seconds_out"] = static_cast<double>(stats.tier.out_ns) * 1e-9;
  dict["tier_seconds_in"] = static_cast<double>(stats.tier.in_ns) * 1e-9;
  dict["tier_reserved_bytes"] = stats.tier.reserved_bytes;
  dict["tier_buffer_bytes"] = stats.tier.buffer_bytes;
  dict["tier_direct"] = stats.tier.direct;
  dict["heap_bytes"] = stats.heap_bytes;
  dict["tier_note"] = stats.tier_note;
  return dict;
}

py::dict ArenaDict(const ArenaStats& stats) {
  const auto requests = [](const std::vector<ArenaStats::Request>& list) {
    py::list out;
    for (const auto& r : list)
      out.append(py::dict(py::arg("op") = r.op, py::arg("bytes") = r.bytes, py::arg("times") = r.times));
    return out;
  };
  py::dict dict;
  dict["on"] = stats.on;
  dict["why_not"] = stats.why_not;
  dict["settled"] = stats.settled;
  dict["planned_bytes"] = stats.planned_bytes;
  dict["top_bytes"] = stats.top_bytes;
  dict["live_bytes"] = stats.live_bytes;
  dict["fragmentation"] = stats.fragmentation;
  dict["resident_bytes"] = stats.resident_bytes;
  dict["first_peak_bytes"] = stats.first_peak_bytes;
  dict["outside_peak_bytes"] = stats.outside_peak_bytes;
  dict["kept"] = requests(stats.kept);
  dict["unforeseen"] = requests(stats.unforeseen);
  return dict;
}

py::dict GraphDict(const GraphStats& stats) {
  py::dict dict;
  dict["on"] = stats.on;
  dict["why_not"] = stats.why_not;
  dict["graphs"] = stats.graphs;
  dict["captures"] = stats.captures;
  dict["replays"] = stats.replays;
  dict["bytes"] = stats.bytes;
  return dict;
}

using Batches = std::vector<std::vector<at::Tensor>>;
using Hyper = std::vector<std::vector<double>>;

template <typename F>
auto WithoutLock(F&& f) {
  py::gil_scoped_release released;
  return f();
}

}  // namespace
}  // namespace interlace

PYBIND11_MODULE(_runtime, m) {
  using namespace interlace;
  m.doc() = "Runs compiled training programs.";
  py::register_exception<RuntimeError>(m, "Error", PyExc_RuntimeError);
  py::class_<Executor> executor(m, "Executor");
  executor
      .def(py::init([](const std::string& text, const std::string& device, const std::vector<py::dict>& axes,
                       double timeout_s, const py::dict& options, const Executor* donor, bool take_states) {
             std::vector<AxisSpec> specs;
             for (const py::dict& axis : axes) specs.push_back(AxisOf(axis));
             RuntimeOptions parsed = OptionsOf(options);
             return WithoutLock([&] {
               return Unwrap(Executor::Create(text, c10::Device(device), specs, timeout_s, std::move(parsed), donor,
                                              take_states));
             });
           }),
           py::arg("text"), py::arg("device") = "cpu", py::arg("axes") = std::vector<py::dict>(),
           py::arg("timeout_s") = 300.0, py::arg("options") = py::dict(),
           py::arg("donor").none(true) = static_cast<Executor*>(nullptr), py::arg("take_states") = true,
           "donor: an executor between two steps, whose states, parameters, buffers and connections this one shares; "
           "without "
           "take_states its tier only.")
      .def(
          "tensor", &Unlocked<&Executor::TensorOf>::Call, py::arg("value_id"),
          "The storage of a state, parameter, buffer or constant; shared, not copied. What lies in the tier comes into "
          "memory until the next step or settle().")
      .def("settle", &Unlocked<&Executor::Settle>::Call,
           "Sends every state that lies in the tier between steps back there; tensors over it must not be read until "
           "tensor().")
      .def("flush", &Unlocked<&Executor::Flush>::Call,
           "Runs the optimizer step that the last step left pending (pass reposition_update); whether there was one. "
           "Every rank must "
           "call it before parameters or states are read.")
      .def("put_back", &Unlocked<&Executor::PutBack>::Call, py::arg("value_id"),
           "Like settle(), for one state that tensor() gave and nobody has changed: it is not written again.")
      .def(
          "step",
          [](Executor& self, Batches micro_batches, const Hyper& hyper, int64_t step) {
            return StepDict(WithoutLock([&] { return Unwrap(self.Step(std::move(micro_batches), hyper, step)); }));
          },
          py::arg("micro_batches"), py::arg("hyper"), py::arg("step"),
          "One optimizer step: a dict with outputs (name to one tensor per micro-batch), norm, finite, nonfinite.")
      .def(
          "debug_step",
          [](Executor& self, Batches micro_batches, int64_t step, const std::string& stop_at) {
            const DebugReport report =
                WithoutLock([&] { return Unwrap(self.DebugStep(std::move(micro_batches), step, stop_at)); });
            py::list ops;
            for (const DebugRecord& record : report.records) ops.append(DictOf(record));
            py::dict dict;
            dict["ops"] = ops;
            dict["first_nonfinite"] =
                report.first_nonfinite < 0 ? py::object(py::none()) : py::object(ops[report.first_nonfinite]);
            dict["values"] = report.values;
            return dict;
          },
          py::arg("micro_batches"), py::arg("step"), py::arg("stop_at") = "",
          "Runs the micro-batches op by op without an update; describes every floating result.")
      .def("leave", &Executor::Leave, py::call_guard<py::gil_scoped_release>(),
           "Closes this rank's connections: ranks that wait for it hear of it at once. Nothing can run afterwards.")
      .def(
          "arena_stats", [](const Executor& self) { return ArenaDict(self.ArenaStatistics()); },
          "What the arena of a step is, and what did not go through it.")
      .def(
          "graph_stats", [](const Executor& self) { return GraphDict(self.GraphStatistics()); },
          "Whether micro-batches are device graphs or why not; graphs, captures, replays, bytes of inputs and outputs.")
      .def("workspaces", &Executor::Workspaces,
           "By phase and place of the op: bytes that its kernel takes inside, as learned.")
      .def(
          "memory_plan",
          [](const Executor& self) {
            const MemoryPlan* plan = self.memory_plan();
            return plan == nullptr ? py::object(py::none())
                                   : py::object(py::str(DescribeMemoryPlan(self.program(), *plan)));
          },
          "The plan of the arena as text; None without one.")
      .def("stats", [](const Executor& self) { return StatsDict(self.stats()); });
  m.def(
      "use_rule_loops", [](const std::string& path) { return WithoutLock([&] { return Unwrap(UseRuleLoops(path)); }); },
      py::arg("path"),
      "Has the optimizer steps of this process's executors run by the loops of a library (runtime/rule_loops.h). Gives "
      "the names of those that are left out because their bits are others. Error: it cannot be loaded.");
  m.def("shares_memory", &SharedRings::Work,
        "Whether ranks of this host send one another through memory that they share (transport/shared_rings.h); else over TCP.");
  m.def(
      "products", [] { return OneDnnPays(std::numeric_limits<int64_t>::max()) ? "oneDNN" : "torch"; },
      "Whose large matrix products in float32 run on this host's processor (runtime/cpu_products.h).");
  m.def("attention_drops", &CpuAttentionDrops, "Whether attention on CPUs has a kernel with dropout (runtime/cpu_attention.h).");
  BindSnapshot(m, executor);
  BindTrace(m, executor);
  BindMeasure(m);
  BindEncryption(m);
  BindLooks(m);
  if (BindTesting != nullptr) BindTesting(m);
}
