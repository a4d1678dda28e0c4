#include "runtime/phase_graphs.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#endif
#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "ir/text.h"
#include "runtime/allocator.h"
#include "runtime/step_scope.h"

namespace interlace {

struct PhaseGraphs::Graph {
  std::vector<std::pair<std::string, at::Tensor>> outputs;  // where each run leaves them
  // What one run counts.
  int64_t placed_bytes = 0, copied_bytes = 0;
  std::vector<Comm::Stats> moved;  // by the runner's comms
  std::unique_ptr<DeviceGraph> device;  // goes before what it uses
};

namespace {

#if __has_include(<ATen/core/GraphImplInterface.h>)
class TorchGraph final : public DeviceGraph {
 public:
  explicit TorchGraph(c10::DeviceType type) : graph_(at::create_graph_impl(type)) {}
  // What other threads do meanwhile is theirs.
  void Begin(c10::MempoolId_t pool) override { graph_->capture_begin(pool, at::GraphCaptureMode::ThreadLocal); }
  void End() override { graph_->capture_end(); }
  void Replay() override { graph_->replay(); }
  c10::MempoolId_t Pool() override { return graph_->pool(); }

 private:
  std::unique_ptr<at::GraphImplInterface> graph_;
};
std::function<std::unique_ptr<DeviceGraph>()> TorchGraphs(c10::DeviceType type) {
  if (!at::has_graph_impl(type)) return nullptr;
  return [type] { return std::make_unique<TorchGraph>(type); };
}
#else
std::function<std::unique_ptr<DeviceGraph>()> TorchGraphs(c10::DeviceType) { return nullptr; }
#endif

// Why an op cannot be in a graph; empty: it can, as far as one sees.
std::string WhyNot(const Op& op) {
  if (op.rng) return "it draws random numbers, by keys that the host gives in each step";
  if (op.kind == OpKind::kCallPython) return "it runs in Python";
  if (HostedOf(op) >= 0) return "the host reads what it takes";
  if (op.kind == OpKind::kNormCoef || IsUpdate(op) || IsPending(op) || op.part == Part::kUpdate)
    return "it belongs to an optimizer step, whose numbers the host gives";
  if (TraitsOf(op).family == OpFamily::kTier) return "the host moves what it moves";
  if (TraitsOf(op).family == OpFamily::kPeer)
    return "the rank that it sends to, or hears from, waits for messages of its own meanwhile";
  return "";
}

std::string WhyNot(const Program& program, const std::map<std::string, std::shared_ptr<Comm>>& comms) {
  for (const auto& [name, comm] : comms) {
    if (comm->spec().backend == "tcp") return "the host moves what goes along " + name;
  }
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) {
      const Op& op = program.op(id);
      const std::string why = phase.kind == PhaseKind::kMicroBatch ? WhyNot(op) : "";
      if (!why.empty()) return PrintOp(program, op) + ": " + why;
    }
  }
  return "";
}

// Waits, on the device, for the transfers of this step from `first` on.
Status Finish(Frame& frame, size_t first) {
  for (size_t i = first; i < frame.transfers.size(); ++i) {
    Transfer& transfer = frame.transfers[i];
    if (transfer.ticket == 0) continue;
    INTERLACE_TRY(transfer.comm->Wait(std::exchange(transfer.ticket, 0)));
    if (transfer.landed) std::exchange(transfer.landed, {})();
  }
  std::fill(frame.transfer_of.begin(), frame.transfer_of.end(), -1);
  return Ok{};
}

}  // namespace

PhaseGraphs::PhaseGraphs(const Program& program, c10::Device device) : program_(program), device_(device) {}
PhaseGraphs::~PhaseGraphs() = default;

Status PhaseGraphs::Decide(const RuntimeOptions& options, const std::map<std::string, std::shared_ptr<Comm>>& comms,
                           bool planned) {
  if (options.device_graphs == DeviceGraphs::kOff) return Ok{};
  required_ = options.device_graphs == DeviceGraphs::kOn;
  make_ = options.make_graph ? options.make_graph : TorchGraphs(device_.type());
  if (device_.is_cpu()) {
    why_off_ = "CPUs have none";
  } else if (!make_) {
    why_off_ = "torch has none for " + c10::DeviceTypeName(device_.type(), /*lower_case=*/true);
  } else {
    why_off_ = WhyNot(program_, comms);
  }
  if (why_off_.empty() && !planned) why_off_ = "the memory of a step is not planned (stats()[\"arena\"])";
  on_ = why_off_.empty();
  if (on_ || !required_) return Ok{};
  return MakeError("device_graphs=True, but there can be no device graphs: ", why_off_,
                   "; leave it at \"auto\", and such programs run op by op");
}

Result<int64_t> PhaseGraphs::SavedNs(DeviceTimes& times) const {
  if (!on_) return 0;
  try {
    return times.SavedByGraphs(make_);
  } catch (const std::exception& error) {
    return MakeError("no graph can be made: ", MessageOf(error));
  }
}

void PhaseGraphs::TurnOff(std::string why) {
  if (!on_) return;
  on_ = false;
  note_ = why_off_ = std::move(why);
  Clear();
}

