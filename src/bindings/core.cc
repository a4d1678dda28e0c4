// core.cc — the Python module `_core`: programs, passes, digests, simulation (core_sim.cc); knows nothing of torch
// (docs/architecture.md lists it).
//
// Parsing, printing, verifying and passes run with the interpreter lock released. A Program object belongs to one
// thread at a time.
#include "bindings/core.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <set>
#include <string>

#include "base/digest.h"
#include "io/checksum.h"
#include "ir/func.h"
#include "ir/memory_plan.h"
#include "ir/op_table.h"
#include "ir/print_rule.h"
#include "ir/program.h"
#include "ir/residency.h"
#include "ir/rule_loop.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "passes/explain.h"
#include "passes/inspect.h"
#include "passes/pass_table.h"
#include "passes/pipeline.h"
#include "passes/runner.h"
#include "passes/standard_pipeline.h"

namespace py = pybind11;

namespace interlace {
namespace {

using namespace py::literals;  // NOLINT: "name"_a

// A list with one entry for each, made by `entry`.
template <typename Entries, typename F>
py::list ListOf(const Entries& entries, F&& entry) {
  py::list out;
  for (const auto& each : entries) out.append(entry(each));
  return out;
}

py::object DimObject(const Program& program, const Dim& dim) {
  if (dim.is_const()) return py::int_(dim.value);
  return py::str(program.dims.ToString(dim));
}

py::list DimList(const Program& program, const std::vector<Dim>& dims) {
  return ListOf(dims, [&](const Dim& dim) { return DimObject(program, dim); });
}

// What every declared value has: id, dtype, shape, strides, and the place when it lies in another storage; and more.
template <typename... More>
py::dict ValueDict(const Program& program, ValueId id, More&&... more) {
  const Value& value = program.value(id);
  return py::dict("value"_a = id, "dtype"_a = std::string(DTypeName(value.type.dtype)),
                  "shape"_a = DimList(program, value.type.sizes), "strides"_a = DimList(program, value.type.strides),
                  "root"_a = value.root, "offset"_a = DimObject(program, value.offset), std::forward<More>(more)...);
}

py::object OrNone(int32_t id) {
  return id == kNone ? py::object(py::none()) : py::object(py::int_(id));
}

py::list Params(const Program& program) {
  return ListOf(program.params, [&](const Param& param) {
    const py::list cuts =
        ListOf(param.cuts, [](const Cut& cut) { return py::make_tuple(cut.axis, cut.dim, cut.blocks); });
    return ValueDict(program, param.value, "name"_a = param.name, "trainable"_a = param.trainable,
                     "group"_a = OrNone(param.group), "unit"_a = OrNone(param.unit),
                     "unit_offset"_a = param.unit_offset, "aliases"_a = param.aliases, "cuts"_a = cuts,
                     "shared"_a = param.shared);
  });
}

py::list Units(const Program& program) {
  return ListOf(program.units, [](const Unit& unit) {
    return py::dict("id"_a = unit.id, "axis"_a = unit.axis, "replicas"_a = unit.replicas,
                    "dtype"_a = std::string(DTypeName(unit.dtype)), "numel"_a = unit.numel, "shard"_a = unit.shard,
                    "part"_a = unit.own());
  });
}

py::list States(const Program& program) {
  const Residency residency = ComputeResidency(program);
  const std::set<ValueId> moving(residency.states.begin(), residency.states.end());
  return ListOf(program.states, [&](const State& state) {
    const bool moves = moving.contains(state.value);  // lies out of memory at times
    return ValueDict(program, state.value, "role"_a = state.role, "unit"_a = OrNone(state.unit),
                     "persistent"_a = state.persistent, "out"_a = state.out, "moves"_a = moves);
  });
}

py::list Buffers(const Program& program) {
  std::set<ValueId> changed, used;  // storages that the model writes, and that it reads or writes
  ForEachOp(program, [&](const Op& op) {
    for (ValueId written : WrittenOperands(program, op)) changed.insert(program.RootOf(written));
    ForEachOperand(op, [&](ValueId id) { used.insert(program.RootOf(id)); });
  });
  return ListOf(program.buffers, [&](const Buffer& buffer) {
    return ValueDict(program, buffer.value, "name"_a = buffer.name, "persistent"_a = buffer.persistent,
                     "changed"_a = changed.contains(buffer.value), "used"_a = used.contains(buffer.value));
  });
}

// By name what a micro-batch gives.
py::dict Outputs(const Program& program) {
  py::dict out;
  ForEachOp(program, [&](const Op& op) {
    if (op.kind != OpKind::kOutput || op.Attr("name") == nullptr) return;
    const Type& type = program.value(op.args[0].value).type;
    out[py::str(op.Attr("name")->text)] =
        py::dict("dtype"_a = std::string(DTypeName(type.dtype)), "shape"_a = DimList(program, type.sizes));
  });
  return out;
}

py::list Inputs(const Program& program) {
  return ListOf(program.inputs,
                [&](const Input& input) { return ValueDict(program, input.value, "name"_a = input.name); });
}

// An argument, its values, dimensions and words as these functions have them.
template <typename OfValue, typename OfDim, typename OfWord>
py::object ArgAs(const Arg& arg, const OfValue& value, const OfDim& dim, const OfWord& word) {
  switch (arg.kind) {
    case Arg::Kind::kNone:
      return py::none();
    case Arg::Kind::kValue:
      return value(arg.value);
    case Arg::Kind::kInt:
      return dim(arg.integer);
    case Arg::Kind::kFloat:
      return py::float_(arg.real);
    case Arg::Kind::kBool:
      return py::bool_(arg.boolean);
    case Arg::Kind::kString:
      return py::str(arg.text);
    case Arg::Kind::kWord:
      return word(arg.text);
    case Arg::Kind::kList:
      break;
  }
  return ListOf(arg.list, [&](const Arg& item) { return ArgAs(item, value, dim, word); });
}

py::object ArgObject(const Program& program, const Arg& arg) {
  return ArgAs(
      arg, [](ValueId id) { return py::str("%" + std::to_string(id)); },
      [&](const Dim& dim) { return DimObject(program, dim); }, [](const std::string& word) { return py::str(word); });
}

py::list Consts(const Program& program) {
  return ListOf(program.consts, [&](const Const& constant) {
    return ValueDict(program, constant.value, "name"_a = constant.name, "data"_a = ArgObject(program, constant.data));
  });
}

// An argument of a body's op: a value by its id, a word (a dtype, a memory format) as ("word", text), else as it is.
py::object BodyArg(const Arg& arg) {
  return ArgAs(
      arg, [](ValueId id) { return py::make_tuple("value", id); }, [](const Dim& dim) { return py::int_(dim.value); },
      [](const std::string& word) { return py::make_tuple("word", word); });
}

py::dict BodyValue(const Program& body, ValueId id) {
  if (id == kNone) return py::dict("id"_a = id);
  const Value& value = body.value(id);
  const auto numbers = [](const std::vector<Dim>& dims) {
    std::vector<int64_t> out;
    for (const Dim& dim : dims) out.push_back(dim.value);
    return out;
  };
  return py::dict("id"_a = id, "dtype"_a = std::string(DTypeName(value.type.dtype)),
                  "shape"_a = numbers(value.type.sizes), "strides"_a = numbers(value.type.strides),
                  "root"_a = value.root, "offset"_a = value.offset.value);
}

// Regions: key, text, how often they are called, and the body as data.
py::list Funcs(const Program& program) {
  std::vector<int64_t> calls(program.funcs.size(), 0);
  ForEachOp(program, [&](const Op& op) {
    if (const int32_t func = FuncOf(program, op); func != kNone) ++calls[func];
  });
  py::list out;
  for (size_t i = 0; i < program.funcs.size(); ++i) {
    const Func& func = program.funcs[i];
    const Program& body = *func.body;
    const auto value = [&](ValueId id) { return BodyValue(body, id); };
    const py::list ops = ListOf(body.phases[0].ops, [&](OpId id) {
      const Op& op = body.op(id);
      py::dict named;
      for (const NamedArg& n : op.named) named[py::str(n.name)] = BodyArg(n.arg);
      return py::dict("name"_a = op.name, "args"_a = ListOf(op.args, BodyArg), "named"_a = named,
                      "results"_a = ListOf(op.results, value));
    });
    const std::string name = "f" + std::to_string(i);
    out.append(py::dict("name"_a = name, "key"_a = func.key, "text"_a = PrintFunc(body, name), "calls"_a = calls[i],
                        "operands"_a = ListOf(OperandsOf(func), value), "gives"_a = ListOf(GivenBy(func), value),
                        "ops"_a = ops));
  }
  return out;
}

py::list Groups(const Program& program) {
  return ListOf(program.groups, [](const Group& group) {
    return py::dict("id"_a = group.id, "optimizer"_a = group.optimizer, "rule"_a = OrNone(group.rule),
                    "factored"_a = group.factored.has_value());
  });
}

py::list Rules(const Program& program) {
  return ListOf(program.rules, [](const UpdateRule& rule) {
    std::string text;
    PrintRule(rule, text);
    return py::dict("id"_a = rule.id, "name"_a = rule.name, "states"_a = rule.states, "row"_a = rule.RowSize(),
                    "forms"_a = rule.forms.size(), "text"_a = text);
  });
}

py::list Symbols(const Program& program) {
  return ListOf(program.symbols, [](const Symbol& symbol) {
    return py::dict("name"_a = symbol.name, "min"_a = symbol.min, "max"_a = symbol.max);
  });
}

py::dict SummaryDict(const ProgramSummary& summary) {
  const py::list phases = ListOf(summary.phases, [](const PhaseSummary& phase) {
    return py::dict("name"_a = phase.name, "repeats"_a = phase.repeats, "ops"_a = phase.ops, "kinds"_a = phase.kinds,
                    "peak_bytes"_a = phase.peak_bytes);
  });
  py::dict out;
  out["level"] = summary.level;
  out["ops"] = summary.ops;
  out["phases"] = phases;
  out["params"] = summary.params;
  out["param_elements"] = summary.param_elements;
  out["trainable_elements"] = summary.trainable_elements;
  out["units"] = summary.units;
  out["largest_unit"] = summary.largest_unit;
  out["largest_unit_params"] = summary.largest_unit_params;
  out["largest_unit_bytes"] = summary.largest_unit_bytes;
  out["gathered_bytes"] = summary.gathered_bytes;
  out["reduced_bytes"] = summary.reduced_bytes;
  out["placed_gradient_bytes"] = summary.placed_gradient_bytes;
  out["copied_gradient_bytes"] = summary.copied_gradient_bytes;
  out["added_gradient_bytes"] = summary.added_gradient_bytes;
  out["persistent_bytes"] = summary.persistent_bytes;
  out["step_bytes"] = summary.step_bytes;
  out["activation_peak_bytes"] = summary.activation_peak_bytes;
  out["not_cut"] = summary.not_cut;
  out["text"] = SummaryText(summary);
  return out;
}

py::dict MemoryPlanDict(const Program& program, const std::vector<std::vector<int64_t>>& workspaces, int limit,
                        bool receive_buffers) {
  const Program bound = Take(Bind(program, FirstRank(program.mesh)));  // any rank: all have the same sizes
  MemoryPlanOptions options;
  options.workspace = workspaces;
  options.receive_buffers = receive_buffers;
  const MemoryPlan plan = Take(PlanMemory(bound, options));
  py::dict out;
  out["top_bytes"] = plan.taken_bytes;
  out["live_bytes"] = plan.live_bytes;
  out["taken_bytes"] = plan.taken_bytes;
  out["fragmentation"] = plan.Fragmentation();
  out["blocks"] = plan.blocks.size();
  out["placed"] = plan.placed();
  out["text"] = DescribeMemoryPlan(bound, plan, limit);
  return out;
}

py::list RunPipeline(Program& program, const std::string& pipeline, bool verify,
                     const std::optional<std::string>& dump_dir, const std::optional<std::string>& repro) {
  std::vector<PassReport> reports;
  {
    py::gil_scoped_release unlocked;
    std::vector<PassCall> calls = Take(ParsePipeline(pipeline));
    reports = Take(RunPasses(program, calls, {verify, dump_dir.value_or(""), repro.value_or("")}));
  }
  return ListOf(reports, [](const PassReport& report) {
    return py::dict("name"_a = report.pass, "seconds"_a = report.seconds, "changed"_a = report.changed,
                    "ops"_a = report.ops);
  });
}

py::list PassTableList() {
  return ListOf(PassTable(), [](const PassInfo& pass) {
    const py::list options = ListOf(pass.options, [](const OptionInfo& option) {
      return py::dict("name"_a = std::string(option.name), "help"_a = std::string(option.help),
                      "required"_a = option.missing.empty(), "default"_a = std::string(option.missing),
                      "choices"_a = std::vector<std::string>(option.choices.begin(), option.choices.end()));
    });
    return py::dict("name"_a = std::string(pass.name), "help"_a = std::string(pass.help), "options"_a = options);
  });
}

}  // namespace
}  // namespace interlace

