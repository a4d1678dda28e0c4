// A c10d backend with NCCL's semantics: an operation runs on a stream of the group's own, after what the current stream was
// given; wait() makes the current stream wait, never the host. Ranks of one machine meet in shared memory. Ranks must issue
// the same operations in the same order; where they do not, they wait for one another until the timeout, which counts from
// the issue. A group of which one operation has come to that, or that was aborted, is of no more use: all that it was given
// and is given is over at once, as on a communicator of NCCL's. The host is told once by the device, and by each call after.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "engine.h"

namespace soft {
namespace {

constexpr size_t kSlot = size_t{256} << 20;  // sparse: only what is touched is memory
constexpr size_t kHead = 1 << 16;

// What tests plant: a wait for a reduction that orders nothing; an operation that does not come after what the current
// stream was given.
enum class Fault { kNone, kWait, kStart };
std::atomic<Fault> fault = Fault::kNone;

struct alignas(64) Flag {
  std::atomic<uint64_t> posted, taken;
  std::atomic<uint64_t> form;  // of the operation that is posted: what all ranks must agree on
};

// What ranks share: a flag and a slot for each rank's part of a collective, and for each pair's messages.
class Room {
 public:
  Room(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : size_(size), flags_(static_cast<size_t>(size + size * size)) {
    std::string name;
    if (rank == 0) {
      static std::atomic<int> count{0};
      name = "/soft-" + std::to_string(getpid()) + "-" + std::to_string(count++);
      store->set("soft/room", std::vector<uint8_t>(name.begin(), name.end()));
    } else {
      const auto got = store->get("soft/room");
      name.assign(got.begin(), got.end());
    }
    const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(Bytes())) == 0, "soft device: no shared memory");
    void* p = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK(p != MAP_FAILED, "soft device: no shared memory");
    base_ = static_cast<char*>(p);
    key_ = std::hash<std::string>()(name);
    close(fd);
    store->add("soft/came", 1);
    while (store->add("soft/came", 0) < size) usleep(1000);
    if (rank == 0) shm_unlink(name.c_str());
  }
  ~Room() { munmap(base_, Bytes()); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  Flag& flag(size_t i) { return reinterpret_cast<Flag*>(base_)[i]; }
  char* slot(size_t i) { return base_ + kHead + i * kSlot; }
  // Where in its slot the part of each rank begins, of an all_to_all.
  int64_t* parts(size_t i) {
    const auto size = static_cast<size_t>(size_);
    return reinterpret_cast<int64_t*>(base_ + kHead) - (i + 1) * size;
  }
  uint64_t key() const { return key_; }  // the same on all its ranks
  size_t Pair(int from, int to) const { return static_cast<size_t>(size_ + from * size_ + to); }

 private:
  size_t Bytes() const { return kHead + flags_ * kSlot; }
  int size_;
  size_t flags_;
  char* base_ = nullptr;
  uint64_t key_ = 0;
};

at::Tensor Host(void* p, at::ScalarType dtype, int64_t numel) {
  return at::from_blob(p, {numel}, at::TensorOptions().dtype(dtype).device(at::kCPU));
}
const char* BytesOf(const at::Tensor& t) {
  return static_cast<const char*>(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.itemsize());
}

// Why a group has failed, if it has: the first reason is the one.
class Failure {
 public:
  void Set(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = why;
  }
  void Check() {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(why_.empty(), why_);
  }
  // For what the group carries out: whether it is to end. Throws the first time.
  bool Ends() {
    std::lock_guard lock(mutex_);
    if (why_.empty()) return false;
    TORCH_CHECK(std::exchange(told_, true), why_);
    return true;
  }

