#include "runtime/comm.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <exception>
#include <map>
#include <set>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "runtime/comm_impl.h"

namespace interlace {

namespace {

// Bytes [begin, end) of a contiguous tensor.
struct Span {
  const char* begin;
  const char* end;
};

Span SpanOf(const at::Tensor& t) {
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + t.nbytes()};
}

bool Overlap(const Span& a, const Span& b) {
  return a.begin < b.end && b.begin < a.end;
}

// One rank alone.
class LocalComm final : public Comm {
 public:
  explicit LocalComm(AxisSpec spec) : spec_(std::move(spec)) {}

  Result<Ticket> StartGather(std::vector<at::Tensor> shards, std::vector<at::Tensor> fulls,
                             std::string label) override {
    return Copy(CommKind::kGather, shards, fulls, label);
  }
  Result<Ticket> StartReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                             std::string label) override {
    return Copy(CommKind::kReduce, flats, shards, label);
  }
  Result<Ticket> StartAllReduce(at::Tensor value, std::string label) override {
    return Copy(CommKind::kAllReduce, {value}, {value}, label);
  }
  Status Wait(Ticket ticket) override {
    if (open_.erase(ticket) == 0)
      return MakeError("axis ", spec_.name, ": no transfer ", ticket, " is under way (waited for twice?)");
    return Ok{};
  }
  Stats stats() const override { return stats_; }
  const AxisSpec& spec() const override { return spec_; }

 private:
  Result<Ticket> Copy(CommKind kind, const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to,
                      const std::string& label) {
    INTERLACE_TRY(CheckCollective(kind, spec_, from, to, label));
    for (size_t i = 0; i < from.size(); ++i) {
      if (from[i].const_data_ptr() != to[i].const_data_ptr()) to[i].copy_(from[i]);
    }
    ++stats_.calls;
    open_.insert(next_ticket_);
    return next_ticket_++;
  }

  const AxisSpec spec_;
  Ticket next_ticket_ = 1;
  std::set<Ticket> open_;
  Stats stats_;
};

// The group's own collectives, by the names that every torch since 2.0 has.
class NativeComm final : public Comm {
 public:
  NativeComm(AxisSpec spec, c10::intrusive_ptr<c10d::ProcessGroup> group, double timeout_s)
      : spec_(std::move(spec)), group_(std::move(group)), timeout_(static_cast<int64_t>(timeout_s * 1000)) {}

  Result<Ticket> StartGather(std::vector<at::Tensor> shards, std::vector<at::Tensor> fulls,
                             std::string label) override {
    return Start(CommKind::kGather, std::move(shards), std::move(fulls), std::move(label));
  }
  Result<Ticket> StartReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                             std::string label) override {
    return Start(CommKind::kReduce, std::move(flats), std::move(shards), std::move(label));
  }
  Result<Ticket> StartAllReduce(at::Tensor value, std::string label) override {
    return Start(CommKind::kAllReduce, {value}, {value}, std::move(label));
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
  const AxisSpec& spec() const override { return spec_; }

 private:
  struct Op {
    std::string label;
    std::vector<at::Tensor> inputs, outputs;  // kept until waited for
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };

  Error Failure(const std::string& label, const std::exception& e) {
    const std::string what = e.what();
    failure_ = MakeError(label, " on axis ", spec_.name, ": ", what.substr(0, what.find('\n')),
                         "; the group cannot be used any more: restart all ranks from the last checkpoint");
    return *failure_;
  }

  Result<Ticket> Start(CommKind kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                       std::string label) {
    if (failure_) return *failure_;
    INTERLACE_TRY(CheckCollective(kind, spec_, inputs, outputs, label));
    Op op{std::move(label), std::move(inputs), std::move(outputs), {}};
    const bool coalesce = op.inputs.size() > 1 && spec_.backend == "nccl";
    try {
      const c10::DeviceType device = op.inputs.empty() ? c10::DeviceType::CPU : op.inputs[0].device().type();
      if (coalesce) group_->startCoalescing(device);
      for (size_t i = 0; i < op.inputs.size(); ++i) {
        if (op.inputs[i].numel() == 0) continue;
        auto work = Issue(kind, op.inputs[i], op.outputs[i]);
        if (!coalesce && work) op.works.push_back(std::move(work));
      }
      if (coalesce) {
        if (auto work = group_->endCoalescing(device)) op.works.push_back(std::move(work));
      }
    } catch (const std::exception& e) {
      return Failure(op.label, e);
    }
    const int64_t peers = spec_.size - 1;
    for (size_t i = 0; i < op.inputs.size(); ++i) {  // what a ring moves
      const auto bytes =
          static_cast<int64_t>(kind == CommKind::kReduce ? op.outputs[i].nbytes() : op.inputs[i].nbytes());
      const int64_t moved = kind == CommKind::kAllReduce ? 2 * bytes * peers / spec_.size : bytes * peers;
      stats_.bytes_sent += moved;
      stats_.bytes_received += moved;
    }
    ++stats_.calls;
    ops_.emplace(next_ticket_, std::move(op));
    return next_ticket_++;
  }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // the newer names do not exist in older releases
  c10::intrusive_ptr<c10d::Work> Issue(CommKind kind, at::Tensor& input, at::Tensor& output) {
    switch (kind) {
      case CommKind::kGather: {
        c10d::AllgatherOptions options;
        options.timeout = timeout_;
        return group_->_allgather_base(output, input, options);
      }
      case CommKind::kReduce: {
        c10d::ReduceScatterOptions options;
        options.timeout = timeout_;
        return group_->_reduce_scatter_base(output, input, options);
      }
      case CommKind::kAllReduce: {
        c10d::AllreduceOptions options;
        options.timeout = timeout_;
        std::vector<at::Tensor> tensors{output};
        return group_->allreduce(tensors, options);
      }
    }
    return nullptr;
  }
#pragma GCC diagnostic pop

  const AxisSpec spec_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::chrono::milliseconds timeout_;
  Ticket next_ticket_ = 1;
  std::map<Ticket, Op> ops_;
  std::optional<Error> failure_;
  Stats stats_;
};

}  // namespace

