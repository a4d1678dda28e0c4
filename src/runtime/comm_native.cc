// comm_native.cc — the process group's own collectives, by the names that every torch since 2.0 has.
#include <algorithm>
#include <exception>
#include <map>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "runtime/comm_impl.h"
#include "runtime/device_times.h"

namespace interlace {

namespace {

class NativeComm final : public Comm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  NativeComm(AxisSpec spec, Group group, Group beside, double timeout_s)
      : spec_(std::move(spec)),
        group_(std::move(group)),
        beside_(std::move(beside)),
        timeout_(static_cast<int64_t>(timeout_s * 1000)) {}

  Result<Ticket> StartGather(std::vector<at::Tensor> shards, std::vector<at::Tensor> fulls,
                             std::string label) override {
    return Start(CommKind::kGather, std::move(shards), std::move(fulls), std::move(label));
  }
  Result<Ticket> StartReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                             std::string label) override {
    return Start(CommKind::kReduce, std::move(flats), std::move(shards), std::move(label));
  }
  // A process group knows no grids: who reduces on one has a group for its row and one for its column.
  Result<Ticket> StartGridReduce(std::vector<at::Tensor>, std::vector<at::Tensor>, const RankGrid&,
                                 std::string label) override {
    return MakeError(label, " on axis ", spec_.name, ": reduce along the row, then along the column");
  }
  Result<Ticket> StartAllReduce(at::Tensor value, std::string label) override {
    return Start(CommKind::kAllReduce, {value}, {value}, std::move(label));
  }
  Result<Ticket> StartAllToAll(at::Tensor from, at::Tensor to, std::string label) override {
    return Start(CommKind::kAllToAll, {from}, {to}, std::move(label));
  }
  Result<Ticket> StartBroadcast(at::Tensor value, int64_t root, std::string label) override {
    return Start(CommKind::kBroadcast, {value}, {value}, std::move(label), root);
  }
  Result<Ticket> StartSend(at::Tensor value, int64_t peer, std::string label) override {
    return Start(CommKind::kSend, {value}, {value}, std::move(label), peer);
  }
  Result<Ticket> StartRecv(at::Tensor value, int64_t peer, std::string label) override {
    return Start(CommKind::kRecv, {value}, {value}, std::move(label), peer);
  }

  Status Wait(Ticket ticket) override {
    const auto it = ops_.find(ticket);
    if (it == ops_.end())
      return MakeError("axis ", spec_.name, ": no transfer ", ticket, " is under way (waited for twice?)");
    Op op = std::move(it->second);
    ops_.erase(it);
    try {
      for (const auto& work : op.works) work->wait();
    } catch (const std::exception& e) {
      return Failure(op.label, e);
    }
    return Ok{};
  }

  Stats stats() const override { return stats_; }
  void CountAgain(const Stats& more) override {
    stats_.bytes_sent += more.bytes_sent;
    stats_.bytes_received += more.bytes_received;
    stats_.calls += more.calls;
  }
  const AxisSpec& spec() const override { return spec_; }

  void Watch(DeviceTimes* times) override {
    watch_ = times;
    marks_.clear();
  }
  // Operations of one group follow each other.
  Times TakeTimes(Ticket ticket) override {
    const auto it = marks_.find(ticket);
    if (it == marks_.end() || watch_ == nullptr) return {};
    Times times;
    times.queued_ns = times.begin_ns = watch_->At(it->second.queued);
    for (auto before = it; before != marks_.begin();) {
      --before;
      if (before->second.group != it->second.group) continue;
      times.begin_ns = std::max(times.queued_ns, watch_->At(before->second.ended));
      break;
    }
    times.end_ns = std::max(times.begin_ns, watch_->At(it->second.ended));
    times.bytes = it->second.bytes;
    return times;
  }

 private:
  struct Marks {
    int32_t queued = 0, ended = 0;
    int64_t bytes = 0;
    const c10d::ProcessGroup* group = nullptr;
  };
  struct Op {
    std::string label;
    std::vector<at::Tensor> inputs, outputs;  // kept until waited for
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };

  // Which of the two groups carries it (AxisSpec::beside).
  const Group& GroupOf(CommKind kind, int64_t peer) const {
    const bool reduces = kind == CommKind::kReduce || kind == CommKind::kAllReduce;
    const bool down = (kind == CommKind::kSend && peer < spec_.rank) || (kind == CommKind::kRecv && peer > spec_.rank);
    return beside_ != nullptr && (reduces || down) ? beside_ : group_;
  }

  Error Failure(const std::string& label, const std::exception& e) {
    const std::string what = e.what();
    failure_ = MakeError(label, " on axis ", spec_.name, ": ", what.substr(0, what.find('\n')),
                         "; the group cannot be used any more: restart all ranks from the last checkpoint");
    return *failure_;
  }

