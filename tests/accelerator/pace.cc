// The model of pace.h: a shared file, its lock, and the clock that goes from event to event.
#include "pace.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

namespace soft {

namespace {

constexpr int kRanks = 16, kMeetings = 256;
constexpr uint64_t kRing = 1 << 14, kLog = 1 << 15;  // what a stream has been given at most; what is remembered
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kDone = 1e-3;          // ns: less than this is none left
constexpr double kLookNs = 0.3e6;       // a host that waits looks no more often
constexpr double kPatienceNs = 120e9;

double RealNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}
void SleepNs(double ns) {
  const auto whole = static_cast<int64_t>(ns);
  const timespec t{whole / 1'000'000'000, whole % 1'000'000'000};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &t, nullptr);
}

}  // namespace

// What runs, and how much of it is left.
struct Left {
  Cost cost;
  double latency_ns = 0, work_ns = 0;
  bool active() const { return latency_ns <= kDone; }  // past its latency: it uses links, and is slowed
  bool over() const { return active() && work_ns <= kDone; }
};
inline Left LeftOf(const Cost& cost) { return {cost, cost.latency_ns, cost.work_ns}; }

// What a rank is doing.
struct Busy {
  int set = 0;
  int sending[2] = {0, 0}, receiving[2] = {0, 0};
};

struct Pace::Given {
  enum Kind : int32_t { kWork, kWait, kMeet } kind = kWork;
  int32_t op = -1;
  Cost cost;
  int32_t on = 0, meeting = 0, size = 0;
  uint64_t upto = 0, form = 0;
  double begin_ns = 0, end_ns = 0;
};

struct Model {
  struct Stream {
    uint64_t issued, finished;
    bool running;  // the first that is not finished: work, or it stands in a meeting
    Left left;     // of work
    Pace::Given given[kRing];
    Pace::Given& At(uint64_t number) { return given[(number - 1) % kRing]; }  // they count from 1
  };
  struct Meeting {
    uint64_t key, form;
    uint32_t here;  // ranks that have come, a bit each
    int32_t stream[kRanks];
    bool running;
    double begin_ns;
    Left left;
  };
  struct Rank {
    int32_t used;  // streams
    bool left;   // it takes no more part
    bool waits;  // its host, for this:
    int32_t wait_stream;
    uint64_t wait_number, logged;
    Stream streams[Pace::kStreams];
    Stream& On(int stream) {
      TORCH_CHECK(stream >= 0 && stream < Pace::kStreams, "soft device, paced: stream ", stream, " is a graph's own");
      return streams[stream];
    }
    Paced log[kLog];
  };

  pthread_mutex_t mutex;
  bool made;
  int32_t ranks, meetings;
  double now_ns;
  Slowdown slowdown;
  char fault[400];
  Meeting meeting[kMeetings];
  Rank rank[kRanks];
  Busy busy[kRanks];

  // ---- what begins and ends at once ----

  void End(Rank& r, int s, double begin_ns) {
    Stream& stream = r.streams[s];
    Pace::Given& given = stream.At(++stream.finished);
    given.begin_ns = begin_ns;
    given.end_ns = now_ns;
    stream.running = false;
    if (given.cost.kind != Cost::kNone) r.log[r.logged++ % kLog] = {given.op, s, begin_ns, now_ns};
  }

  void EndMeeting(Meeting& m) {
    for (int r = 0; r < ranks; ++r) {
      if ((m.here >> r & 1) != 0) End(rank[r], m.stream[r], m.begin_ns);
    }
    m.here = 0;
    m.running = false;
  }

  void Arrive(int r, int s, const Pace::Given& given) {
    Meeting& m = meeting[given.meeting];
    if (m.here == 0) m.form = given.form, m.left = LeftOf(given.cost);
    if (m.form != given.form && fault[0] == 0) {
      snprintf(fault, sizeof fault, "rank %d meets the others of its group in another operation", r);
    }
    if (m.left.cost.kind == Cost::kNone) m.left = LeftOf(given.cost);
    m.here |= 1u << r;
    m.stream[r] = s;
    rank[r].streams[s].running = true;
    if (std::popcount(m.here) < given.size) return;
    m.running = true;
    m.begin_ns = now_ns;
    if (m.left.over()) EndMeeting(m);
  }

