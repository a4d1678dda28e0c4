#include "engine.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

namespace soft {

namespace {
thread_local int current_stream = 0;
thread_local int own_depth = 0;
thread_local double own_ms = 0, own_since = 0;
constexpr int kPool = Pace::kStreams - 1;
constexpr int kWorkers = 2;
constexpr double kPatienceMs = 120e3;
constexpr double kAskAgainMs = 0.02;  // of a collective that waits for its peers

void* Map(int protection) {
  void* p = mmap(nullptr, kSpace, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) std::abort();
  return p;
}
}  // namespace

double NowMs() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

OwnTime::OwnTime() {
  if (own_depth++ == 0) own_since = NowMs();
}
OwnTime::~OwnTime() {
  if (--own_depth == 0) own_ms += NowMs() - own_since;
}
double OwnTime::seconds() { return own_ms / 1e3; }

const Space& TheSpace() {
  static const Space space{static_cast<char*>(Map(PROT_NONE)), static_cast<char*>(Map(PROT_READ | PROT_WRITE))};
  return space;
}

int CurrentStream() { return current_stream; }
int ExchangeStream(int stream) { return std::exchange(current_stream, stream); }

Engine& Engine::Get() {
  static Engine* engine = new Engine;  // never destroyed: its threads are not joined
  return *engine;
}

Engine::Engine() {
  streams_.resize(1 + kPool);
  pthread_atfork(nullptr, nullptr, [] { Get().working_ = false; });  // threads stay behind
}

void Engine::Start() {
  working_ = true;
  for (int i = 0; i < kWorkers; ++i) std::thread([this] { Work(); }).detach();
}

void Engine::SetPace(std::unique_ptr<Pace> pace) {
  if (!pace_) SynchronizeAll();  // what paced devices have not done is nothing
  pace_ = std::move(pace);
}

void Engine::SetMode(const Mode& mode) {
  TORCH_CHECK(mode.name == "free" || mode.name == "lockstep" || mode.name == "starve" || mode.name == "nothing",
              "no mode \"", mode.name, "\": free, lockstep, starve, nothing; for paced call pace()");
  SetPace(nullptr);
  Lock lock(mutex_);
  mode_ = mode;
  nothing_ = mode.name == "nothing";
  priority_.clear();
  random_.seed(mode.seed);
  budget_ = 0;
  work_.notify_all();
}

void Engine::Stop() {
  Lock lock(mutex_);
  stopped_ = true;
  work_.notify_all();
  done_.wait_for(lock, std::chrono::seconds(5), [&] {
    return std::none_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.busy; });
  });
}

int Engine::NewStream() {
  Lock lock(mutex_);
  return 1 + (next_pool_++ % kPool);
}

// ---- carrying out ----

bool Engine::Ready(const Stream& s) const {
  if (s.busy || s.queue.empty()) return false;
  const Op& op = s.queue.front();
  return !op.wait || op.wait->done >= op.version;
}

int Engine::Choose(const std::vector<int>& ready) {
  if (mode_.name != "starve") return ready[random_() % ready.size()];
  if (priority_.empty() || random_() % 200 == 0) {
    priority_.resize(streams_.size());
    for (uint64_t& p : priority_) p = random_();
  }
  return *std::max_element(ready.begin(), ready.end(), [&](int a, int b) { return priority_[a] < priority_[b]; });
}

// Carries out the front of one ready stream; false: there is none.
bool Engine::RunOne(Lock& lock) {
  std::vector<int> ready;
  const double now = NowMs();
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (Ready(streams_[i]) && streams_[i].not_before <= now) ready.push_back(static_cast<int>(i));
  }
  if (ready.empty()) return false;
  Stream& s = streams_[static_cast<size_t>(Choose(ready))];
  s.busy = true;
  Op& op = s.queue.front();  // a deque: it stays where it is while others are pushed
  bool over = true;
  if (op.run && op.seq > s.void_until) {
    lock.unlock();
    std::string error;
    try {
      over = op.run();
    } catch (const std::exception& e) {
      error = std::string(op.name) + ": " + e.what();
    }
    lock.lock();
    if (!error.empty()) {  // what comes behind it is not carried out: nobody waits for it any more
      if (error_.empty()) error_ = error.substr(0, error.find("\nException raised"));
      for (Stream& other : streams_) other.void_until = other.issued;
    }
  }
  s.busy = false;
  if (!over) {
    s.not_before = NowMs() + kAskAgainMs;
    return true;
  }
  s.not_before = 0;
  if (op.record) {
    op.record->done = std::max(op.record->done, op.version);
    op.record->ms = NowMs();
  }
  s.finished = op.seq;
  s.queue.pop_front();
  ++executed_;
  return true;
}

