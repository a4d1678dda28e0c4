// comm_tcp.cc — collectives of tensors on the CPU: the room transport, told which bytes. Here tensors are kept until
// they were waited for, receive buffers come from torch's allocator, which counts them, and a process group is what the
// ranks exchange addresses through. As long as a group lives, a later Comm on it goes on with the same connections.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "runtime/comm_impl.h"
#include "runtime/view.h"
#include "transport/collectives.h"

namespace interlace {

namespace {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// What is sent is only read.
char* DataOf(const at::Tensor& t) {
  return static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
}

// As bytes: for what is moved and not added.
TypedSpan BytesOf(const at::Tensor& t) {
  return {DataOf(t), static_cast<int64_t>(t.nbytes()), DType::kU8};
}

// Of a type that can be added.
TypedSpan NumbersOf(const at::Tensor& t) {
  return {DataOf(t), t.numel(), *DTypeOf(t.scalar_type())};
}

bool CanSum(c10::ScalarType type) {
  const std::optional<DType> dtype = DTypeOf(type);
  return dtype && CanSum(*dtype);
}

template <typename F>
std::vector<TypedSpan> EachOf(const std::vector<at::Tensor>& tensors, F&& buffer) {
  std::vector<TypedSpan> out;
  out.reserve(tensors.size());
  for (const at::Tensor& t : tensors) out.push_back(buffer(t));
  return out;
}

// Equal parts, by rank.
std::vector<TypedSpan> PartsOf(const at::Tensor& t, int64_t size) {
  std::vector<TypedSpan> out;
  const int64_t bytes = static_cast<int64_t>(t.nbytes()) / size;
  for (int64_t rank = 0; rank < size; ++rank) out.push_back({DataOf(t) + rank * bytes, bytes, DType::kU8});
  return out;
}

void InThreads(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  at::parallel_for(0, count, grain, work);
}

class TcpComm final : public Comm {
 public:
  TcpComm(AxisSpec spec, std::shared_ptr<Mesh> mesh, double timeout_s)
      : spec_(std::move(spec)), mesh_(mesh), collectives_(std::move(mesh), timeout_s, InThreads) {
    const auto size = static_cast<int>(spec_.size), rank = static_cast<int>(spec_.rank);
    const int row = spec_.row > 0 ? static_cast<int>(spec_.row) : size;
    for (int other = rank / row * row; other < (rank / row + 1) * row; ++other) whole_.within.push_back(other);
    for (int other = rank % row; other < size; other += row) whole_.across.push_back(other);
  }

  Result<Ticket> StartGather(std::vector<at::Tensor> shards, std::vector<at::Tensor> fulls,
                             std::string label) override {
    INTERLACE_TRY(Check(CommKind::kGather, shards, fulls, label));
    Result<Ticket> ticket =
        collectives_.StartGather(EachOf(shards, BytesOf), EachOf(fulls, BytesOf), whole_, std::move(label));
    return Keep(std::move(ticket), {std::move(shards), std::move(fulls), {}});
  }
  Result<Ticket> StartReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                             std::string label) override {
    INTERLACE_TRY(Check(CommKind::kReduce, flats, shards, label));
    const int64_t receive = Collectives::GridScatterBytes(whole_, EachOf(shards, NumbersOf));
    return Reduce(std::move(flats), std::move(shards), whole_, receive, std::move(label));
  }
  Result<Ticket> StartGridReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards, const RankGrid& grid,
                                 std::string label) override {
    INTERLACE_TRY(Check(CommKind::kReduce, flats, shards, label, &grid));
    const std::vector<TypedSpan> spans = EachOf(shards, NumbersOf);
    const int64_t receive =
        grid.nested ? Collectives::GridScatterBytes(grid, spans) : Collectives::GridReceiveBytes(grid, spans);
    return Reduce(std::move(flats), std::move(shards), grid, receive, std::move(label));
  }
  Result<Ticket> StartAllReduce(at::Tensor value, std::string label) override {
    INTERLACE_TRY(Check(CommKind::kAllReduce, {value}, {value}, label));
    const TypedSpan buffer = NumbersOf(value);
    Kept kept{{std::move(value)}, {}, TakeReceive(Collectives::AllReduceReceiveBytes(mesh_->group().size(), buffer))};
    Result<Ticket> ticket = collectives_.StartAllReduce(buffer, kept.receive.memory(), std::move(label));
    return Keep(std::move(ticket), std::move(kept));
  }
  Result<Ticket> StartAllToAll(at::Tensor from, at::Tensor to, std::string label) override {
    INTERLACE_TRY(Check(CommKind::kAllToAll, {from}, {to}, label));
    Result<Ticket> ticket =
        collectives_.StartAllToAll(PartsOf(from, spec_.size), PartsOf(to, spec_.size), std::move(label));
    return Keep(std::move(ticket), {{std::move(from)}, {std::move(to)}, {}});
  }
  Result<Ticket> StartBroadcast(at::Tensor value, int64_t root, std::string label) override {
    INTERLACE_TRY(Check(CommKind::kBroadcast, {value}, {value}, label));
    Result<Ticket> ticket = collectives_.StartBroadcast(BytesOf(value), static_cast<int>(root), std::move(label));
    return Keep(std::move(ticket), {{std::move(value)}, {}, {}});
  }
  Result<Ticket> StartSend(at::Tensor value, int64_t peer, std::string label) override {
    INTERLACE_TRY(Check(CommKind::kSend, {value}, {value}, label));
    Result<Ticket> ticket = collectives_.StartSend(BytesOf(value), static_cast<int>(peer), std::move(label));
    return Keep(std::move(ticket), {{std::move(value)}, {}, {}});
  }
  Result<Ticket> StartRecv(at::Tensor value, int64_t peer, std::string label) override {
    INTERLACE_TRY(Check(CommKind::kRecv, {value}, {value}, label));
    Result<Ticket> ticket = collectives_.StartRecv(BytesOf(value), static_cast<int>(peer), std::move(label));
    return Keep(std::move(ticket), {{std::move(value)}, {}, {}});
  }