  // Goes on with a stream as far as no time passes; whether it did.
  bool Go(int r, int s) {
    Stream& stream = rank[r].streams[s];
    const uint64_t before = stream.finished;
    while (!stream.running && stream.finished < stream.issued) {
      Pace::Given& given = stream.At(stream.finished + 1);
      if (given.kind == Pace::Given::kWait && rank[r].streams[given.on].finished < given.upto) break;
      if (given.kind == Pace::Given::kMeet) {
        Arrive(r, s, given);
        return true;
      }
      stream.left = LeftOf(given.cost);
      if (stream.left.over()) {
        End(rank[r], s, now_ns);
      } else {
        given.begin_ns = now_ns;
        stream.running = true;
      }
    }
    return stream.finished != before;
  }

  void Settle() {
    for (bool changed = true; changed;) {
      changed = false;
      for (int r = 0; r < ranks; ++r) {
        for (int s = 0; s < rank[r].used; ++s) changed |= Go(r, s);
      }
    }
  }

  // ---- time ----

  // Calls f with everything that runs: (what is left, the ranks it is on as bits).
  template <typename F>
  void ForRunning(F&& f) {
    for (int r = 0; r < ranks; ++r) {
      for (int s = 0; s < rank[r].used; ++s) {
        Stream& stream = rank[r].streams[s];
        if (stream.running && !stream.left.over()) f(stream.left, 1u << r);
      }
    }
    for (int i = 0; i < meetings; ++i) {
      if (meeting[i].running) f(meeting[i].left, meeting[i].here);
    }
  }

  void FindBusy() {
    std::fill(busy, busy + ranks, Busy());
    ForRunning([&](const Left& left, uint32_t on) {
      if (!left.active()) return;
      const Cost& cost = left.cost;
      const int level = cost.kind == Cost::kBetweenNodes;
      for (int r = 0; r < ranks; ++r) {
        if ((on >> r & 1) == 0) continue;
        busy[r].set |= 1 << ClassOf(cost);
        if (ClassOf(cost) == 1) busy[r].sending[level] += cost.sends, busy[r].receiving[level] += cost.receives;
      }
    });
  }
  static int ClassOf(const Cost& cost) {
    return cost.kind == Cost::kCompute ? 0 : cost.kind == Cost::kToDevice ? 2 : cost.kind == Cost::kToHost ? 3 : 1;
  }

  // How many times longer than alone it takes now.
  double SlowOf(const Left& left, uint32_t on) const {
    const int kind = ClassOf(left.cost), level = left.cost.kind == Cost::kBetweenNodes;
    double slow = 1;
    for (int r = 0; r < ranks; ++r) {
      if ((on >> r & 1) == 0) continue;
      double share = 1;
      if (kind == 1) {
        share = std::max({1, left.cost.sends ? busy[r].sending[level] : 1, left.cost.receives ? busy[r].receiving[level] : 1});
      } else if (kind >= 2) {
        int copies = 0;
        for (int other = 0; other < ranks; ++other)
          copies += other / slowdown.per_node == r / slowdown.per_node && (busy[other].set >> kind & 1) != 0;
        share = std::max(1.0, copies * slowdown.share[static_cast<size_t>(kind - 2)]);
      }
      slow = std::max(slow, share * slowdown.factor[static_cast<size_t>(busy[r].set)][static_cast<size_t>(kind)]);
    }
    return slow;
  }

  double NextNs() {
    FindBusy();
    double next = kNever;
    ForRunning([&](const Left& left, uint32_t on) {
      next = std::min(next, left.active() ? left.work_ns * SlowOf(left, on) : left.latency_ns);
    });
    return next;
  }