 private:
  std::mutex mutex_;
  std::string why_;
  bool told_ = false;
};
using FailurePtr = std::shared_ptr<Failure>;

class SoftWork final : public c10d::Work {
 public:
  SoftWork(EventPtr over, FailurePtr failure, std::vector<at::Tensor> kept, std::vector<at::Tensor> results,
           bool reduces = false)
      : over_(std::move(over)), failure_(std::move(failure)), reduces_(reduces), kept_(std::move(kept)),
        results_(std::move(results)) {}
  bool isCompleted() override { return Engine::Get().Query(over_); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    if (!reduces_ || fault != Fault::kWait) Engine::Get().Block(over_, CurrentStream());
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    failure_->Check();
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                           std::vector<c10::Device>{{c10::kPrivateUse1, 0}});
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  EventPtr over_;
  FailurePtr failure_;
  bool reduces_;
  std::vector<at::Tensor> kept_;  // until the current stream waits, as NCCL's are
  std::vector<at::Tensor> results_;
};
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class SoftGroup final : public c10d::Backend {
 public:
  SoftGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout_s)
      : Backend(rank, size), room_(std::make_shared<Room>(store, rank, size)), stream_(Engine::Get().NewStream()),
        timeout_ms_(timeout_s * 1000) {}
  const std::string getBackendName() const override { return "soft"; }
  void abort() override { failure_->Set("the process group was aborted"); }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    return Collective("all_gather", in, out, 0, [n = in.nbytes(), size = size_](Room& room, char* to) {
      for (int r = 0; r < size; ++r) std::memcpy(to + static_cast<size_t>(r) * n, room.slot(static_cast<size_t>(r)), n);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return Collective("reduce_scatter", in, out, 0, Sum(out, rank_ * static_cast<int64_t>(out.nbytes()), o.reduceOp));
  }
  WorkPtr allreduce(std::vector<at::Tensor>& t, const c10d::AllreduceOptions& o) override {
    return Collective("all_reduce", t.at(0), t.at(0), 0, Sum(t[0], 0, o.reduceOp));
  }
  WorkPtr broadcast(std::vector<at::Tensor>& t, const c10d::BroadcastOptions& o) override {
    const auto root = static_cast<size_t>(o.rootRank);
    return Collective("broadcast", t.at(0), t.at(0), root, [n = t[0].nbytes(), root](Room& room, char* to) {
      std::memcpy(to, room.slot(root), n);
    });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_split, std::vector<int64_t>& in_split,
                        const c10d::AllToAllOptions&) override {
    // Rows of each rank's part; all equal where nothing is said.
    const auto bytes = [size = size_](const at::Tensor& t, const std::vector<int64_t>& rows) {
      const auto all = static_cast<int64_t>(t.nbytes()), ranks = static_cast<int64_t>(size);
      const int64_t row = rows.empty() || t.numel() == 0 ? 0 : all / t.size(0);
      std::vector<int64_t> found(static_cast<size_t>(size), all / ranks);
      for (size_t r = 0; r < rows.size(); ++r) found[r] = rows[r] * row;
      return found;
    };
    std::vector<int64_t> begins;
    int64_t begin = 0;
    for (int64_t n : bytes(in, in_split)) begins.push_back(std::exchange(begin, begin + n));
    return Collective("all_to_all", in, out, 0, [counts = bytes(out, out_split), me = rank_](Room& room, char* to) {
      for (size_t r = 0; r < counts.size(); to += counts[r++])
        std::memcpy(to, room.slot(r) + room.parts(r)[me], static_cast<size_t>(counts[r]));
    }, std::move(begins));
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    at::Tensor one = at::zeros({1}, at::TensorOptions().device(c10::kPrivateUse1));
    auto work = Collective("barrier", one, one, 0, [](Room&, char*) {});
    Engine::Get().Synchronize(stream_);
    return work;
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins,
                    const c10d::AllgatherOptions& o) override {
    at::Tensor in = ins.at(0).contiguous(), whole = at::empty({size_ * in.numel()}, in.options());
    _allgather_base(whole, in, o)->wait();
    for (int r = 0; r < size_; ++r)
      outs.at(0).at(static_cast<size_t>(r)).copy_(whole.narrow(0, r * in.numel(), in.numel()).view_as(in));
    return Done(outs.at(0));
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins,
                 const c10d::GatherOptions& o) override {
    std::vector<std::vector<at::Tensor>> all{std::vector<at::Tensor>(static_cast<size_t>(size_))};
    for (int r = 0; r < size_; ++r) {
      const bool here = rank_ == o.rootRank;
      all[0][static_cast<size_t>(r)] = here ? outs.at(0).at(static_cast<size_t>(r)) : at::empty_like(ins.at(0));
    }
    return allgather(all, ins, c10d::AllgatherOptions());
  }
  WorkPtr send(std::vector<at::Tensor>& t, int to, int) override { return Message("send", t.at(0), rank_, to, false); }
  WorkPtr recv(std::vector<at::Tensor>& t, int from, int) override { return Message("recv", t.at(0), from, rank_, true); }

 private:
  using Finish = std::function<void(Room&, char* to)>;

  // In rank order, narrow types in float32.
  Finish Sum(const at::Tensor& out, int64_t offset, const c10d::ReduceOp& op) {
    const bool mean = op == c10d::ReduceOp::AVG, max = op == c10d::ReduceOp::MAX, min = op == c10d::ReduceOp::MIN;
    return [=, numel = out.numel(), dtype = out.scalar_type(), size = size_](Room& room, char* to) {
      const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
      const auto part = [&](int r) { return Host(room.slot(static_cast<size_t>(r)) + offset, dtype, numel); };
      at::Tensor total = part(0).to(narrow ? at::kFloat : dtype, /*non_blocking=*/false, /*copy=*/true);
      for (int r = 1; r < size; ++r) {
        if (max) {
          total = at::maximum(total, part(r));
        } else if (min) {
          total = at::minimum(total, part(r));
        } else {
          total.add_(part(r));
        }
      }
      if (mean) total.div_(size);
      Host(to, dtype, numel).copy_(total);
    };
  }

  WorkPtr Done(std::vector<at::Tensor> results) {
    EventPtr over = std::make_shared<Event>();
    Engine::Get().Record(over, CurrentStream());
    return c10::make_intrusive<SoftWork>(over, failure_, std::vector<at::Tensor>{}, std::move(results));
  }

  // Who meets in an operation, and what all of them must agree on.
  struct Meeting {
    uint64_t key;
    int size;
    uint64_t form;
  };
  // `make`: the operation that comes next, each time that it is issued; a graph's, at each replay.
  WorkPtr Issue(const char* name, int stream, const at::Tensor& in, const at::Tensor& out, const Meeting& meeting, Make make) {
    failure_->Check();
    EventPtr before = std::make_shared<Event>(), over = std::make_shared<Event>();
    Engine::Get().Record(before, CurrentStream());
    if (fault != Fault::kStart) Engine::Get().Block(before, stream);
    std::vector<Access> touched;
    std::vector<at::Tensor> kept, results;
    if (in.defined()) touched.push_back({BytesOf(in), BytesOf(in) + in.nbytes(), false}), kept.push_back(in);
    if (out.defined()) touched.push_back({BytesOf(out), BytesOf(out) + out.nbytes(), true}), kept.push_back(out);
    if (out.defined()) results.push_back(out);
    // One that hears nothing of its peers gives up at the timeout; the device is lost then, as with NCCL's watchdog.
    if (Pace* pace = Engine::Get().pace()) {
      pace->Meet(stream, meeting.key, meeting.size, meeting.form);
    } else {
      Engine::Get().EnqueueEach(stream, name, std::move(touched),
                                [make, name, limit = timeout_ms_, failure = failure_]() -> Run {
        return [run = make(), name, limit, failure, issued = NowMs()] {
          if (failure->Ends() || run()) return true;
          if (NowMs() - issued < limit) return false;
          failure->Set(c10::str("the other ranks did not come within ", limit / 1000, " s in ", name, " (timed out)"));
          return failure->Ends();
        };
      });
    }
    Engine::Get().Record(over, stream);
    return c10::make_intrusive<SoftWork>(over, failure_, std::move(kept), std::move(results),
                                         name == std::string("reduce_scatter"));
  }

  void CheckTensor(const char* name, const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == c10::kPrivateUse1, name, ": a tensor on ", t.device());
    TORCH_CHECK(t.is_contiguous() && t.nbytes() <= kSlot, name, ": not contiguous, or too big");
  }