  Status Wait(Ticket ticket) override {
    INTERLACE_TRY(collectives_.Wait(ticket));
    std::lock_guard lock(mutex_);
    auto kept = kept_.extract(ticket);
    if (Receive& receive = kept.mapped().receive; receive.tensor.defined() && !receive.offered)
      free_receives_.push_back(std::move(receive.tensor));
    return Ok{};
  }
  void OfferReceiveBuffer(at::Tensor bytes) override { offered_ = std::move(bytes); }
  void Progress() override { collectives_.Progress(); }
  void Leave() override { collectives_.Leave(); }
  void SetRecording(bool on) override { collectives_.SetRecording(on); }
  Times TakeTimes(Ticket ticket) override { return collectives_.TakeTimes(ticket); }
  const AxisSpec& spec() const override { return spec_; }
  Stats stats() const override {
    const Collectives::Stats moved = collectives_.stats();
    std::lock_guard lock(mutex_);
    return {moved.bytes_sent, moved.bytes_received, receive_peak_bytes_, moved.calls};
  }

 private:
  struct Receive {
    at::Tensor tensor;
    bool offered = false;  // it is the caller's
    char* memory() { return static_cast<char*>(tensor.mutable_data_ptr()); }
  };
  struct Kept {
    std::vector<at::Tensor> inputs, outputs;
    Receive receive;
  };

  Result<Ticket> Reduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards, const RankGrid& grid,
                        int64_t receive_bytes, std::string label) {
    Kept kept{{}, {}, TakeReceive(receive_bytes)};
    Result<Ticket> ticket = collectives_.StartReduce(EachOf(flats, NumbersOf), EachOf(shards, NumbersOf), grid,
                                                     kept.receive.memory(), std::move(label));
    kept.inputs = std::move(flats);
    kept.outputs = std::move(shards);
    return Keep(std::move(ticket), std::move(kept));
  }
  Status Check(CommKind kind, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
               const std::string& label, const RankGrid* grid = nullptr) const {
    if (auto failure = mesh_->failure()) return *failure;
    AxisSpec row = spec_;
    if (grid != nullptr && !grid->nested) {
      row.size = static_cast<int64_t>(grid->within.size());
      row.rank = std::find(grid->within.begin(), grid->within.end(), spec_.rank) - grid->within.begin();
    }
    INTERLACE_TRY(CheckCollective(kind, row, inputs, outputs, label));
    for (const at::Tensor& t : inputs) {
      if (!t.device().is_cpu()) {
        return MakeError(label, " on axis ", spec_.name, ": tcp moves CPU tensors, this one is on ", t.device().str(),
                         "; use the nccl backend");
      }
      if ((kind == CommKind::kReduce || kind == CommKind::kAllReduce) && !CanSum(t.scalar_type())) {
        return MakeError(label, " on axis ", spec_.name, ": no sum of ", c10::toString(t.scalar_type()),
                         "; floating-point and integer tensors can be reduced");
      }
    }
    return Ok{};
  }
  Result<Ticket> Keep(Result<Ticket> ticket, Kept kept) {
    if (!ticket.ok()) return ticket;
    std::lock_guard lock(mutex_);
    kept_.emplace(*ticket, std::move(kept));
    return ticket;
  }
  Receive TakeReceive(int64_t bytes);

  const AxisSpec spec_;
  const std::shared_ptr<Mesh> mesh_;
  RankGrid whole_;  // all ranks: one row, or by AxisSpec::row
  mutable std::mutex mutex_;
  std::map<Ticket, Kept> kept_;
  at::Tensor offered_;                     // for the next reduction
  std::vector<at::Tensor> free_receives_;  // receive buffers kept for the next reduction
  int64_t receive_bytes_ = 0;              // of all of them, in use or free
  int64_t receive_peak_bytes_ = 0;
  Collectives collectives_;  // last: it finishes what is under way before the tensors go
};

