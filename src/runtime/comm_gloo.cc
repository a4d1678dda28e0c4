// comm_gloo.cc — collectives as point-to-point transfers. Every operation is the same shape: for each tensor, one piece
// goes to every peer and one piece comes from every peer.
//
//               sent to peer p          received from peer p       afterwards
//   gather      own shard               p's place in full          own shard copied to its own place (while transfers
//   run) reduce      p's part of flat        receive buffer             shard = sum of the pieces in rank order
//   all-reduce  the value               receive buffer             value = sum of the values in rank order
//
// A send copies into the socket in the thread that posts it, so a poster thread posts; a wait that comes before the
// poster got to its operation posts it itself. Rank r sends to r+1, r+2, ... and receives from r-1, r-2, ..., so no
// rank is everybody's first.
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "runtime/comm_impl.h"
#include "runtime/comm_link.h"

namespace interlace {

namespace {

using Clock = std::chrono::steady_clock;

int64_t NanosNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Elements [begin, begin + numel) of a contiguous tensor, as a tensor that shares its storage (no operator is called).
at::Tensor Slice(const at::Tensor& tensor, int64_t begin, int64_t numel) {
  auto slice =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  const int64_t stride = 1;
  slice.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(&numel, 1), c10::IntArrayRef(&stride, 1),
                                                     tensor.storage_offset() + begin);
  return slice;
}

class GlooComm final : public Comm {
 public:
  GlooComm(AxisSpec spec, std::shared_ptr<GlooLink> link, double timeout_s)
      : spec_(std::move(spec)), link_(std::move(link)), timeout_s_(timeout_s), poster_([this] { PosterLoop(); }) {}