  // Carries on by a time in which nothing ends before its end.
  void Pass(double ns) {
    ForRunning([&](Left& left, uint32_t on) {
      if (left.active()) {
        left.work_ns -= ns / SlowOf(left, on);
      } else {
        left.latency_ns -= ns;
      }
    });
    now_ns += ns;
    for (int r = 0; r < ranks; ++r) {
      for (int s = 0; s < rank[r].used; ++s) {
        Stream& stream = rank[r].streams[s];
        if (stream.running && stream.finished < stream.issued && stream.At(stream.finished + 1).kind == Pace::Given::kWork &&
            stream.left.over())
          End(rank[r], s, stream.At(stream.finished + 1).begin_ns);
      }
    }
    for (int i = 0; i < meetings; ++i) {
      if (meeting[i].running && meeting[i].left.over()) EndMeeting(meeting[i]);
    }
    Settle();
  }

  void Advance(double until_ns) {
    for (double next = NextNs(); now_ns + next <= until_ns; next = NextNs()) Pass(next);
    if (until_ns > now_ns) Pass(until_ns - now_ns);
  }

  // Whether a rank's host does nothing before something has happened on its device.
  bool Idle(const Rank& r) const {
    return r.left || (r.waits && r.streams[r.wait_stream].finished < r.wait_number);
  }

  // Virtual time: to the next event if all hosts wait, and for what is still to come; whether it went.
  bool Jump() {
    for (int r = 0; r < ranks; ++r) {
      if (!Idle(rank[r])) return false;
    }
    const double next = NextNs();
    if (next == kNever) {
      if (fault[0] == 0) snprintf(fault, sizeof fault, "all hosts wait for what no stream will do");
      return false;
    }
    Pass(next);
    return true;
  }
};

// Takes the lock, and gives it back.
class Pace::Locked {
 public:
  explicit Locked(Model* model) : model_(model) {
    const int error = pthread_mutex_lock(&model_->mutex);
    if (error == EOWNERDEAD) {
      pthread_mutex_consistent(&model_->mutex);
      snprintf(model_->fault, sizeof model_->fault, "a rank ended while it carried the model on");
    }
    if (model_->fault[0] != 0) {
      const std::string fault = model_->fault;
      pthread_mutex_unlock(&model_->mutex);
      TORCH_CHECK(false, "soft device, paced: ", fault);
    }
  }
  ~Locked() { pthread_mutex_unlock(&model_->mutex); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  Model* model_;
};

Pace::Pace(const std::string& file, int rank, int ranks, bool virtual_time) : rank_(rank), virtual_(virtual_time) {
  TORCH_CHECK(ranks >= 1 && ranks <= kRanks && rank >= 0 && rank < ranks, "soft device, paced: rank ", rank, " of ", ranks,
              "; there may be ", kRanks);
  const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  TORCH_CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0 && ftruncate(fd, sizeof(Model)) == 0, "soft device, paced: ", file, ": ",
              strerror(errno));
  void* p = mmap(nullptr, sizeof(Model), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED) close(fd);
  TORCH_CHECK(p != MAP_FAILED, "soft device, paced: ", file, " cannot be mapped");
  model_ = static_cast<Model*>(p);
  if (!model_->made) {  // a new file is zeros
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&model_->mutex, &attributes);
    model_->slowdown = Slowdown();
    model_->ranks = ranks;
    model_->now_ns = virtual_ ? 0 : RealNs();
    model_->made = true;
  }
  flock(fd, LOCK_UN);  // closing does not give it back: the mapping keeps the file open
  close(fd);
}

Pace::~Pace() {
  if (pthread_mutex_lock(&model_->mutex) == EOWNERDEAD) pthread_mutex_consistent(&model_->mutex);
  model_->rank[rank_].left = true;
  pthread_mutex_unlock(&model_->mutex);
  munmap(model_, sizeof(Model));
}

void Pace::Program(std::vector<Cost> costs, const Slowdown& slowdown, int32_t (*current_op)()) {
  const Locked locked(model_);
  model_->slowdown = slowdown;
  costs_ = std::move(costs);
  current_op_ = current_op;
  op_ = -1;
}

Cost Pace::Take(bool meets) {
  const int32_t op = current_op_ == nullptr ? -1 : current_op_();
  if (op != op_) op_ = op, taken_ = false;
  if (op < 0 || taken_ || static_cast<size_t>(op) >= costs_.size()) return {};
  const Cost& cost = costs_[static_cast<size_t>(op)];
  const bool transfer = cost.kind == Cost::kWithinNode || cost.kind == Cost::kBetweenNodes;
  if (cost.kind == Cost::kNone || transfer != meets) return {};
  taken_ = true;
  return cost;
}