void Engine::Work() {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  at::set_num_threads(1);
  Lock lock(mutex_);
  while (!stopped_) {
    const bool exclusive = one_at_a_time();
    if (exclusive && (budget_ == 0 || turn_)) {
      work_.wait(lock);
      continue;
    }
    turn_ = exclusive;
    const bool ran = RunOne(lock);
    if (!exclusive) {
      if (ran) {
        done_.notify_all();
        work_.notify_one();
      } else {
        work_.wait_for(lock, std::chrono::milliseconds(1));
      }
      continue;
    }
    turn_ = false;
    if (ran && budget_ > 0) --budget_;
    if (!ran) {
      if (std::any_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.not_before > 0; })) {
        work_.wait_for(lock, std::chrono::microseconds(20));  // peers may still come
        continue;
      }
      idle_ = true;
      budget_ = 0;
    }
    if (budget_ == 0) done_.notify_all();
  }
}

void Engine::Pump(Lock& lock, int64_t ops) {
  if (ops == 0 || stopped_) return;
  budget_ = ops;
  idle_ = false;
  work_.notify_all();
  done_.wait(lock, [&] { return budget_ == 0 || stopped_; });
}

template <typename Until>
void Engine::Wait(Lock& lock, Until until) {
  const double deadline = NowMs() + kPatienceMs;
  if (!until()) ++waits_;
  while (!until() && !stopped_ && error_.empty()) {  // what comes behind an error may never be over
    if (one_at_a_time()) {
      Pump(lock, 1);
      TORCH_CHECK(!idle_ || until(), "soft device: the host waits for what no stream will do");
    } else {
      done_.wait_for(lock, std::chrono::milliseconds(100));
    }
    TORCH_CHECK(NowMs() < deadline, "soft device: the host waited for two minutes");
  }
  if (error_.empty()) return;
  done_.wait_for(lock, std::chrono::seconds(5), [&] {  // the host may free what ops under way write
    return std::none_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.busy; });
  });
  TORCH_CHECK(false, "soft device error: ", std::exchange(error_, ""));
}

// ---- issuing ----

void Engine::Push(int stream, Op op, Lock& lock) {
  if (nothing_) {
    if (op.record) op.record->done = op.version;
    streams_.at(static_cast<size_t>(stream)).finished = op.seq;
    return;
  }
  if (!working_) Start();
  streams_.at(static_cast<size_t>(stream)).queue.push_back(std::move(op));
  if (!one_at_a_time()) {
    work_.notify_one();
    return;
  }
  int64_t ops = 0;
  while (ops < 16 && std::uniform_real_distribution<>()(random_) < mode_.run) ++ops;
  Pump(lock, ops);
}

void Engine::Issue(int stream, const char* name, const std::vector<Access>& touched, Run run, Lock& lock) {
  if (const int index = Captured(stream); index >= 0) {
    return Note(index, name, touched, [shared = std::make_shared<Run>(std::move(run))] {
      return Run([shared] { return (*shared)(); });
    });
  }
  Stream& s = streams_.at(static_cast<size_t>(stream));
  s.clock.Join(host_);
  const uint64_t seq = ++s.issued;
  s.clock.Set(stream, seq);
  ++issued_;
  --left_;
  if (nothing_) return Push(stream, {name, nullptr, seq, nullptr, nullptr, 0}, lock);
  order_.Check(stream, seq, s.clock, name, touched, [this](const std::string& text) {
    ++count_;
    if (reports_.size() < 1000) reports_.push_back(text);
  });
  Push(stream, {name, std::move(run), seq, nullptr, nullptr, 0}, lock);
}

void Engine::IssueLater(int stream, Lock& lock) {
  for (Later& l : std::exchange(streams_.at(static_cast<size_t>(stream)).later, {}))
    Issue(stream, l.name, {l.touched}, std::move(l.run), lock);
}

void Engine::Lose(const std::string& text, int64_t after) {
  Lock lock(mutex_);
  lost_ = text;
  left_ = after;
}

void Engine::CheckHere() {
  Lock lock(mutex_);
  TORCH_CHECK(lost_.empty() || left_ > 0, "soft device error: ", lost_);
}

void Engine::Enqueue(int stream, const char* name, std::vector<Access> touched, Run run) {
  CheckHere();
  if (pace_) {
    pace_->Work(stream);
    return;
  }
  Lock lock(mutex_);
  IssueLater(stream, lock);
  Issue(stream, name, touched, std::move(run), lock);
}

void Engine::EnqueueEach(int stream, const char* name, std::vector<Access> touched, Make make) {
  Lock lock(mutex_);
  IssueLater(stream, lock);
  const int index = Captured(stream);
  if (index >= 0) return Note(index, name, std::move(touched), std::move(make));
  Issue(stream, name, touched, make(), lock);
}

void Engine::EnqueueBeforeNext(int stream, const char* name, Access touched, Run run) {
  if (pace_) return;
  Lock lock(mutex_);
  streams_.at(static_cast<size_t>(stream)).later.push_back({name, touched, std::move(run)});
}

void Engine::FlushBeforeNext(int stream) {
  Lock lock(mutex_);
  IssueLater(stream, lock);
}

void Engine::Record(const EventPtr& event, int stream) {
  if (pace_) {
    event->done = ++event->issued;  // for other modes
    event->stream = stream;
    event->number = pace_->Mark(stream);
    return;
  }
  Lock lock(mutex_);
  RecordOn(event, stream, lock);
}