  ~GlooComm() override {
    // Transfers must not be dropped while the group lives: finish what was started. After an error on this rank alone
    // the peers may never do their part, hence the short patience; the group is then closed.
    std::vector<Ticket> open;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [ticket, op] : ops_) open.push_back(ticket);
    }
    for (Ticket ticket : open) {
      if (!WaitFor(ticket, std::min(timeout_s_, 5.0)).ok()) break;
    }
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    poster_.join();
    if (watcher_.joinable()) watcher_.join();
    if (!ops_.empty()) link_->Bury(std::make_shared<std::map<Ticket, std::unique_ptr<Op>>>(std::move(ops_)));
  }

  Result<Ticket> StartGather(std::vector<at::Tensor> shards, std::vector<at::Tensor> fulls,
                             std::string label) override {
    return Start(CollectiveKind::kGather, std::move(shards), std::move(fulls), std::move(label));
  }
  Result<Ticket> StartReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                             std::string label) override {
    return Start(CollectiveKind::kReduce, std::move(flats), std::move(shards), std::move(label));
  }
  Result<Ticket> StartAllReduce(at::Tensor value, std::string label) override {
    return Start(CollectiveKind::kAllReduce, {value}, {value}, std::move(label));
  }

  Status Wait(Ticket ticket) override { return WaitFor(ticket, timeout_s_); }
  void Leave() override { link_->Leave(); }

  Stats stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  const AxisSpec& spec() const override { return spec_; }
  void SetRecording(bool on, bool watch) override {
    std::lock_guard lock(mutex_);
    recording_ = on;
    watching_ = on && watch;
    times_.clear();
    if (watching_ && !watcher_.joinable()) watcher_ = std::thread([this] { WatcherLoop(); });
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
  struct Transfer {
    int peer = 0;
    int tag = 0;
    bool send = false;
    at::Tensor tensor;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Op {
    CollectiveKind kind;
    std::string label;
    std::vector<at::Tensor> inputs, outputs;
    std::vector<Transfer> transfers;  // receives first
    at::Tensor scratch;               // of reductions: for each tensor, the pieces of all peers, in peer order
    enum { kQueued, kPosting, kPosted } state = kQueued;
    int failed = -1;  // transfer that could not be posted
    std::string what;
    Ticket ticket = 0;
    bool recorded = false;
    bool watched = false;  // recorded, and the watcher thread waits for the transfers and notes the time
    bool arrived = false;  // it has; `what` says if one failed, `at` which
    size_t at = 0;
    Times times;
  };

  Result<Ticket> Start(CollectiveKind kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                       std::string label);
  void Plan(Op& op);
  void Post(Op& op);
  void Finish(Op& op);
  void PosterLoop();
  void WatcherLoop();
  Status WaitFor(Ticket ticket, double timeout_s);
  // Elements of a piece of tensor i.
  int64_t PieceOf(const Op& op, size_t i) const {
    return op.kind == CollectiveKind::kReduce ? op.outputs[i].numel() : op.inputs[i].numel();
  }
  // Peers in the order of the scratch buffer: rank order without this rank.
  int64_t SlotOf(int peer) const { return peer < spec_.rank ? peer : peer - 1; }
  at::Tensor TakeScratch(int64_t bytes);
  GlooLink::Suspect SuspectOf(const Transfer& t) const {
    const bool up = t.send ? spec_.rank < t.peer : t.peer < spec_.rank;
    return {t.peer, up, t.work};
  }

  const AxisSpec spec_;
  const std::shared_ptr<GlooLink> link_;
  const double timeout_s_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // an operation was queued or posted, or the end
  std::map<Ticket, std::unique_ptr<Op>> ops_;
  std::deque<Op*> queue_;
  Ticket next_ticket_ = 1;
  bool stop_ = false;
  bool recording_ = false, watching_ = false;
  std::deque<Op*> watched_;  // posted or to be posted, in the order of issue
  std::map<Ticket, Times> times_;
  struct Waiting {  // the wait that is going on, for the poster thread, which watches its deadline
    const Op* op = nullptr;
    std::atomic<size_t> transfer = 0;
    Clock::time_point begin, deadline;
    bool warned = false;
  } waiting_;
  std::vector<at::Tensor> free_scratch_;  // receive buffers kept for the next reduction
  int64_t scratch_bytes_ = 0;             // all of them, in use or free
  Stats stats_;
  std::thread poster_;   // last: it uses all of the above
  std::thread watcher_;  // made when recording is first asked for
};

// Bytes a piece takes in the scratch buffer: pieces start at 64 bytes.
int64_t Padded(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

Result<Ticket> GlooComm::Start(CollectiveKind kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                               std::string label) {
  if (auto failure = link_->failure()) return *failure;
  INTERLACE_TRY(CheckCollective(kind, spec_, inputs, outputs, label));
  for (const at::Tensor& t : inputs) {
    if (!t.device().is_cpu()) {
      return MakeError(label, " on axis ", spec_.name, ": gloo moves CPU tensors, this one is on ", t.device().str(),
                       "; use the nccl backend");
    }
    if (kind != CollectiveKind::kGather && !CanSum(t.scalar_type())) {
      return MakeError(label, " on axis ", spec_.name, ": no sum of ", c10::toString(t.scalar_type()),
                       "; floating-point and integer tensors can be reduced");
    }
  }
  auto op = std::make_unique<Op>();
  op->kind = kind;
  op->label = std::move(label);
  op->inputs = std::move(inputs);
  op->outputs = std::move(outputs);
  Ticket ticket;
  {
    std::lock_guard lock(mutex_);
    Plan(*op);
    ticket = next_ticket_++;
    op->ticket = ticket;
    queue_.push_back(op.get());
    op->recorded = recording_;
    op->watched = watching_;
    if (recording_) op->times.queued_ns = NanosNow();
    if (watching_) watched_.push_back(op.get());
    ops_.emplace(ticket, std::move(op));
  }
  changed_.notify_all();
  return ticket;
}

void GlooComm::Plan(Op& op) {
  const auto rank = static_cast<int>(spec_.rank), size = static_cast<int>(spec_.size);
  const size_t count = op.inputs.size();
  const int tag = link_->NextTags(static_cast<int>(count));
  std::vector<int64_t> scratch_at(count + 1, 0);
  if (op.kind != CollectiveKind::kGather) {
    for (size_t i = 0; i < count; ++i) {
      const int64_t piece = Padded(PieceOf(op, i) * static_cast<int64_t>(op.inputs[i].element_size()));
      scratch_at[i + 1] = scratch_at[i] + piece * (size - 1);
    }
    op.scratch = TakeScratch(scratch_at[count]);
  }
  op.transfers.reserve(2 * (size - 1) * count);
  for (int d = 1; d < size; ++d) {
    const int peer = (rank - d + size) % size;
    for (size_t i = 0; i < count; ++i) {
      const int64_t piece = PieceOf(op, i);
      if (piece == 0) continue;
      const auto element = static_cast<int64_t>(op.inputs[i].element_size());
      at::Tensor target =
          op.kind == CollectiveKind::kGather
              ? Slice(op.outputs[i], peer * piece, piece)
              : Slice(op.scratch, scratch_at[i] + SlotOf(peer) * Padded(piece * element), piece * element);
      stats_.bytes_received += piece * element;
      op.times.bytes += piece * element;
      op.transfers.push_back({peer, tag + static_cast<int>(i), false, std::move(target), {}});
    }
  }
  for (int d = 1; d < size; ++d) {
    const int peer = (rank + d) % size;
    for (size_t i = 0; i < count; ++i) {
      const int64_t piece = PieceOf(op, i);
      if (piece == 0) continue;
      at::Tensor source = Slice(op.inputs[i], op.kind == CollectiveKind::kReduce ? peer * piece : 0, piece);
      stats_.bytes_sent += piece * static_cast<int64_t>(op.inputs[i].element_size());
      op.transfers.push_back({peer, tag + static_cast<int>(i), true, std::move(source), {}});
    }
  }
  ++stats_.calls;
}

at::Tensor GlooComm::TakeScratch(int64_t bytes) {
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

// Called by one thread per operation, without the lock.
void GlooComm::Post(Op& op) {
  if (op.recorded) op.times.begin_ns = NanosNow();
  for (size_t i = 0; i < op.transfers.size(); ++i) {
    Transfer& t = op.transfers[i];
    try {
      t.work = t.send ? link_->Send(t.tensor, t.peer, t.tag) : link_->Receive(t.tensor, t.peer, t.tag);
    } catch (const std::exception& e) {
      op.failed = static_cast<int>(i);
      op.what = e.what();
      return;
    }
  }
  if (op.kind != CollectiveKind::kGather) return;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const size_t bytes = op.inputs[i].nbytes();
    const auto* source = static_cast<const char*>(op.inputs[i].const_data_ptr());
    char* own = static_cast<char*>(op.outputs[i].mutable_data_ptr()) + spec_.rank * bytes;
    if (bytes != 0 && source != own) std::memcpy(own, source, bytes);
  }
}

void GlooComm::PosterLoop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return stop_ || !queue_.empty(); });
    if (waiting_.op != nullptr && !waiting_.warned && Clock::now() > waiting_.deadline) {
      waiting_.warned = true;
      const Transfer& t = waiting_.op->transfers[waiting_.transfer];
      link_->Warn(t.peer, waiting_.op->label, std::chrono::duration<double>(Clock::now() - waiting_.begin).count());
    }
    if (stop_ || queue_.empty()) continue;
    Op* op = queue_.front();
    queue_.pop_front();
    op->state = Op::kPosting;
    lock.unlock();
    Post(*op);
    lock.lock();
    op->state = Op::kPosted;
    changed_.notify_all();
  }
}