void PhaseGraphs::Clear() {
  warm_ = false;
  graphs_.clear();
  held_.clear();
  pool_ = {0, 0};
}

void PhaseGraphs::HoldInputs(Frame& frame) {
  const ArenaHook::Outside own;
  for (const Input& input : program_.inputs) {
    at::Tensor& slot = frame.slots[input.value];
    if (!slot.defined()) continue;  // no op of this phase uses it
    at::Tensor& held = held_[input.value];
    if (!held.defined()) held = at::empty_like(slot);
    held.copy_(slot);
    slot = held;
  }
}

Status PhaseGraphs::RunPhase(StepRunner& runner, const Plan& plan) {
  NoObserver plain;
  if (!on_ || plan.phase->kind != PhaseKind::kMicroBatch) return runner.RunPhase(plan, plain);
  Frame& frame = runner.frame;
  try {
    INTERLACE_TRY(Finish(frame, 0));
    HoldInputs(frame);
    std::unique_ptr<Graph>& graph = graphs_[&plan];
    const bool counted = graph == nullptr;
    if (graph == nullptr) {
      const std::vector<at::Tensor> slots = frame.slots;
      Result<std::unique_ptr<Graph>> captured = Capture(runner, plan);
      if (!captured.ok()) {
        const Error why = MakeError("the phase ", plan.phase->name, " cannot be captured: ", captured.error().message);
        TurnOff(why.message);
        if (required_) return why;
        frame.slots = slots;
        return runner.RunPhase(plan, plain);
      }
      graph = std::move(*captured);
    }
    if (!plan.phase->ops.empty()) runner.AtOp(plan.phase->ops.front());
    graph->device->Replay();
    ++replays_;
    const ArenaHook::Outside results;
    for (const auto& [name, tensor] : graph->outputs) frame.outputs[name].emplace(frame.micro_batch, tensor.clone());
    if (counted) return Ok{};  // by the ops as they were captured
    frame.counters.placed_bytes += graph->placed_bytes;
    frame.counters.copied_bytes += graph->copied_bytes;
    for (size_t i = 0; i < graph->moved.size(); ++i) runner.comms()[i]->CountAgain(graph->moved[i]);
    return Ok{};
  } catch (const std::exception& error) {
    return MakeError("the graph of the phase ", plan.phase->name, " failed: ", MessageOf(error));
  }
}

Result<std::unique_ptr<PhaseGraphs::Graph>> PhaseGraphs::Capture(StepRunner& runner, const Plan& plan) {
  Frame& frame = runner.frame;
  auto graph = std::make_unique<Graph>();
  if (!stream_) stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  const size_t first = frame.transfers.size();
  const Counters before = frame.counters;
  std::vector<Comm::Stats> moved;
  for (const auto& comm : runner.comms()) moved.push_back(comm->stats());
  auto outputs = std::exchange(frame.outputs, {});
  Status status = Ok{};
  {
    const c10::StreamGuard on(*stream_);
    const auto attempt = [&](auto&& call) {
      try {
        call();
      } catch (const std::exception& error) {
        if (status.ok()) status = MakeError(MessageOf(error));
      }
    };
    attempt([&] {
      graph->device = make_();
      graph->device->Begin(pool_);
      NoObserver plain;
      status = runner.RunPhase(plan, plain);
      if (status.ok()) status = Finish(frame, first);
    });
    if (graph->device) attempt([&] { graph->device->End(); });
  }
  for (auto& [name, by_micro_batch] : std::exchange(frame.outputs, std::move(outputs))) {
    for (auto& [micro_batch, tensor] : by_micro_batch) graph->outputs.emplace_back(name, std::move(tensor));
  }
  frame.transfers.erase(frame.transfers.begin() + static_cast<std::ptrdiff_t>(first), frame.transfers.end());
  std::fill(frame.transfer_of.begin(), frame.transfer_of.end(), -1);
  if (!status.ok()) {
    frame.counters = before;
    return status.error();
  }
  ++captures_;
  pool_ = graph->device->Pool();
  graph->placed_bytes = frame.counters.placed_bytes - before.placed_bytes;
  graph->copied_bytes = frame.counters.copied_bytes - before.copied_bytes;
  for (size_t i = 0; i < moved.size(); ++i) {
    const Comm::Stats now = runner.comms()[i]->stats();
    graph->moved.push_back({.bytes_sent = now.bytes_sent - moved[i].bytes_sent,
                            .bytes_received = now.bytes_received - moved[i].bytes_received,
                            .calls = now.calls - moved[i].calls});
  }
  return graph;
}

GraphStats PhaseGraphs::Statistics() const {
  GraphStats stats{.on = on_, .why_not = why_off_, .captures = captures_, .replays = replays_};
  for (const auto& [id, tensor] : held_) stats.bytes += static_cast<int64_t>(tensor.nbytes());
  for (const auto& [plan, graph] : graphs_) {
    if (graph == nullptr) continue;
    ++stats.graphs;
    for (const auto& [name, tensor] : graph->outputs) stats.bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return stats;
}

}  // namespace interlace