  WorkPtr Collective(const char* name, const at::Tensor& in, const at::Tensor& out, size_t root, Finish finish,
                     std::vector<int64_t> parts = {}) {  // which ranks need not have as many bytes of
    CheckTensor(name, in);
    CheckTensor(name, out);
    const size_t agreed = parts.empty() ? in.nbytes() : 0;
    const uint64_t form =
        std::hash<std::string>()(std::string(name) + " " + std::to_string(agreed) + " " + std::to_string(root));
    const char *from = BytesOf(in), *to = BytesOf(out);
    return Issue(name, stream_, in, out, {room_->key(), size_, form},
                 [=, room = room_, turns = turn_, rank = static_cast<size_t>(rank_), size = static_cast<size_t>(size_),
                  n = in.nbytes(), gives = out.nbytes() > 0]() -> Run {
      return [=, turn = ++*turns, posted = std::make_shared<bool>(false), told = std::make_shared<bool>(false)] {
        if (!*posted) {
          for (size_t r = 0; r < size; ++r) {
            if (room->flag(r).taken.load() < turn - 1) return false;
          }
          if (n > 0) std::memcpy(room->slot(rank), Real(from), n);
          std::copy(parts.begin(), parts.end(), room->parts(rank));
          room->flag(rank).form.store(form);
          room->flag(rank).posted.store(turn);
          *posted = true;
        }
        for (size_t r = 0; r < size; ++r) {
          if (room->flag(r).posted.load() < turn) return false;
        }
        for (size_t r = 0; r < size; ++r) {
          if (room->flag(r).form.load() == form) continue;
          if (!*told)
            Engine::Get().Report(std::string(name) + " number " + std::to_string(turn) + " of rank " +
                                 std::to_string(rank) + " is another operation on rank " + std::to_string(r));
          *told = true;
          return false;
        }
        if (gives) finish(*room, Real(to));
        room->flag(rank).taken.store(turn);
        return true;
      };
    });
  }