// Waits for recorded operations one after the other, in the order of issue, to note when each has ended.
void GlooComm::WatcherLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || (!watched_.empty() && watched_.front()->state == Op::kPosted); });
    if (stop_) return;
    Op& op = *watched_.front();
    lock.unlock();
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_)) +
                     std::chrono::milliseconds(GlooLink::kGraceMs);
    std::string what;
    for (size_t i = 0; op.failed < 0 && i < op.transfers.size() && what.empty(); ++i) {
      op.at = i;
      try {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
        op.transfers[i].work->wait(std::max(left, std::chrono::milliseconds(1)));
      } catch (const std::exception& e) {
        what = e.what();
      }
    }
    op.times.end_ns = NanosNow();
    lock.lock();
    if (op.failed < 0) op.what = what;
    watched_.pop_front();
    op.arrived = true;
    changed_.notify_all();
  }
}

Status GlooComm::WaitFor(Ticket ticket, double timeout_s) {
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  const auto end = deadline + std::chrono::milliseconds(GlooLink::kGraceMs);
  const auto elapsed_s = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  if (auto failure = link_->failure()) return *failure;
  Op* op;
  {
    std::unique_lock lock(mutex_);
    const auto it = ops_.find(ticket);
    if (it == ops_.end()) {
      return MakeError("axis ", spec_.name, ": no transfer ", ticket, " is under way (waited for twice?)");
    }
    op = it->second.get();
    if (op->state == Op::kQueued) {
      queue_.erase(std::find(queue_.begin(), queue_.end(), op));
      op->state = Op::kPosting;
      lock.unlock();
      Post(*op);
      lock.lock();
      op->state = Op::kPosted;
      if (op->watched) changed_.notify_all();
    }
    changed_.wait(lock, [&] { return op->state == Op::kPosted; });
    if (op->failed < 0 && !op->transfers.empty()) {
      waiting_.op = op;
      waiting_.transfer = 0;
      waiting_.begin = begin;
      waiting_.deadline = deadline;
      waiting_.warned = false;
    }
  }
  if (op->failed >= 0) return link_->Fail(SuspectOf(op->transfers[op->failed]), {}, op->what, op->label, elapsed_s());
  std::string what;
  if (op->watched) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return op->arrived; });
    what = op->what;
    waiting_.transfer = op->at;
  }
  for (size_t i = 0; !op->watched && i < op->transfers.size() && what.empty(); ++i) {
    waiting_.transfer = i;
    try {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      op->transfers[i].work->wait(std::max(left, std::chrono::milliseconds(1)));  // 0 means the group's own timeout
    } catch (const std::exception& e) {
      what = e.what();
    }
  }
  if (op->recorded && !op->watched) op->times.end_ns = NanosNow();
  bool warned;
  {
    std::lock_guard lock(mutex_);
    warned = waiting_.warned;
    waiting_.op = nullptr;
    if (what.empty() && !warned) {
      if (op->recorded) times_[ticket] = op->times;
      Finish(*op);
      if (op->scratch.defined()) free_scratch_.push_back(std::move(op->scratch));
      ops_.erase(ticket);
      return Ok{};
    }
  }
  // Answered after the deadline, when the others had been told: late is as bad as never.
  if (what.empty()) what = "Timed out";
  std::vector<GlooLink::Suspect> others;
  for (size_t i = waiting_.transfer + 1; i < op->transfers.size(); ++i) others.push_back(SuspectOf(op->transfers[i]));
  return link_->Fail(SuspectOf(op->transfers[waiting_.transfer]), others, what, op->label, elapsed_s());
}