void Engine::RecordOn(const EventPtr& event, int stream, Lock& lock) {
  const int index = Captured(stream);
  event->capture = 0;
  if (index >= 0) return NoteRecord(event, index);
  Stream& s = streams_.at(static_cast<size_t>(stream));
  s.clock.Join(host_);
  const uint64_t seq = ++s.issued;
  s.clock.Set(stream, seq);
  event->clock = s.clock;
  ++issued_;
  Push(stream, {"record", nullptr, seq, nullptr, event, ++event->issued}, lock);
}

void Engine::Block(const EventPtr& event, int stream) {
  if (pace_) {
    if (event->issued > 0) pace_->Wait(stream, event->stream, event->number);
    return;
  }
  Lock lock(mutex_);
  BlockOn(event, stream, lock);
}

void Engine::BlockOn(const EventPtr& event, int stream, Lock& lock) {
  if (event->capture != 0) return NoteWait(event, stream, lock);
  if (event->issued == 0) return;
  if (Captured(stream) >= 0) Refuse("a stream waits for an event that was recorded outside of it");
  Stream& s = streams_.at(static_cast<size_t>(stream));
  s.clock.Join(event->clock);
  ++issued_;
  Push(stream, {"wait", nullptr, ++s.issued, event, nullptr, event->issued}, lock);
}

// ---- what the host learns ----

void Engine::Learn(const Clock& clock) {
  host_.Join(clock);
  if (learned_) learned_(host_);
}

void Engine::OnLearned(std::function<void(const Clock&)> call) {
  Lock lock(mutex_);
  learned_ = std::move(call);
}

bool Engine::Query(const EventPtr& event, bool teach) {
  if (pace_) {
    if (!pace_->Over(event->stream, event->number)) return false;
    if (event->number > 0) event->ms = pace_->EndedMs(event->stream, event->number);
    return true;
  }
  Lock lock(mutex_);
  if (event->capture != 0) Refuse("the host asks for an event that was captured");
  if (teach && event->done < event->issued && one_at_a_time()) Pump(lock, 1 + random_() % 4);  // who polls gets on
  const bool over = event->done >= event->issued;
  if (over && teach) Learn(event->clock);
  return over;
}

bool Engine::QueryStream(int stream) {
  if (pace_) return pace_->Over(stream, pace_->Issued(stream));
  Lock lock(mutex_);
  if (Captured(stream) >= 0) Refuse("the host asks for a stream that is captured");
  Stream& s = streams_.at(static_cast<size_t>(stream));
  if (s.finished < s.issued && one_at_a_time()) Pump(lock, 1 + random_() % 4);
  const bool over = s.finished >= s.issued;
  if (over) Learn(s.clock);
  return over;
}

void Engine::Synchronize(int stream) {
  if (pace_) return pace_->Await(stream, pace_->Issued(stream));
  Lock lock(mutex_);
  if (Captured(stream) >= 0) Refuse("the host waits for a stream that is captured");
  Stream& s = streams_.at(static_cast<size_t>(stream));
  const uint64_t seq = s.issued;
  const Clock clock = s.clock;
  Wait(lock, [&] { return s.finished >= seq; });
  Learn(clock);
}

void Engine::Synchronize(const EventPtr& event) {
  if (pace_) return pace_->Await(event->stream, event->number);
  Lock lock(mutex_);
  if (event->capture != 0) Refuse("the host waits for an event that was captured");
  const uint64_t version = event->issued;
  const Clock clock = event->clock;
  Wait(lock, [&] { return event->done >= version; });
  Learn(clock);
}

void Engine::SynchronizeAll() {
  const size_t count = pace_ ? Pace::kStreams : streams_.size();  // without those of graphs: they are not paced
  for (size_t i = 0; i < count; ++i) Synchronize(static_cast<int>(i));
}

uint64_t Engine::Issued(int stream) {
  if (pace_) return pace_->Issued(stream);
  Lock lock(mutex_);
  return streams_.at(static_cast<size_t>(stream)).issued;
}

bool Engine::Finished(int stream, uint64_t seq) {
  if (pace_) return pace_->Over(stream, seq);
  Lock lock(mutex_);
  return streams_.at(static_cast<size_t>(stream)).finished >= seq;
}

void Engine::Forget(const char* begin, const char* end) {
  Lock lock(mutex_);
  order_.Forget(begin, end);
}

void Engine::Report(const std::string& text) {
  Lock lock(mutex_);
  ++count_;
  reports_.push_back(text);
}

void Engine::Fail(const std::string& text) {
  Lock lock(mutex_);
  if (error_.empty()) error_ = text;
}

std::vector<std::string> Engine::TakeReports() {
  Lock lock(mutex_);
  return std::exchange(reports_, {});
}
int64_t Engine::reports() {
  Lock lock(mutex_);
  return count_;
}
int64_t Engine::executed() {
  Lock lock(mutex_);
  return executed_;
}
int64_t Engine::waits() {
  if (pace_) return pace_->waits();
  Lock lock(mutex_);
  return waits_;
}
int64_t Engine::issued() {
  Lock lock(mutex_);
  return issued_;
}

}  // namespace soft