PYBIND11_MODULE(_core, m) {
  using namespace interlace;  // NOLINT: the module's own namespace
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.doc() = "Programs and passes (docs/ir.md, docs/architecture.md).";
  py::register_exception<PythonError>(m, "Error", PyExc_ValueError);

  py::class_<Program>(m, "Program")
      .def_static(
          "parse", [](const std::string& text, const std::string& file) { return Take(Parse(text, file)); },
          py::arg("text"), py::arg("file") = "program", Unlocked(),
          "The program of a text. Error: file:line:col and why.")
      .def(
          "print", [](const Program& p) { return Print(p); }, Unlocked(), "The whole program as text.")
      .def(
          "__str__", [](const Program& p) { return Print(p); }, Unlocked())
      .def(
          "verify", [](const Program& p) { Take(Verify(p)); }, Unlocked(),
          "Error: the first rules that the program breaks.")
      .def("clone", &Program::Clone, Unlocked())
      .def(
          "bind", [](const Program& p, const Binding& binding) { return Take(Bind(p, binding)); }, py::arg("sizes"),
          Unlocked(), "A copy with symbols replaced by numbers.")
      .def_property_readonly("level", [](const Program& p) { return kLevelNames[static_cast<size_t>(p.level)]; })
      .def_property_readonly("mesh",
                             [](const Program& p) {
                               py::dict out;  // in the mesh's order
                               for (const Axis& axis : p.mesh) out[py::str(axis.name)] = axis.size;
                               return out;
                             })
      .def_property_readonly("accumulation", [](const Program& p) { return p.accumulation; })
      .def_property_readonly("width", [](const Program& p) { return p.width; })
      .def_property_readonly("accumulate_mode", [](const Program& p) { return p.accumulate_mode; })
      .def("meta", [](const Program& p) { return std::map<std::string, std::string>(p.meta.begin(), p.meta.end()); })
      .def("set_meta", &Program::SetMeta, py::arg("key"), py::arg("text"))
      .def("message_axes", &Program::MessageAxes,
           "Axes along which ranks send to single others, and how many channels each has.")
      .def("transfer_axes", &Program::TransferAxes, py::arg("grids"),
           "Axes, such as 'dp' or 'replica,dp', whose ranks need connections among one another.")
      .def("params", &Params)
      .def("units", &Units)
      .def("states", &States)
      .def("buffers", &Buffers)
      .def("outputs", &Outputs)
      .def_property_readonly("stage",
                             [](const Program& p) -> std::optional<std::pair<std::string, int64_t>> {
                               if (!p.stage) return std::nullopt;
                               return std::pair(p.stage->axis, p.stage->index);
                             })
      .def_property_readonly(
          "stage_ranks", [](const Program& p) { return p.stage ? p.stage->ranks : std::vector<int64_t>(); },
          "Ranks of each stage of the set, where they differ.")
      .def("inputs", &Inputs)
      .def("consts", &Consts)
      .def("groups", &Groups)
      .def("funcs", &Funcs, "Regions: name, key, text, calls, and the body as data.")
      .def("rules", &Rules)
      .def("rule_loops", &RuleLoopsOf, py::arg("on_host") = false,
           "The loops of its optimizers' rules as a C++ file (ir/rule_loop.h), or those that run on the host alone; "
           "empty: none.")
      .def("symbols", &Symbols)
      .def(
          "summary", [](const Program& p) { return SummaryDict(Summarize(p)); }, "Counts and bytes, see inspect.h.")
      .def("memory_plan", &MemoryPlanDict, py::arg("workspaces") = std::vector<std::vector<int64_t>>(),
           py::arg("limit") = 12, py::arg("receive_buffers") = true,
           "The arena of a step (ir/memory_plan.h): top, live sum, what the runtime takes, fragmentation, and a text. "
           "workspaces: bytes that kernels take inside, by phase and op, as Executor.workspaces() gives them. "
           "receive_buffers: on CPUs.")
      .def(
          "explain", [](const Program& p) { return Take(Explain(p)); }, "What a search decided, with its numbers.")
      .def("run_passes", &RunPipeline, py::arg("pipeline"), py::arg("verify") = true,
           py::arg("dump_dir") = std::nullopt, py::arg("repro") = std::nullopt,
           "Runs a pipeline such as 'canonicalize,shard(ranks=2)' in place; on an error the program stays as it was.");

  m.def(
      "checksum",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request();
        const size_t size = static_cast<size_t>(info.size * info.itemsize);
        if (info.ndim != 1 || (info.size > 1 && info.strides[0] != info.itemsize))
          throw py::value_error("checksum takes contiguous bytes");
        const py::gil_scoped_release released;
        return Checksum(info.ptr, size);
      },
      py::arg("data"), "XXH64 of bytes.");
  m.def("pass_table", &PassTableList, "Every pass: name, help, options.");
  m.def(
      "standard_pipeline",
      [](const std::string& strategy, std::vector<std::pair<std::string, int64_t>> mesh, const std::string& shard_axis,
         int64_t accumulation, const std::string& accumulate_mode, const std::string& param, const std::string& reduce,
         std::optional<double> clip, bool norm, bool momentum, const std::string& tensor_axis,
         const std::string& tensor_plan, bool sequence, const std::string& stage_axis, const std::string& stages_at,
         const std::string& stage_order, int64_t stage_chunks, std::vector<int64_t> stage_ranks,
         std::vector<int64_t> stage_data) {
        return PrintPipeline(Take(StandardPipeline({.strategy = strategy,
                                                    .mesh = std::move(mesh),
                                                    .shard_axis = shard_axis,
                                                    .tensor_axis = tensor_axis,
                                                    .tensor_plan = tensor_plan,
                                                    .sequence = sequence,
                                                    .stage_axis = stage_axis,
                                                    .stages_at = stages_at,
                                                    .stage_order = stage_order,
                                                    .stage_chunks = stage_chunks,
                                                    .stage_ranks = std::move(stage_ranks),
                                                    .stage_data = std::move(stage_data),
                                                    .accumulation = accumulation,
                                                    .accumulate_mode = accumulate_mode,
                                                    .param = param,
                                                    .reduce = reduce,
                                                    .clip = clip,
                                                    .norm = norm,
                                                    .momentum = momentum})));
      },
      py::arg("strategy") = "shard", py::arg("mesh") = std::vector<std::pair<std::string, int64_t>>{{"dp", 1}},
      py::arg("shard_axis") = "dp", py::arg("accumulation") = 1, py::arg("accumulate_mode") = "reduce_each",
      py::arg("param") = "none", py::arg("reduce") = "none", py::arg("clip") = std::nullopt, py::arg("norm") = false,
      py::arg("momentum") = true, py::arg("tensor_axis") = "", py::arg("tensor_plan") = "auto",
      py::arg("sequence") = true, py::arg("stage_axis") = "", py::arg("stages_at") = "auto",
      py::arg("stage_order") = "1f1b", py::arg("stage_chunks") = 1, py::arg("stage_ranks") = std::vector<int64_t>(),
      py::arg("stage_data") = std::vector<int64_t>(),
      "The passes that make a training step, in their order (standard_pipeline.cc says why).");
  m.def(
      "digest", [](const std::string& text) { return Digest(text); }, py::arg("text"), Unlocked(),
      "SHA-256 of a text, hexadecimal.");
  AddSets(m);
  AddSimulation(m);
  AddPlanner(m);
  if (AddTesting != nullptr) AddTesting(m);
}