void GlooComm::Finish(Op& op) {
  if (op.kind == CollectiveKind::kGather) return;
  const char* scratch = static_cast<const char*>(op.scratch.const_data_ptr());
  std::vector<const void*> parts(spec_.size);
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const int64_t piece = PieceOf(op, i);
    const int64_t bytes = piece * static_cast<int64_t>(op.inputs[i].element_size());
    for (int peer = 0; peer < spec_.size; ++peer) {
      if (peer == spec_.rank) {
        const int64_t own = op.kind == CollectiveKind::kReduce ? spec_.rank * bytes : 0;
        parts[peer] = static_cast<const char*>(op.inputs[i].const_data_ptr()) + own;
      } else {
        parts[peer] = scratch + SlotOf(peer) * Padded(bytes);
      }
    }
    SumInOrder(op.inputs[i].scalar_type(), parts, op.outputs[i].mutable_data_ptr(), piece);
    scratch += Padded(bytes) * (spec_.size - 1);
  }
}

}  // namespace

Result<std::unique_ptr<Comm>> MakeGlooComm(const AxisSpec& spec, double timeout_s) {
  INTERLACE_ASSIGN(std::shared_ptr<GlooLink> link, GlooLink::Open(spec));
  return std::unique_ptr<Comm>(new GlooComm(spec, std::move(link), timeout_s));
}

}  // namespace interlace