Status CheckCollective(CommKind kind, const AxisSpec& spec, const std::vector<at::Tensor>& inputs,
                       const std::vector<at::Tensor>& outputs, const std::string& label) {
  const auto where = [&](size_t i) { return label + " on axis " + spec.name + ", tensor " + std::to_string(i) + ": "; };
  if (inputs.size() != outputs.size()) {
    return MakeError(label, " on axis ", spec.name, ": ", inputs.size(), " inputs but ", outputs.size(), " outputs");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor &in = inputs[i], &out = outputs[i];
    if (!in.defined() || !out.defined()) return MakeError(where(i), "an undefined tensor");
    if (!in.is_contiguous() || !out.is_contiguous()) return MakeError(where(i), "tensors must be contiguous");
    if (in.scalar_type() != out.scalar_type() || in.device() != out.device()) {
      return MakeError(where(i), "input is ", c10::toString(in.scalar_type()), " on ", in.device().str(),
                       ", output is ", c10::toString(out.scalar_type()), " on ", out.device().str());
    }
    if (kind == CommKind::kAllReduce) continue;
    const bool gather = kind == CommKind::kGather;
    const at::Tensor &shard = gather ? in : out, &full = gather ? out : in;
    if (full.numel() != shard.numel() * spec.size) {
      return MakeError(where(i), "the full buffer has ", full.numel(), " elements, the shard ", shard.numel(),
                       " and the axis ", spec.size, " ranks");
    }
    const Span whole = SpanOf(full), part = SpanOf(shard);
    if (Overlap(whole, part) && part.begin != whole.begin + spec.rank * static_cast<int64_t>(shard.nbytes())) {
      return MakeError(where(i), "the shard lies inside the full buffer, but not at this rank's place");
    }
  }
  return Ok{};
}

std::unique_ptr<Comm> MakeLocalComm(const AxisSpec& spec) {
  return std::make_unique<LocalComm>(spec);
}

Result<std::unique_ptr<Comm>> MakeNativeComm(const AxisSpec& spec, double timeout_s) {
  try {
    auto group = c10d::resolve_process_group(spec.native);
    if (group->getRank() != spec.rank || group->getSize() != spec.size) {
      return MakeError("axis ", spec.name, ": process group \"", spec.native, "\" says rank ", group->getRank(), " of ",
                       group->getSize(), ", the axis says rank ", spec.rank, " of ", spec.size);
    }
    return std::unique_ptr<Comm>(new NativeComm(spec, std::move(group), timeout_s));
  } catch (const std::exception& e) {
    const std::string what = e.what();
    return MakeError("axis ", spec.name, ": no process group named \"", spec.native,
                     "\"; create it with torch.distributed.new_group and pass its group_name (",
                     what.substr(0, what.find('\n')), ")");
  }
}

Result<std::unique_ptr<Comm>> Comm::Create(const AxisSpec& spec, double timeout_s) {
  if (spec.size < 1 || spec.rank < 0 || spec.rank >= spec.size) {
    return MakeError("axis ", spec.name, ": rank ", spec.rank, " of ", spec.size, " is not a rank");
  }
  if (!(timeout_s > 0))
    return MakeError("axis ", spec.name, ": the timeout must be a positive number of seconds, not ", timeout_s);
  if (spec.size == 1) return MakeLocalComm(spec);
  if (spec.backend == "tcp") return MakeSocketComm(spec, timeout_s);
  if (spec.backend == "nccl" || spec.backend == "native") return MakeNativeComm(spec, timeout_s);
  return MakeError("axis ", spec.name, ": backend \"", spec.backend, "\" is not supported for ", spec.size,
                   " ranks; use tcp (CPU), nccl (CUDA), or native (the process group's own collectives on any device)");
}

}  // namespace interlace