uint64_t Pace::Give(int stream, const Given& given) {
  const Locked locked(model_);
  if (!virtual_) model_->Advance(RealNs());
  Model::Rank& rank = model_->rank[rank_];
  Model::Stream& to = rank.On(stream);
  TORCH_CHECK(to.issued - to.finished < kRing, "soft device, paced: a stream was given ", kRing,
              " ops that have not run: wait for it now and then");
  rank.used = std::max(rank.used, stream + 1);
  to.At(++to.issued) = given;
  model_->Settle();
  return to.issued;
}

uint64_t Pace::Work(int stream) {
  Given given;
  given.cost = Take(/*meets=*/false);
  given.op = op_;
  return Give(stream, given);
}

uint64_t Pace::Mark(int stream) { return Give(stream, {}); }

uint64_t Pace::Wait(int stream, int on, uint64_t upto) {
  Given given;
  given.kind = Given::kWait;
  given.on = on;
  given.upto = upto;
  return Give(stream, given);
}

uint64_t Pace::Meet(int stream, uint64_t key, int size, uint64_t form) {
  Given given;
  given.kind = Given::kMeet;
  given.cost = Take(/*meets=*/true);
  given.op = op_;
  given.size = size;
  given.form = form;
  {
    const Locked locked(model_);
    while (given.meeting < model_->meetings && model_->meeting[given.meeting].key != key) ++given.meeting;
    TORCH_CHECK(given.meeting < kMeetings, "soft device, paced: more than ", kMeetings, " groups");
    if (given.meeting == model_->meetings) model_->meeting[model_->meetings++].key = key;
  }
  return Give(stream, given);
}

bool Pace::Over(int stream, uint64_t number) {
  const Locked locked(model_);
  if (!virtual_) model_->Advance(RealNs());
  return model_->rank[rank_].On(stream).finished >= number;
}

void Pace::Await(int stream, uint64_t number) {
  const double give_up = RealNs() + kPatienceNs;
  Model::Rank& rank = model_->rank[rank_];
  Model::Stream& on = rank.On(stream);
  for (bool first = true;; first = false) {
    double sleep = kLookNs;
    {
      const Locked locked(model_);
      if (!virtual_) model_->Advance(RealNs());
      rank.wait_stream = stream;
      rank.wait_number = number;
      rank.waits = true;
      while (virtual_ && on.finished < number && model_->Jump()) continue;
      if (on.finished >= number) {
        rank.waits = false;
        return;
      }
      waits_ += first;
      // It cannot come earlier than after all that is before it.
      double before = on.running ? on.left.latency_ns + on.left.work_ns : 0;
      for (uint64_t i = on.finished + 1 + on.running; i <= number; ++i)
        before += on.At(i).cost.latency_ns + on.At(i).cost.work_ns;
      if (!virtual_) sleep = std::max(sleep, before);
    }
    TORCH_CHECK(RealNs() < give_up, "soft device, paced: the host waited for two minutes");
    SleepNs(sleep);
  }
}

uint64_t Pace::Issued(int stream) {
  const Locked locked(model_);
  return model_->rank[rank_].On(stream).issued;
}

double Pace::EndedMs(int stream, uint64_t number) {
  const Locked locked(model_);
  Model::Stream& on = model_->rank[rank_].On(stream);
  TORCH_CHECK(number <= on.finished && number + kRing > on.issued, "soft device, paced: that event is too long ago");
  return on.At(number).end_ns / 1e6;
}

double Pace::NowNs() {
  const Locked locked(model_);
  if (!virtual_) model_->Advance(RealNs());
  return model_->now_ns;
}

std::vector<Paced> Pace::TakePaced() {
  const Locked locked(model_);
  Model::Rank& rank = model_->rank[rank_];
  std::vector<Paced> found;
  for (uint64_t i = std::max(seen_, rank.logged - std::min(rank.logged, kLog)); i < rank.logged; ++i)
    found.push_back(rank.log[i % kLog]);
  seen_ = rank.logged;
  return found;
}

}  // namespace soft
