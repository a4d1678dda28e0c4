// comm_socket.cc — collectives on the CPU. Every operation is the same shape: for each tensor, one piece goes to every
// peer and one piece comes from every peer, straight from and into memory (comm_mesh.h).
//
//               sent to peer p      received from peer p    afterwards
//   gather      own shard           p's place in full       own shard copied to its own place
//   reduce      p's part of flat    receive buffer          shard = sum of the pieces in rank order
//   all-reduce  the value           receive buffer          value = sum of the values in rank order
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

#include "runtime/comm_impl.h"
#include "runtime/comm_mesh.h"

namespace interlace {

namespace {

// A dropped Comm waits so long for what it had started.
constexpr double kDropPatienceS = 5;

// Bytes a piece takes in the receive buffer: pieces start at 64 bytes.
int64_t Padded(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

class SocketComm final : public Comm {
 public:
  SocketComm(AxisSpec spec, std::shared_ptr<SocketMesh> mesh, double timeout_s)
      : spec_(std::move(spec)), mesh_(std::move(mesh)), timeout_s_(timeout_s) {}

  ~SocketComm() override {
    // The peers' transfers need this rank's part: finish what was started. After an error on this rank alone they may
    // never do theirs, hence the short patience.
    while (!ops_.empty()) {
      if (!WaitFor(ops_.begin()->first, std::min(timeout_s_, kDropPatienceS)).ok()) break;
    }
  }

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
  Status Wait(Ticket ticket) override { return WaitFor(ticket, timeout_s_); }
  void Progress() override { mesh_->Progress(); }
  void OfferReceiveBuffer(at::Tensor bytes) override { offered_ = std::move(bytes); }
  void Leave() override { mesh_->Leave(); }

  Stats stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  const AxisSpec& spec() const override { return spec_; }
  void SetRecording(bool on) override {
    std::lock_guard lock(mutex_);
    recording_ = on;
    times_.clear();
  }
  Times TakeTimes(Ticket ticket) override {
    std::lock_guard lock(mutex_);
    const auto it = times_.find(ticket);
    if (it == times_.end()) return {};
    const Times times = it->second;
    times_.erase(it);
    return times;
  }

 private:
  struct Op {
    CommKind kind;
    std::vector<at::Tensor> inputs, outputs;
    at::Tensor scratch;    // of reductions: for each tensor, the pieces of all peers, in peer order
    bool offered = false;  // the scratch is the caller's
    Exchange exchange;
    bool recorded = false;
    Times times;
  };

  Result<Ticket> Start(CommKind kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                       std::string label);
  void Plan(Op& op);
  Status WaitFor(Ticket ticket, double timeout_s);
  void CopyOwn(const Op& op) const;
  void Sum(const Op& op) const;
  // Bytes of a piece of tensor i.
  static int64_t PieceBytes(const Op& op, size_t i) {
    return static_cast<int64_t>(op.kind == CommKind::kReduce ? op.outputs[i].nbytes() : op.inputs[i].nbytes());
  }
  // Peers in the order of the receive buffer: rank order without this rank.
  int64_t SlotOf(int64_t peer) const { return peer < spec_.rank ? peer : peer - 1; }
  at::Tensor TakeScratch(int64_t bytes);

  const AxisSpec spec_;
  const std::shared_ptr<SocketMesh> mesh_;
  const double timeout_s_;

  mutable std::mutex mutex_;  // taken before the mesh's own, never held while waiting
  std::map<Ticket, std::unique_ptr<Op>> ops_;
  Ticket next_ticket_ = 1;
  bool recording_ = false;
  std::map<Ticket, Times> times_;
  at::Tensor offered_;                    // for the next reduction
  std::vector<at::Tensor> free_scratch_;  // receive buffers kept for the next reduction
  int64_t scratch_bytes_ = 0;             // all of them, in use or free
  Stats stats_;
};

Result<Ticket> SocketComm::Start(CommKind kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                                 std::string label) {
  if (auto failure = mesh_->failure()) return *failure;
  INTERLACE_TRY(CheckCollective(kind, spec_, inputs, outputs, label));
  for (const at::Tensor& t : inputs) {
    if (!t.device().is_cpu()) {
      return MakeError(label, " on axis ", spec_.name, ": tcp moves CPU tensors, this one is on ", t.device().str(),
                       "; use the nccl backend");
    }
    if (kind != CommKind::kGather && !CanSum(t.scalar_type())) {
      return MakeError(label, " on axis ", spec_.name, ": no sum of ", c10::toString(t.scalar_type()),
                       "; floating-point and integer tensors can be reduced");
    }
  }
  auto op = std::make_unique<Op>();
  op->kind = kind;
  op->inputs = std::move(inputs);
  op->outputs = std::move(outputs);
  op->exchange.label = std::move(label);
  op->exchange.kind = static_cast<int32_t>(kind);
  std::lock_guard lock(mutex_);
  op->recorded = recording_;
  if (recording_) op->times.queued_ns = NanosNow();
  Plan(*op);
  INTERLACE_TRY(mesh_->Start(op->exchange));
  ops_.emplace(next_ticket_, std::move(op));
  return next_ticket_++;
}

void SocketComm::Plan(Op& op) {
  const size_t count = op.inputs.size();
  const bool gather = op.kind == CommKind::kGather;
  std::vector<int64_t> scratch_at(count + 1, 0);
  if (!gather) {
    for (size_t i = 0; i < count; ++i) scratch_at[i + 1] = scratch_at[i] + Padded(PieceBytes(op, i)) * (spec_.size - 1);
    op.offered = offered_.defined() && offered_.numel() >= scratch_at[count];
    op.scratch = op.offered ? offered_ : TakeScratch(scratch_at[count]);
    offered_.reset();
  }
  op.exchange.sends.resize(spec_.size);
  op.exchange.receives.resize(spec_.size);
  for (size_t i = 0; i < count; ++i) {
    const int64_t bytes = PieceBytes(op, i);
    if (bytes == 0) continue;
    // Only read, in spite of iovec's type.
    char* const source = static_cast<char*>(const_cast<void*>(op.inputs[i].const_data_ptr()));
    char* const target =
        static_cast<char*>(gather ? op.outputs[i].mutable_data_ptr() : op.scratch.mutable_data_ptr()) + scratch_at[i];
    for (int64_t peer = 0; peer < spec_.size; ++peer) {
      if (peer == spec_.rank) continue;
      op.exchange.sends[peer].push_back(
          {source + (op.kind == CommKind::kReduce ? peer * bytes : 0), static_cast<size_t>(bytes)});
      op.exchange.receives[peer].push_back(
          {target + (gather ? peer * bytes : SlotOf(peer) * Padded(bytes)), static_cast<size_t>(bytes)});
      op.times.bytes += bytes;
    }
  }
  stats_.bytes_sent += op.times.bytes;
  stats_.bytes_received += op.times.bytes;
  ++stats_.calls;
}

at::Tensor SocketComm::TakeScratch(int64_t bytes) {
  auto best = free_scratch_.end();
  for (auto it = free_scratch_.begin(); it != free_scratch_.end(); ++it) {
    if (it->numel() >= bytes && (best == free_scratch_.end() || it->numel() < best->numel())) best = it;
  }
  if (best == free_scratch_.end() && !free_scratch_.empty()) {  // none is large enough: replace the largest
    const auto largest =
        std::max_element(free_scratch_.begin(), free_scratch_.end(),
                         [](const at::Tensor& a, const at::Tensor& b) { return a.numel() < b.numel(); });
    scratch_bytes_ -= largest->numel();
    free_scratch_.erase(largest);
    best = free_scratch_.end();
  }
  if (best != free_scratch_.end()) {
    at::Tensor scratch = std::move(*best);
    free_scratch_.erase(best);
    return scratch;
  }
  scratch_bytes_ += bytes;
  stats_.receive_buffer_peak_bytes = std::max(stats_.receive_buffer_peak_bytes, scratch_bytes_);
  return at::empty({bytes}, at::kByte);
}

Status SocketComm::WaitFor(Ticket ticket, double timeout_s) {
  if (auto failure = mesh_->failure()) return *failure;
  Op* op;
  {
    std::lock_guard lock(mutex_);
    const auto it = ops_.find(ticket);
    if (it == ops_.end())
      return MakeError("axis ", spec_.name, ": no transfer ", ticket, " is under way (waited for twice?)");
    op = it->second.get();
  }
  CopyOwn(*op);
  INTERLACE_TRY(mesh_->Finish(op->exchange, timeout_s));
  Sum(*op);
  std::lock_guard lock(mutex_);
  if (op->recorded) {
    op->times.begin_ns = op->exchange.begin_ns;
    op->times.end_ns = op->exchange.end_ns;
    times_[ticket] = op->times;
  }
  if (op->scratch.defined() && !op->offered) free_scratch_.push_back(std::move(op->scratch));
  ops_.erase(ticket);
  return Ok{};
}

void SocketComm::CopyOwn(const Op& op) const {
  if (op.kind != CommKind::kGather) return;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const size_t bytes = op.inputs[i].nbytes();
    const auto* source = static_cast<const char*>(op.inputs[i].const_data_ptr());
    char* own = static_cast<char*>(op.outputs[i].mutable_data_ptr()) + spec_.rank * bytes;
    if (bytes != 0 && source != own) std::memcpy(own, source, bytes);
  }
}

void SocketComm::Sum(const Op& op) const {
  if (op.kind == CommKind::kGather) return;
  const char* scratch = static_cast<const char*>(op.scratch.const_data_ptr());
  std::vector<const void*> parts(spec_.size);
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const int64_t bytes = PieceBytes(op, i);
    for (int64_t peer = 0; peer < spec_.size; ++peer) {
      if (peer == spec_.rank) {
        const int64_t own = op.kind == CommKind::kReduce ? spec_.rank * bytes : 0;
        parts[peer] = static_cast<const char*>(op.inputs[i].const_data_ptr()) + own;
      } else {
        parts[peer] = scratch + SlotOf(peer) * Padded(bytes);
      }
    }
    SumInOrder(op.inputs[i].scalar_type(), parts, op.outputs[i].mutable_data_ptr(),
               bytes / static_cast<int64_t>(op.inputs[i].element_size()));
    scratch += Padded(bytes) * (spec_.size - 1);
  }
}

}  // namespace

Result<std::unique_ptr<Comm>> MakeSocketComm(const AxisSpec& spec, double timeout_s) {
  INTERLACE_ASSIGN(std::shared_ptr<SocketMesh> mesh, SocketMesh::Open(spec, timeout_s));
  return std::unique_ptr<Comm>(new SocketComm(spec, std::move(mesh), timeout_s));
}

}  // namespace interlace
