// core_pacing.cc — `_core.testing.pacing`: what the simulator takes each op of a program to cost, what slows what, and
// the step that it makes of them. The software accelerator's paced mode takes these times (tests/accelerator/pace.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "bindings/testing/core_testing.h"
#include "ir/op_table.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/simulate.h"

namespace py = pybind11;

namespace interlace {
namespace {

// kind (soft::Cost::Kind), sends, receives, latency and work in nanoseconds
using PlainCost = std::tuple<int32_t, bool, bool, double, double>;
// op, lane, begin and end in nanoseconds
using PlainOp = std::tuple<int32_t, std::string, double, double>;

double Nanoseconds(int64_t ps) {
  return static_cast<double>(ps) / 1e3;
}

Result<int32_t> KindOf(const Program& program, const Op& op, Resource resource) {
  switch (resource) {
    case Resource::kNone:
      return 0;
    case Resource::kCompute:
      return 1;
    case Resource::kIntraLink:
      return 2;
    case Resource::kInterLink:
      return 3;
    case Resource::kHostToDevice:
      return 4;
    case Resource::kDeviceToHost:
      return 5;
    default:
      return MakeError("'", PrintOp(program, op), "' works on the host or its files, which no device can pace");
  }
}

Result<std::vector<PlainCost>> CostsOf(const Lowered& lowered) {
  const Program& program = *lowered.program;
  std::vector<PlainCost> out(static_cast<size_t>(program.num_ops()));
  for (const std::vector<LoweredOp>& ops : lowered.ops) {
    for (const LoweredOp& op : ops) {
      OpCost cost;
      if (op.kind == LoweredOp::Kind::kStart) cost = lowered.costs[static_cast<size_t>(op.cost)];
      if (op.kind == LoweredOp::Kind::kCompute) cost.resource = Resource::kCompute, cost.work_ps = op.work_ps;
      if (cost.latency_ps + cost.work_ps == 0) continue;
      INTERLACE_ASSIGN(const int32_t kind, KindOf(program, program.op(op.op), cost.resource));
      out[static_cast<size_t>(op.op)] = {kind, cost.sends, cost.receives, Nanoseconds(cost.latency_ps),
                                         Nanoseconds(cost.work_ps)};
    }
  }
  return out;
}

// What took time on the first rank.
std::vector<PlainOp> StepOf(const Simulation& s) {
  const Lowered& lowered = *s.lowered;
  const RankRecord& rank = s.output.ranks[0];
  std::vector<PlainOp> out;
  const auto add = [&](OpId op, Lane lane, int64_t begin, int64_t end) {
    if (end > begin) out.emplace_back(op, std::string(LaneName(lane)), Nanoseconds(begin), Nanoseconds(end));
  };
  for (int64_t i = 0; i < lowered.instances(); ++i) {
    size_t run = 0;
    const LoweredOp& op = lowered.At(i, run);
    const auto at = static_cast<size_t>(i);
    if (op.kind == LoweredOp::Kind::kCompute) add(op.op, Lane::kCompute, rank.start_ps[at], rank.end_ps[at]);
    if (rank.transfer_of[at] < 0) continue;
    const TransferRecord& transfer = s.output.transfers[static_cast<size_t>(rank.transfer_of[at])];
    add(op.op, op.lane, transfer.start_ps, transfer.end_ps);
  }
  return out;
}

Result<py::dict> Pacing(const Program& program, const std::string& cluster_text) {
  INTERLACE_TRY(Verify(program));
  INTERLACE_ASSIGN(const ClusterSpec cluster, LoadCluster(cluster_text, "cluster"));
  INTERLACE_ASSIGN(const Simulation s, Simulate(program, cluster, nullptr, {}));
  INTERLACE_ASSIGN(const CostModel model, CostModel::Create(program, cluster, nullptr));
  INTERLACE_ASSIGN(const std::vector<PlainCost> costs, CostsOf(*s.lowered));
  py::dict out;
  out["costs"] = costs;
  out["factors"] = model.interference().factor;
  out["shares"] =
      std::pair(cluster.h2d_gb_per_s / cluster.host_gb_per_s, cluster.d2h_gb_per_s / cluster.host_gb_per_s);
  out["per_node"] = model.ranks_per_node();
  out["step"] = StepOf(s);
  out["step_ns"] = Nanoseconds(s.makespan_ps());
  return out;
}

}  // namespace

void AddPacing(py::module_& m) {
  m.def(
      "pacing",
      [](const Program& program, const std::string& cluster) { return Take(Pacing(program, cluster)); },
      py::arg("program"), py::arg("cluster"),
      "Of a program on a cluster: costs by op id (kind, sends, receives, latency and work in ns), factors and shares "
      "of what runs together, ranks per node, and the simulated step of the first rank: (op, lane, begin and end in "
      "ns). Error: of the simulation; an op that works on the host.");
}

}  // namespace interlace