  WorkPtr Message(const char* name, const at::Tensor& t, int from, int to, bool receive) {
    CheckTensor(name, t);
    const size_t pair = room_->Pair(from, to);
    const auto turns = messages_.try_emplace(pair, std::make_shared<uint64_t>(0)).first->second;
    return Issue(name, StreamWith(from, to), receive ? at::Tensor() : t, receive ? t : at::Tensor(),
                 {room_->key() + pair, 2, t.nbytes()},
                 [=, room = room_, n = t.nbytes(), p = BytesOf(t)]() -> Run {
                   return [=, turn = ++*turns] {
                     Flag& flag = room->flag(pair);
                     if (receive) {
                       if (flag.posted.load() < turn) return false;
                       std::memcpy(Real(p), room->slot(pair), n);
                       flag.taken.store(turn);
                     } else {
                       if (flag.taken.load() < turn - 1) return false;
                       std::memcpy(room->slot(pair), Real(p), n);
                       flag.posted.store(turn);
                     }
                     return true;
                   };
                 });
  }

  // Messages of two ranks, in both directions, have a stream of their own.
  int StreamWith(int from, int to) {
    const auto [it, fresh] = pairs_.try_emplace(std::pair{std::min(from, to), std::max(from, to)}, 0);
    if (fresh) it->second = Engine::Get().NewStream();
    return it->second;
  }

  std::shared_ptr<Room> room_;
  int stream_;
  std::map<std::pair<int, int>, int> pairs_;
  double timeout_ms_;
  FailurePtr failure_ = std::make_shared<Failure>();
  std::shared_ptr<uint64_t> turn_ = std::make_shared<uint64_t>(0);  // of collectives
  std::map<size_t, std::shared_ptr<uint64_t>> messages_;            // by pair
};

}  // namespace

void BindGroup(pybind11::module& m) {
  namespace py = pybind11;
  m.def("plant", [](const std::string& what) {
    fault = what == "wait" ? Fault::kWait : what == "start" ? Fault::kStart : Fault::kNone;
  }, "A fault of the process groups: wait, start, or none.");
  py::class_<SoftGroup, c10d::Backend, c10::intrusive_ptr<SoftGroup>>(m, "Group")
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int, double>(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace soft