TcpComm::Receive TcpComm::TakeReceive(int64_t bytes) {
  if (at::Tensor offered = std::exchange(offered_, {}); offered.defined() && offered.numel() >= bytes)
    return {std::move(offered), true};
  std::lock_guard lock(mutex_);
  const auto smaller = [](const at::Tensor& a, const at::Tensor& b) { return a.numel() < b.numel(); };
  std::sort(free_receives_.begin(), free_receives_.end(), smaller);
  const auto fits = std::find_if(free_receives_.begin(), free_receives_.end(),
                                 [&](const at::Tensor& t) { return t.numel() >= bytes; });
  if (fits != free_receives_.end()) {
    at::Tensor taken = std::move(*fits);
    free_receives_.erase(fits);
    return {std::move(taken)};
  }
  if (!free_receives_.empty()) {  // none is large enough: replace the largest
    receive_bytes_ -= free_receives_.back().numel();
    free_receives_.pop_back();
  }
  receive_bytes_ += bytes;
  receive_peak_bytes_ = std::max(receive_peak_bytes_, receive_bytes_);
  return {at::empty({bytes}, at::kByte)};
}

// c10d and gloo report by exceptions. Of "[file:line] What happened [address]. Advice ...\n stack trace" only what
// happened is kept.
std::string FirstLine(const std::string& text) {
  const size_t begin = text.starts_with('[') && text.find("] ") != std::string::npos ? text.find("] ") + 2 : 0;
  return text.substr(begin, std::min(text.find('\n', begin), text.find(". ", begin)) - begin);
}

struct Known {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  int64_t channel = -1;  // AxisSpec::channel
  std::shared_ptr<Mesh> mesh;
};

// Never destroyed: meshes may be in use while the process ends.
std::mutex& KnownMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::vector<Known>& KnownMeshes() {
  static auto* const meshes = new std::vector<Known>;
  return *meshes;
}

// The group's ranks as the whole run calls them, where the back end knows; else as the group does.
std::vector<int64_t> GlobalRanks(c10d::Backend& backend) {
  std::vector<int64_t> ranks(backend.getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  try {
    const auto& global = backend.getBackendOptions()->global_ranks_in_group;
    if (global.size() == ranks.size()) std::copy(global.begin(), global.end(), ranks.begin());
  } catch (const std::exception&) {  // a backend that has no options
  }
  return ranks;
}

// The mesh of the spec's process group; connects the ranks when it is the first to ask. Error: unknown group name,
// wrong rank or size, a group without a CPU backend, a rank that cannot be reached.
Result<std::shared_ptr<Mesh>> MeshOf(const AxisSpec& spec, double timeout_s) {
  ProcessGroup group;
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    group = c10d::resolve_process_group(spec.native);
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& e) {
    return MakeError("axis ", spec.name, ": no process group named \"", spec.native, "\" that can send from the CPU",
                     "; create it with torch.distributed.new_group and pass its group_name (", FirstLine(e.what()),
                     ")");
  }
  if (backend->getRank() != spec.rank || backend->getSize() != spec.size) {
    return MakeError("axis ", spec.name, ": process group \"", spec.native, "\" says rank ", backend->getRank(), " of ",
                     backend->getSize(), ", the axis says rank ", spec.rank, " of ", spec.size);
  }
  {
    std::lock_guard lock(KnownMutex());
    std::erase_if(KnownMeshes(),
                  [](const Known& known) { return known.group.expired() && known.mesh.use_count() == 1; });
    for (const Known& known : KnownMeshes()) {
      if (known.channel == spec.channel && known.group.lock() == group) return known.mesh;
    }
  }
  const ExchangeBytes exchange = [&](const std::string& mine) -> Result<std::vector<std::string>> {
    const auto bytes = static_cast<int64_t>(mine.size());
    std::vector<at::Tensor> sent{at::empty({bytes}, at::kByte)};
    std::memcpy(sent[0].mutable_data_ptr(), mine.data(), mine.size());
    std::vector<std::vector<at::Tensor>> received(1);
    for (int64_t rank = 0; rank < spec.size; ++rank) received[0].push_back(at::empty({bytes}, at::kByte));
    c10d::AllgatherOptions options;
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
    try {
      backend->allgather(received, sent, options)->wait();
    } catch (const std::exception& e) {
      return MakeError("axis ", spec.name, ": cannot reach the other ranks over process group \"", spec.native,
                       "\": ", FirstLine(e.what()));
    }
    std::vector<std::string> out;
    for (const at::Tensor& one : received[0])
      out.emplace_back(static_cast<const char*>(one.const_data_ptr()), mine.size());
    return out;
  };
  INTERLACE_ASSIGN(std::shared_ptr<Mesh> mesh,
                   Mesh::Connect({spec.name, GlobalRanks(*backend), static_cast<int>(spec.rank)}, exchange, timeout_s));
  std::lock_guard lock(KnownMutex());
  KnownMeshes().push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), spec.channel, mesh});
  return mesh;
}

}  // namespace

Result<std::unique_ptr<Comm>> MakeTcpComm(const AxisSpec& spec, double timeout_s) {
  INTERLACE_ASSIGN(std::shared_ptr<Mesh> mesh, MeshOf(spec, timeout_s));
  return std::unique_ptr<Comm>(new TcpComm(spec, std::move(mesh), timeout_s));
}

}  // namespace interlace