  Result<Ticket> Start(CommKind kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                       std::string label, int64_t peer = 0) {
    if (failure_) return *failure_;
    INTERLACE_TRY(CheckCollective(kind, spec_, inputs, outputs, label));
    Op op{std::move(label), std::move(inputs), std::move(outputs), {}};
    const Group& group = GroupOf(kind, peer);
    Marks marks;
    marks.group = group.get();
    if (watch_ != nullptr) marks.queued = watch_->Mark();
    const bool coalesce = op.inputs.size() > 1 && spec_.backend == "nccl";
    try {
      const c10::DeviceType device = op.inputs.empty() ? c10::DeviceType::CPU : op.inputs[0].device().type();
      if (coalesce) group->startCoalescing(device);
      for (size_t i = 0; i < op.inputs.size(); ++i) {
        if (op.inputs[i].numel() == 0) continue;
        auto work = Issue(*group, kind, op.inputs[i], op.outputs[i], peer);
        if (!coalesce && work) op.works.push_back(std::move(work));
      }
      if (coalesce) {
        if (auto work = group->endCoalescing(device)) op.works.push_back(std::move(work));
      }
    } catch (const std::exception& e) {
      return Failure(op.label, e);
    }
    for (size_t i = 0; i < op.inputs.size(); ++i) {  // what a ring moves
      const auto [sent, received] = Moved(kind, op.inputs[i], op.outputs[i], peer);
      stats_.bytes_sent += sent;
      stats_.bytes_received += received;
      marks.bytes += received;
    }
    ++stats_.calls;
    if (watch_ != nullptr) {  // a stream that does nothing but wait for it says when it is over
      marks.ended = watch_->MarkAside([&] {
        for (const auto& work : op.works) work->wait();
      });
      marks_.emplace(next_ticket_, marks);
    }
    ops_.emplace(next_ticket_, std::move(op));
    return next_ticket_++;
  }

  // Bytes sent and received by this rank.
  std::pair<int64_t, int64_t> Moved(CommKind kind, const at::Tensor& input, const at::Tensor& output,
                                    int64_t peer) const {
    const auto in = static_cast<int64_t>(input.nbytes()), out = static_cast<int64_t>(output.nbytes());
    const int64_t peers = spec_.size - 1;
    switch (kind) {
      case CommKind::kGather:
        return {in * peers, in * peers};
      case CommKind::kReduce:
        return {out * peers, out * peers};
      case CommKind::kAllReduce:
        return {2 * in * peers / spec_.size, 2 * in * peers / spec_.size};
      case CommKind::kAllToAll:
        return {in * peers / spec_.size, in * peers / spec_.size};
      case CommKind::kBroadcast:
        return {peer == spec_.rank ? in : 0, peer == spec_.rank ? 0 : in};
      case CommKind::kSend:
        return {in, 0};
      case CommKind::kRecv:
        return {0, in};
    }
    return {0, 0};
  }

  template <typename Options>
  Options InTime() const {
    Options options;
    options.timeout = timeout_;
    return options;
  }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // the newer names do not exist in older releases
  c10::intrusive_ptr<c10d::Work> Issue(c10d::ProcessGroup& group, CommKind kind, at::Tensor& input, at::Tensor& output,
                                       int64_t peer) {
    std::vector<at::Tensor> tensors{output};
    std::vector<int64_t> equal;  // parts
    switch (kind) {
      case CommKind::kGather:
        return group._allgather_base(output, input, InTime<c10d::AllgatherOptions>());
      case CommKind::kReduce:
        return group._reduce_scatter_base(output, input, InTime<c10d::ReduceScatterOptions>());
      case CommKind::kAllReduce:
        return group.allreduce(tensors, InTime<c10d::AllreduceOptions>());
      case CommKind::kAllToAll:
        return group.alltoall_base(output, input, equal, equal, InTime<c10d::AllToAllOptions>());
      case CommKind::kBroadcast: {
        auto options = InTime<c10d::BroadcastOptions>();
        options.rootRank = peer;
        return group.broadcast(tensors, options);
      }
      case CommKind::kSend:
        return group.send(tensors, static_cast<int>(peer), /*tag=*/0);
      case CommKind::kRecv:
        return group.recv(tensors, static_cast<int>(peer), /*tag=*/0);
    }
    return nullptr;
  }
#pragma GCC diagnostic pop

  const AxisSpec spec_;
  const Group group_, beside_;
  const std::chrono::milliseconds timeout_;
  Ticket next_ticket_ = 1;
  std::map<Ticket, Op> ops_;
  DeviceTimes* watch_ = nullptr;
  std::map<Ticket, Marks> marks_;
  std::optional<Error> failure_;
  Stats stats_;
};

}  // namespace

Result<std::unique_ptr<Comm>> MakeNativeComm(const AxisSpec& spec, double timeout_s) {
  c10::intrusive_ptr<c10d::ProcessGroup> groups[2];
  const std::string* names[2] = {&spec.native, &spec.beside};
  for (int i = 0; i < 2; ++i) {
    const std::string& name = *names[i];
    if (i > 0 && name.empty()) continue;
    try {
      groups[i] = c10d::resolve_process_group(name);
    } catch (const std::exception& e) {
      const std::string what = e.what();
      return MakeError("axis ", spec.name, ": no process group named \"", name,
                       "\"; create it with torch.distributed.new_group and pass its group_name (",
                       what.substr(0, what.find('\n')), ")");
    }
    if (groups[i]->getRank() != spec.rank || groups[i]->getSize() != spec.size) {
      return MakeError("axis ", spec.name, ": process group \"", name, "\" says rank ", groups[i]->getRank(), " of ",
                       groups[i]->getSize(), ", the axis says rank ", spec.rank, " of ", spec.size);
    }
  }
  return std::unique_ptr<Comm>(new NativeComm(spec, std::move(groups[0]), std::move(groups[1]), timeout_s));
}

}  // namespace interlace
